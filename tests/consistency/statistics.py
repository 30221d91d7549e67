"""Statistics of made-up tensors, batch by batch."""

from __future__ import annotations

import numpy as np

from calibrators.accumulate import add_batch
from calibrators.statistics import TensorStatistics

NAMES = ("a", "b", "c")


def values(name: str, batch: int) -> np.ndarray:
    """What tensor ``name`` holds in a batch: another range in every batch, so that histograms have to be coarsened."""
    generator = np.random.default_rng([ord(name), batch])
    return (generator.standard_normal(500 + 37 * batch) * 2.0 ** (batch % 5 - ord(name) % 3)).astype(np.float32)


def of_batches(batches: list[int] | range) -> dict[str, TensorStatistics]:
    result = {name: TensorStatistics() for name in NAMES}
    for batch in batches:
        for name in NAMES:
            add_batch(result[name], values(name, batch), batch)
    return result
