from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.errors.metrics import METRICS, pair_sums, rows_per_sample

values = hnp.arrays(np.float32, (2, 37), elements=st.floats(-100, 100, width=32))


@settings(max_examples=60, deadline=None)
@given(values, values)
def test_figures_follow_their_definitions(a, b):
    sums = pair_sums(a, b)
    for row in range(2):
        x, y = a[row].astype(np.float64), b[row].astype(np.float64)
        norm, other = np.linalg.norm(x), np.linalg.norm(y)
        error = np.linalg.norm(x - y)
        expected = error / norm if norm else float(other > 0)
        assert sums.relative_l2[row] == pytest.approx(expected, rel=1e-12)
        assert sums.max_abs[row] == pytest.approx(np.abs(x - y).max(), rel=1e-6)
        assert sums.peak[row] == np.abs(x).max()
        if norm and other:
            assert sums.cosine[row] == pytest.approx(np.clip(x @ y / norm / other, -1, 1), abs=1e-12)
        if expected:
            assert sums.sqnr_db[row] == pytest.approx(-20 * np.log10(expected), rel=1e-12)
        else:
            assert sums.sqnr_db[row] == np.inf


@pytest.mark.parametrize(
    ("a", "b", "relative", "cosine"),
    [([0, 0], [0, 0], 0.0, 1.0), ([0, 0], [3, 4], 1.0, 0.0), ([3, 4], [0, 0], 1.0, 0.0), ([3, 4], [6, 8], 1.0, 1.0)],
)
def test_all_zero_tensors(a, b, relative, cosine):
    sums = pair_sums(np.array([a], np.float32), np.array([b], np.float32))
    assert sums.relative_l2[0] == relative
    assert sums.cosine[0] == pytest.approx(cosine)
    assert all(sums.metric(name).shape == (1,) for name in METRICS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_values_are_seen(bad, side):
    pair = [np.ones((3, 100), np.float32), np.ones((3, 100), np.float32)]
    pair[side][1, 77] = bad
    assert pair_sums(*pair).finite.tolist() == [True, False, True]


def test_large_float32_values_do_not_overflow():
    sums = pair_sums(np.full((1, 4), 3e38, np.float32), np.full((1, 4), -3e38, np.float32))
    assert sums.relative_l2[0] == pytest.approx(2.0)
    assert sums.finite.all()


def test_different_shapes_are_refused():
    with pytest.raises(ValueError, match="same shape"):
        pair_sums(np.ones((1, 4), np.float32), np.ones((1, 5), np.float32))


def test_rows_follow_the_sample_axis():
    folded = np.arange(24, dtype=np.float64).reshape(6, 4)  # two samples, three heads each
    rows = rows_per_sample(folded, 2)
    assert rows is not None
    assert rows.shape == (2, 12)
    assert rows.dtype == np.float32
    assert rows_per_sample(np.float32(3), 2) is None
    assert rows_per_sample(np.zeros((3, 4), np.float32), 2) is None
