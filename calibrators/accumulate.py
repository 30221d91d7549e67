"""The statistic of one batch, gathered from the arrays in which the batch was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrators.kernels import sweep
from calibrators.statistics import BINS, MIN_EXPONENT, PERCENTILES, TensorStatistics
from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["BatchAccumulator", "add_batch"]

_CHUNK: Final = 1 << 30  # elements per sweep; its partial counters are 32 bits wide
_DTYPES: Final = (np.float16, np.float32, np.float64)


class BatchAccumulator:
    """Add the arrays of one tensor in one batch, in any number of parts, then take the batch's statistic.

    Adding releases the interpreter lock; one accumulator belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._bins = np.zeros(BINS, np.int64)
        self._exponent = MIN_EXPONENT
        self._keys: list[int] = []
        self._elements = self._zeros = self._nans = self._infs = 0

    @property
    def nonfinite(self) -> tuple[int, int]:
        """Numbers of NaN and of infinities so far."""
        return self._nans, self._infs

    def add(self, x: NDArray[Any]) -> None:
        """Add float16, float32 or float64 values (the last rounded to float32), of any shape.

        Raises:
            InputError: ``x`` is of another type.
        """
        if x.dtype not in _DTYPES:
            raise InputError(
                f"statistics need float16, float32 or float64 values, got {x.dtype}",
                remedy="only floating-point tensors are quantised; leave this one out",
            )
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is counted so
            flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            values = flat[start : start + _CHUNK]
            exponent, low, high, zeros, nans, infs = sweep(
                values, values.view(np.int32), self._exponent, MIN_EXPONENT, self._bins
            )
            if low <= high:
                keys = (*self._keys, int(low), int(high))
                self._keys = [min(keys), max(keys)]
            self._exponent = int(exponent)
            self._elements += values.size
            self._zeros += int(zeros)
            self._nans += int(nans)
            self._infs += int(infs)

    def statistics(self, batch_index: int) -> TensorStatistics:
        """What was added, as the batch of that global index (none is recorded when no value is finite).

        Raises:
            InputError: the index is negative.
        """
        if batch_index < 0:
            raise InputError(f"batch index {batch_index} is negative; batches are numbered from 0 over the whole data")
        batch = TensorStatistics(self._bins.copy(), self._exponent)
        batch.elements, batch.zeros, batch.nans, batch.infs = self._elements, self._zeros, self._nans, self._infs
        if self._keys:
            batch.minimum, batch.maximum = (_float_of_key(key) for key in self._keys)
            batch.batch_index = np.array([batch_index], np.int64)
            batch.batch_amax = np.array([batch.amax], np.float32)
            batch.batch_percentiles = batch.percentiles(PERCENTILES)[None]
        return batch


def add_batch(statistics: TensorStatistics, x: NDArray[Any] | Sequence[NDArray[Any]], batch_index: int) -> None:
    """Add one whole batch to ``statistics``.

    Args:
        x: float16, float32 or float64 (rounded to float32), any shape; several when computed in parts.
        batch_index: the batch's index in the whole data set, not in this process's share of it.

    Raises:
        InputError: this batch is in the statistic already, or ``x`` is not of a float type.
    """
    batch = BatchAccumulator()
    for part in [x] if isinstance(x, np.ndarray) else x:
        batch.add(part)
    statistics.absorb(batch.statistics(batch_index))


def _float_of_key(key: int) -> float:
    """The float32 whose ordered key is ``key``; -0.0 becomes 0.0."""
    bits = key ^ (0x7FFFFFFF if key < 0 else 0)
    return float(np.array([bits], np.int32).view(np.float32)[0]) + 0.0
