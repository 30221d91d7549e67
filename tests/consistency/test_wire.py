from __future__ import annotations

import numpy as np
import pytest

from calibrators.accumulate import add_batch
from calibrators.statistics import TensorStatistics
from pipeline.consistency.wire import digest_statistics, pack, unpack
from pipeline.core.errors import ToolError
from tests.consistency.statistics import NAMES, of_batches


def test_every_bit_comes_back() -> None:
    sent = of_batches(range(6))
    assert unpack(pack(sent, NAMES), NAMES) == sent
    assert digest_statistics(unpack(pack(sent, NAMES), NAMES)) == digest_statistics(sent)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(0, np.float32),
        np.zeros(7, np.float32),
        np.array([1e30], np.float32),
        np.array([np.nan, np.inf, -np.inf, 1.0], np.float32),
        np.array([1e-42, -1e-45], np.float32),
    ],
    ids=["empty", "zeros", "one", "not finite", "denormal"],
)
def test_degenerate_tensors(values: np.ndarray) -> None:
    statistics = TensorStatistics()
    add_batch(statistics, values, 3)
    assert unpack(pack({"x": statistics}, ["x"]), ["x"]) == {"x": statistics}


def test_never_updated() -> None:
    assert unpack(pack({"x": TensorStatistics()}, ["x"]), ["x"]) == {"x": TensorStatistics()}


@pytest.mark.parametrize("count", [255, 256, 65535, 65536, 2**31, 2**32, 2**33 + 5, 2**62])
def test_counts_of_every_width(count: int) -> None:
    statistics = TensorStatistics()
    add_batch(statistics, np.ones(1, np.float32), 0)
    statistics.bins *= count
    statistics.elements = count
    assert unpack(pack({"x": statistics}, ["x"]), ["x"]) == {"x": statistics}


def test_digest_depends_on_name_and_value() -> None:
    one = of_batches([0])
    assert digest_statistics(one) == digest_statistics(dict(reversed(one.items())))
    assert digest_statistics(one) != digest_statistics(of_batches([1]))
    assert digest_statistics({"x": one["a"]}) != digest_statistics({"y": one["a"]})


def test_no_damage_changes_a_value_unnoticed() -> None:
    sent = of_batches([0, 1])
    message = pack(sent, NAMES)
    noticed = 0
    for at in range(0, len(message), max(1, len(message) // 97)):
        damaged = bytearray(message)
        damaged[at] ^= 0x10
        try:
            received = unpack(bytes(damaged), NAMES)
        except ToolError:
            noticed += 1
        else:
            assert received == sent  # a bit that pads a stream means nothing
    assert noticed > 90


def test_a_message_of_other_tensors() -> None:
    message = pack(of_batches([0]), NAMES)
    with pytest.raises(ToolError, match="bytes follow the last tensor"):
        unpack(message, NAMES[:2])
    with pytest.raises(ToolError, match="damaged at tensor 'd'"):
        unpack(message, [*NAMES, "d"])
