"""Noise: a normal distribution that depends on its key and position alone."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.compare.noise import fill_noise, noise_key


def noise(count: int, key: int, scale: float = 1.0) -> np.ndarray:
    out = np.empty(count, np.float32)
    fill_noise(out, key, scale)
    return out


def test_it_is_normal_with_the_variance_asked_for() -> None:
    values = noise(1_000_000, noise_key("a"), 2.0).astype(np.float64) / 2.0
    assert abs(values.mean()) < 0.004
    assert abs(values.var() - 1.0) < 0.006
    assert abs((values**4).mean() - 3.0) < 0.05
    assert np.abs(values).max() < 4.4
    for limit, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
        assert abs((np.abs(values) < limit).mean() - share) < 0.002


def test_neighbours_and_other_keys_are_unrelated() -> None:
    first, second = noise(400_000, noise_key("a", 1)), noise(400_000, noise_key("a", 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.006
    for lag in (1, 2, 3, 4, 5):
        assert abs(np.corrcoef(first[:-lag], first[lag:])[0, 1]) < 0.006


def test_the_same_key_gives_the_same_bits_whatever_the_length_and_shape() -> None:
    key = noise_key("seed", 3, "tensor", 7)
    whole = noise(103, key)
    for length in (1, 2, 3, 4, 5, 102):
        assert np.array_equal(noise(length, key), whole[:length])
    shaped = np.empty((103, 1), np.float32)
    fill_noise(shaped, key, 1.0)
    assert np.array_equal(shaped[:, 0], whole)


def test_the_scale_multiplies() -> None:
    assert np.array_equal(noise(64, 5, 0.5), np.float32(0.5) * noise(64, 5))


def test_a_key_tells_its_parts_apart() -> None:
    assert noise_key("a", 12) != noise_key("a1", 2)
    assert noise_key("a", 1) == noise_key("a", 1)


@pytest.mark.parametrize("out", [np.empty((4, 4), np.float32).T[:2], np.empty(4, np.float64)])
def test_an_array_that_cannot_be_filled_in_place_is_refused(out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="C-contiguous float32 array is needed"):
        fill_noise(out, 1, 1.0)
