"""The merge, without processes: what 64 ranks would do, in several shapes of tree."""

from __future__ import annotations

import functools
import random

import pytest

from pipeline.consistency.exchange import merge_all, merge_pair, tree_steps
from pipeline.consistency.shares import SHARDS, assign
from pipeline.consistency.wire import digest_statistics, pack, unpack
from pipeline.core.errors import InputError
from tests.consistency.statistics import NAMES, of_batches

BATCHES = 70


@pytest.fixture(scope="module")
def whole() -> str:
    return digest_statistics(of_batches(range(BATCHES)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 64, 1000])
def test_every_rank_reaches_rank_0_once(size: int) -> None:
    steps = tree_steps(size)
    assert len(steps) == (size - 1).bit_length()
    senders = [sender for step in steps for _, sender in step]
    assert sorted(senders) == list(range(1, size))
    for number, step in enumerate(steps):
        later = {rank for after in steps[number:] for pair in after for rank in pair}
        done = {sender for before in steps[:number] for _, sender in before}
        assert not later & done  # who has handed its part on is out
        busy = [rank for pair in step for rank in pair]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_any_number_of_ranks_and_any_assignment_gives_the_same_bits(size: int, shard: str, whole: str) -> None:
    parts = [of_batches(list(batches)) for batches in assign(BATCHES, size, shard)]
    assert digest_statistics(merge_all(parts, merge_pair)) == whole


def test_any_tree_gives_the_same_bits(whole: str) -> None:
    parts = [of_batches(list(batches)) for batches in assign(BATCHES, 64, "scattered")]
    assert digest_statistics(functools.reduce(merge_pair, parts)) == whole  # a chain
    assert digest_statistics(functools.reduce(merge_pair, reversed(parts))) == whole
    generator = random.Random(7)
    for _ in range(3):
        pool = [unpack(pack(part, NAMES), NAMES) for part in parts]
        while len(pool) > 1:
            first, second = (pool.pop(generator.randrange(len(pool))) for _ in range(2))
            pool.append(merge_pair(first, second))
        assert digest_statistics(pool[0]) == whole


def test_a_batch_in_two_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="batch 3 is in both"):
        merge_all([of_batches([1, 3]), of_batches([3, 4])], merge_pair)
