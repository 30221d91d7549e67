"""Figures from a histogram against the values themselves."""

from __future__ import annotations

import numpy as np
import pytest

from calibrators import TensorStatistics
from calibrators.accumulate import add_batch
from pipeline.compare.histogram import clipped_values, expected_error


def statistics(values: np.ndarray) -> TensorStatistics:
    stats = TensorStatistics()
    add_batch(stats, values.astype(np.float32), 0)
    return stats


DATA = {
    "normal": np.random.default_rng(0).standard_normal(200_000) * 3.0,
    "relu": np.maximum(np.random.default_rng(1).standard_normal(200_000), 0.0),
    "heavy": np.random.default_rng(2).standard_t(3, 200_000) * 1e-3,
}


@pytest.mark.parametrize("name", sorted(DATA))
@pytest.mark.parametrize("share", [0.1, 0.4, 0.9, 1.0, 1.5])
def test_they_agree_with_the_values(name: str, share: float) -> None:
    values = DATA[name].astype(np.float32).astype(np.float64)
    stats = statistics(values)
    amax = share * stats.amax
    assert clipped_values(stats, amax) == pytest.approx((np.abs(values) > amax).sum(), rel=0.02, abs=3)
    scale = amax / 127
    rounded = scale * np.clip(np.rint(values / scale), -127, 127)
    error = np.sqrt(((values - rounded) ** 2).sum() / (values**2).sum())
    assert expected_error(stats, amax) == pytest.approx(error, rel=0.02)


def test_zeros_have_no_error() -> None:
    assert expected_error(statistics(np.zeros(10)), 1.0) == 0.0
    assert clipped_values(statistics(np.zeros(10)), 1.0) == 0.0
    assert clipped_values(TensorStatistics(), 1.0) == 0.0
