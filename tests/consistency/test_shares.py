from __future__ import annotations

import numpy as np
import pytest

from pipeline.consistency.shares import SHARDS, assign, batch_samples, rank_batches
from pipeline.core.errors import InputError
from pipeline.data import batched
from pipeline.data.arrays import NpyFile
from pipeline.records import TensorSpec

FIXED = (TensorSpec(name="x", dtype="float32", shape=("N", 3)),)
DYNAMIC = (TensorSpec(name="x", dtype="float32", shape=("N", "L")),)


@pytest.fixture
def source(tmp_path) -> NpyFile:
    np.save(tmp_path / "x.npy", np.arange(60, dtype=np.float32).reshape(20, 3))
    return NpyFile(tmp_path / "x.npy", FIXED)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("batches", "size"), [(0, 2), (1, 4), (7, 3), (64, 8), (10, 10)])
def test_every_batch_is_in_one_rank_and_none_has_two_more_than_another(shard: str, batches: int, size: int) -> None:
    shares = assign(batches, size, shard)
    assert sorted(index for share in shares for index in share) == list(range(batches))
    assert all(list(share) == sorted(share) for share in shares)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


def test_the_shard_orders_differ() -> None:
    assert len({str(assign(40, 3, shard)) for shard in SHARDS}) == len(SHARDS)


def test_unknown_shard_order() -> None:
    with pytest.raises(InputError, match="unknown shard order 'block'; did you mean 'blocks'"):
        assign(4, 2, "block")


def test_batches_known_beforehand() -> None:
    assert batch_samples([5, 1, 9, 3, 7], 2, FIXED) == [(1, 3), (5, 7), (9,)]
    static = (TensorSpec(name="x", dtype="float32", shape=(5, 3)),)
    assert batch_samples(range(10), 2, static) == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]
    assert batch_samples(range(10), 2, DYNAMIC) is None


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("inputs", [FIXED, DYNAMIC], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_ranks_batches_are_those_of_one_process(source: NpyFile, shard: str, inputs, size: int) -> None:
    chosen = [0, 1, 2, 4, 5, 8, 9, 10, 13, 17, 19]
    if inputs is DYNAMIC and shard != "cyclic":
        with pytest.raises(InputError, match=f"the shard order '{shard}' needs samples of one shape"):
            list(rank_batches(source, chosen, 3, inputs, rank=0, size=size, shard=shard))
        return
    alone = {batch.index: batch for batch in batched(source.read(frozenset(chosen).__contains__), 3, inputs)}
    together = {}
    for rank in range(size):
        for batch in rank_batches(source, chosen, 3, inputs, rank=rank, size=size, shard=shard):
            assert batch.index not in together
            together[batch.index] = batch
    assert sorted(together) == sorted(alone)
    for index, batch in together.items():
        assert batch.samples == alone[index].samples
        assert np.array_equal(batch.feeds["x"], alone[index].feeds["x"])


def test_only_the_own_samples_are_read(source: NpyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = source.read

    def spying(wanted):
        for number, sample in read(wanted):
            asked.append(number)
            yield number, sample

    monkeypatch.setattr(source, "read", spying)
    list(rank_batches(source, range(20), 4, FIXED, rank=1, size=2))
    assert asked == [4, 5, 6, 7, 12, 13, 14, 15]
