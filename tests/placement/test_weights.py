"""Scales and integers of weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import InputError
from pipeline.placement.weights import dequantize_weights, quantize_weights, weight_amax, weight_scales


def balanced(row: np.ndarray, scale: float) -> np.ndarray:
    """The rounding by its definition, one weight after the other."""
    exact = row.astype(np.float64) / np.float64(np.float32(scale))
    steps = np.array([min(max(int(np.rint(value)), -127), 127) for value in exact])
    total = float((exact - steps).sum())
    sign = -1 if total < 0 else 1
    errors = [(sign * (value - step), -index) for index, (value, step) in enumerate(zip(exact, steps, strict=True))]
    allowed = [entry for entry in errors if entry[0] > 0 and abs(steps[-entry[1]] + sign) <= 127]
    for _, index in sorted(allowed, reverse=True)[: int(np.rint(abs(total)))]:
        steps[-index] += sign
    return steps


def test_amax_along_each_axis() -> None:
    w = np.array([[[1.0, -4.0], [2.0, 0.5]], [[-3.0, 0.0], [0.25, 8.0]]], np.float32)
    assert weight_amax(w, 0).tolist() == [4.0, 8.0]
    assert weight_amax(w, 1).tolist() == [4.0, 8.0]
    assert weight_amax(w, 2).tolist() == [3.0, 8.0]
    assert weight_amax(w, None).shape == ()
    assert float(weight_amax(w, None)) == 8.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named(bad: float) -> None:
    w = np.ones((2, 3), np.float32)
    w[1, 2] = bad
    with pytest.raises(InputError, match=r"weight 'fc.weight' of shape \(2, 3\) holds (nan|inf) at \(1, 2\)"):
        weight_amax(w, 0, "fc.weight")


def test_scales_are_positive_and_normal() -> None:
    amax = np.array([127.0, 0.0, 1e-30, 254.0], np.float32)
    assert weight_scales(amax).tolist() == [1.0, 2.0, 2.0**-63, 2.0]
    assert weight_scales(np.zeros(3, np.float32)).tolist() == [1.0, 1.0, 1.0]
    assert weight_scales(np.asarray(np.float32(12.7))).shape == ()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 40), st.sampled_from([0, 1]))
def test_rounding_keeps_the_sum_of_every_channel(seed: int, channels: int, length: int, axis: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((channels, length)).astype(np.float32)
    w = rows if axis == 0 else np.ascontiguousarray(rows.T)
    scales = weight_scales(weight_amax(w, axis))
    steps = quantize_weights(w, scales, axis)
    assert steps.dtype == np.int8
    assert steps.shape == w.shape
    for index, row in enumerate(rows):
        found = (steps if axis == 0 else steps.T)[index].astype(int)
        exact = row.astype(np.float64) / np.float64(scales[index])
        assert found.tolist() == balanced(row, scales[index]).tolist()
        assert np.abs(exact - found).max() < 1.0
        assert np.abs(found).max() <= 127
        if np.abs(found).max() < 127 or length > 2:
            assert abs((exact - found).sum()) <= 0.5 + 1e-9


def test_rounding_with_one_scale_balances_the_last_axis() -> None:
    w = np.random.default_rng(1).standard_normal((3, 20, 4)).astype(np.float32)
    scale = weight_scales(weight_amax(w, None))
    steps = quantize_weights(w, scale, None)
    exact = w.astype(np.float64) / np.float64(scale)
    assert np.abs((exact - steps).sum(axis=(0, 1))).max() <= 0.5 + 1e-9


def test_the_grid_survives_quantize_linear() -> None:
    w = np.random.default_rng(2).standard_normal((64, 500)).astype(np.float32)
    scales = weight_scales(weight_amax(w, 0))
    steps = quantize_weights(w, scales, 0)
    grid = dequantize_weights(steps, scales, 0)
    assert np.array_equal(np.rint(grid / scales[:, None]), steps)


def test_nearest_is_further_off_in_the_mean() -> None:
    """The reason for it all: the mean of a layer's output."""
    random = np.random.default_rng(3)
    w = random.standard_normal((32, 9)).astype(np.float32)
    x = np.abs(random.standard_normal((9, 4000))).astype(np.float32)
    scales = weight_scales(weight_amax(w, 0))
    nearest = np.rint(w / scales[:, None]) * scales[:, None]
    ours = dequantize_weights(quantize_weights(w, scales, 0), scales, 0)
    shift = [float(np.abs(((grid - w) @ x).mean(axis=1)).mean()) for grid in (nearest, ours)]
    assert shift[1] < 0.5 * shift[0]
