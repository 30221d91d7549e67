"""Batches of activations of all kinds, and what the CPU makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibrators import TensorStatistics
from calibrators.accumulate import add_batch
from plugins.statistics import DeviceArray

Array = np.ndarray


def on_cpu(batches: Sequence[Sequence[Array]]) -> list[TensorStatistics]:
    result = [TensorStatistics() for _ in batches[0]]
    for index, arrays in enumerate(batches):
        for stats, array in zip(result, arrays, strict=True):
            add_batch(stats, array, index)
    return result


def views(arrays: Sequence[Array]) -> list[DeviceArray]:
    return [DeviceArray(array.ctypes.data, array.size, array.dtype.name) for array in arrays]


def activations(seed: int) -> list[list[Array]]:
    """Three batches of tensors of all kinds."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(3):
        size = int(random.integers(1, 1500))
        normal = random.standard_normal(size).astype(np.float32)
        growing = (normal * 4.0 ** (np.arange(size) // 200)).astype(np.float32)
        batches.append(
            [
                normal,
                np.maximum(normal, 0.0),
                np.clip(3.0 * normal, 0.0, 6.0),
                growing,
                growing[::-1].copy(),
                np.zeros(size, np.float32),
                np.full(size, -3.0, np.float32),
                normal * np.float32(10.0 ** random.integers(-38, 30)),
                normal[: int(random.integers(0, 2)) * size],
                (normal * np.float32(1e-39)),
                normal.astype(np.float16),
                np.float16(6e-8) * np.arange(size % 700).astype(np.float16),
            ]
        )
    return batches
