"""Intervals: right coverage, paired, simultaneous, reproducible."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.compare.bootstrap import Resampling, best_row


def test_an_interval_is_that_of_a_binomial_proportion() -> None:
    values = np.zeros((1, 400))
    values[0, :300] = 1.0
    (interval,) = Resampling(400, seed=0).intervals(values)
    half_width = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert interval.mean == 0.75
    assert interval.low == pytest.approx(0.75 - half_width, abs=0.004)
    assert interval.high == pytest.approx(0.75 + half_width, abs=0.004)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    draws = (generator.random((400, 200)) < 0.7).astype(float)
    intervals = Resampling(200, seed=1, resamples=1000).intervals(draws)
    covered = np.mean([interval.low <= 0.7 <= interval.high for interval in intervals])
    assert 0.91 <= covered <= 0.98


def test_pairing_sees_a_difference_that_intervals_of_each_hide() -> None:
    generator = np.random.default_rng(0)
    difficulty = generator.random(300)
    values = np.stack([difficulty < 0.70, difficulty < 0.66]).astype(float)
    resampling = Resampling(300, seed=0)
    first, second = resampling.intervals(values)
    assert first.low < second.high
    assert resampling.against(0, values)[1].told_apart


def test_equal_rows_cannot_be_told_apart() -> None:
    values = np.tile((np.arange(50) % 3 == 0).astype(float), (3, 1))
    for difference in Resampling(50, seed=0).against(0, values):
        assert (difference.mean, difference.low, difference.high) == (0.0, 0.0, 0.0)
        assert not difference.told_apart
        assert difference.needed is None


def test_of_equally_good_ones_the_best_is_seldom_told_from_the_others() -> None:
    """Ten calibrators that differ by chance alone: the greatest of them must not win more often than intended."""
    generator = np.random.default_rng(0)
    wrong = 0
    for trial in range(100):
        values = (generator.random((10, 200)) < 0.7).astype(float)
        differences = Resampling(200, seed=trial, resamples=400).against(best_row(list(values)), values)
        wrong += any(difference.told_apart for difference in differences)
    assert wrong <= 12


def test_the_samples_needed_would_tell_them_apart() -> None:
    generator = np.random.default_rng(3)
    difficulty = generator.random(200)
    values = np.stack([difficulty < 0.71, difficulty + 0.1 * generator.standard_normal(200) < 0.70]).astype(float)
    difference = Resampling(200, seed=0).against(0, values)[1]
    assert not difference.told_apart
    assert difference.needed is not None
    repeats = -(-difference.needed // 200) + 1
    many = np.tile(values, (1, repeats))
    assert Resampling(200 * repeats, seed=0).against(0, many)[1].told_apart


def test_it_is_reproducible_and_does_not_depend_on_the_other_rows() -> None:
    values = np.random.default_rng(0).random((4, 80))
    assert Resampling(80, seed=5).intervals(values) == Resampling(80, seed=5).intervals(values)
    assert np.allclose(Resampling(80, seed=5).means(values)[2], Resampling(80, seed=5).means(values[2:3])[0])
    assert Resampling(80, seed=6).intervals(values) != Resampling(80, seed=5).intervals(values)


def test_many_samples_are_drawn_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random((2, 100))
    whole = Resampling(100, seed=0, resamples=300).means(values)
    monkeypatch.setattr("pipeline.compare.bootstrap._CHUNK_COUNTS", 100 * 7)
    assert np.allclose(Resampling(100, seed=0, resamples=300).means(values), whole)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Resampling(0, seed=0)


def test_a_row_is_resampled_among_the_samples_that_it_is_about() -> None:
    generator = np.random.default_rng(5)
    values = generator.random((3, 60))
    whole = Resampling(60, seed=2).intervals(values)
    partly = values.copy()
    partly[1, 40:] = np.nan
    found = Resampling(60, seed=2).intervals(partly)
    assert (found[0], found[2]) == (whole[0], whole[2])
    assert found[1] == Resampling(40, seed=2).intervals(values[1:2, :40])[0]
