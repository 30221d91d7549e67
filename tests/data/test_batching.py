from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.errors import InputError
from pipeline.data import batched, static_batch
from pipeline.records import TensorSpec
from tests.data.specs import IDS, MASK, ROW


def _samples(*shapes: tuple[int, ...]):
    return [(number, {"x": np.full(shape, number, np.float32)}) for number, shape in enumerate(shapes)]


def test_ragged_last_batch_is_used() -> None:
    batches = list(batched(_samples(*[(3,)] * 7), 3, [ROW]))
    assert [batch.samples for batch in batches] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [batch.index for batch in batches] == [0, 1, 2]
    assert batches[1].feeds["x"].tolist() == [[3.0] * 3, [4.0] * 3, [5.0] * 3]


def test_only_neighbours_of_equal_shape_share_a_batch() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", "length"))
    batches = list(batched(_samples((2,), (2,), (5,), (2,)), 8, [spec], start_index=4))
    assert [(batch.index, batch.samples) for batch in batches] == [(4, (0, 1)), (5, (2,)), (6, (3,))]


def test_sample_numbers_need_not_be_consecutive() -> None:
    samples = [(number, {"x": np.zeros(3, np.float32)}) for number in (2, 9, 11)]
    assert [batch.samples for batch in batched(samples, 2, [ROW])] == [(2, 9), (11,)]


def test_no_samples_give_no_batch() -> None:
    assert list(batched([], 4, [ROW])) == []


def test_static_batch_replaces_the_batch_size() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 3))
    assert [batch.samples for batch in batched(_samples(*[(3,)] * 3), 8, [spec])] == [(0,), (1,), (2,)]


def test_samples_that_do_not_fill_a_static_batch_are_refused_not_dropped() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(2, 3))
    stream = batched(_samples(*[(3,)] * 3), 8, [spec])
    assert next(stream).samples == (0, 1)
    with pytest.raises(InputError, match=r"static batch of 2 and batch 1 has only 1 samples") as caught:
        next(stream)
    assert caught.value.remedy is not None
    assert "multiple of 2" in caught.value.remedy


def test_static_batch_of_several_inputs() -> None:
    fixed = TensorSpec(name="y", dtype="float32", shape=(4, 3))
    assert static_batch([IDS, MASK]) is None
    assert static_batch([IDS, fixed]) == 4
    assert static_batch([TensorSpec(name="z", dtype="float32", shape=None)]) is None


def test_inputs_without_a_common_batch_are_refused() -> None:
    inputs = [TensorSpec(name=name, dtype="float32", shape=(size, 3)) for name, size in (("a", 2), ("b", 5))]
    with pytest.raises(InputError, match=r"'a' has a first dimension of 2, 'b' of 5"):
        static_batch(inputs)


def test_scalar_input_is_refused() -> None:
    with pytest.raises(InputError, match="'threshold' is a scalar and has no batch axis"):
        static_batch([TensorSpec(name="threshold", dtype="float32", shape=())])
