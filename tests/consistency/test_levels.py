from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.consistency.levels import MIN_LEVELS, measure_scale


@given(
    scale=st.floats(1e-12, 1e6),
    spread=st.floats(2, 90),
    count=st.integers(60, 4000),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_scale_of_dequantised_values(scale: float, spread: float, count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    steps = np.clip(np.rint(generator.standard_normal(count) * spread), -128, 127).astype(np.int32)
    common = int(np.gcd.reduce(np.abs(steps))) or 1
    exact = np.float32(scale)
    found = measure_scale((steps * exact).astype(np.float32))
    if not steps.any():
        assert found.scale is None
        return
    assert found.scale == pytest.approx(float(exact) * common, rel=1e-6)
    assert found.levels == len(set(np.abs(steps[steps != 0]).tolist()))


@pytest.mark.parametrize("seed", range(20))
def test_fp16_values(seed: int) -> None:
    generator = np.random.default_rng(seed)
    steps = np.clip(np.rint(generator.standard_normal(3000) * 40), -128, 127)
    found = measure_scale((steps * np.float32(0.0317)).astype(np.float16))
    assert found.scale == pytest.approx(0.0317, rel=1e-3)


def test_only_even_levels_are_another_scale() -> None:
    """Twice the scale is what the device really used then; it must not pass for the right one."""
    found = measure_scale(np.arange(-64, 64, dtype=np.float32) * np.float32(2 * 0.1))
    assert found.scale == pytest.approx(0.2, rel=1e-6)
    assert found.determined


def test_float_values_are_on_no_grid() -> None:
    found = measure_scale(np.random.default_rng(0).standard_normal((8, 50)).astype(np.float32))
    assert found.scale is None
    assert found.residual == 0.5
    few = measure_scale(np.array([1.0, 1.37, 2.11, 2.9, 3.33, 4.01, 4.77, 5.19, 6.6, 7.07]))
    assert few.scale is None


def test_nothing_to_measure() -> None:
    assert measure_scale(np.zeros((3, 4), np.float32)).levels == 0
    assert not measure_scale(np.zeros(4)).determined
    assert not measure_scale(np.array([0.5, 1.0])).determined
    assert not measure_scale(np.array([0.5, np.nan])).determined


def test_enough_levels() -> None:
    assert measure_scale(np.arange(1, MIN_LEVELS + 1) * 0.25).determined
