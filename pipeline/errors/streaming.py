"""Comparing two readings over a stream of batches in constant memory: one row of figures per layer and sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import CheckFailed
from pipeline.errors.capture import CAPTURE_BYTES, check_finite, micro_batches
from pipeline.errors.metrics import METRICS, PEAK, PairSums, pair_sums, rows_per_sample, warm_up
from pipeline.errors.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays, OrtReading

__all__ = ["LayerErrors", "compared", "paired"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def paired(
    readings: tuple[OrtReading, OrtReading], batch: Batch, limit: int = CAPTURE_BYTES
) -> Iterator[tuple[Batch, Arrays, Arrays]]:
    """Both readings of ``batch``, split so that one reading's captured values stay near ``limit`` bytes.

    A model with a static batch gets its batch as it is.
    """
    size: int | None = None if readings[0].static_batch else readings[0].samples_within(limit, batch)
    for part in micro_batches(batch, size):
        yield part, readings[0](part), readings[1](part)


def compared(name: str, reference: Array, other: Array, samples: Sequence[int], *, label: str = "INT8") -> PairSums:
    """Sums per sample for one tensor. A tensor without an axis for the samples counts as a whole for each of them.

    Args:
        label: what ``other`` was computed by, for messages.

    Raises:
        CheckFailed: the two readings have different shapes, or one holds a NaN or infinity.
    """
    if reference.shape != other.shape:
        raise CheckFailed(
            f"tensor {name!r} has shape {reference.shape} in FP32, {other.shape} in {label}, samples {list(samples)}",
            remedy="its shape depends on the data; leave its layer out with --exclude",
        )
    rows, other_rows = rows_per_sample(reference, len(samples)), rows_per_sample(other, len(samples))
    if rows is not None and other_rows is not None:
        sums = pair_sums(rows, other_rows)
    else:
        whole = [np.ascontiguousarray(values.reshape(1, -1), dtype=np.float32) for values in (reference, other)]
        sums = pair_sums(whole[0], whole[1]).repeated(len(samples))
    if not sums.finite.all():
        check_finite(name, reference, samples, label="FP32")
        check_finite(name, other, samples, label=label)
    return sums


class LayerErrors:
    """Figures for every tensor and sample seen: 5 float64 each, whatever the size of the tensors."""

    def __init__(self, tensors: Sequence[str]) -> None:
        self.tensors = list(tensors)
        self.samples: list[int] = []
        self._columns: dict[str, list[Floats]] = {name: [] for name in (*METRICS, PEAK)}
        self._workers = Workers()
        warm_up()

    def add(self, samples: Sequence[int], reference: Arrays, other: Arrays) -> None:
        """Take in one batch of both readings."""
        block = {name: np.empty((len(self.tensors), len(samples))) for name in self._columns}
        every = self._workers.map(
            lambda name: compared(name, reference[name], other[name], samples),
            self.tensors,
            values=sum(reference[name].size for name in self.tensors),
        )
        for row, sums in enumerate(every):
            for name in block:
                block[name][row] = sums.metric(name)
        self.samples.extend(samples)
        for name in block:
            self._columns[name].append(block[name])

    def metric(self, name: str) -> Floats:
        """Shape (tensors, samples); ``name`` is one of :data:`pipeline.errors.metrics.METRICS`, or ``PEAK`` there."""
        blocks = self._columns[name]
        return np.concatenate(blocks, axis=1) if blocks else np.empty((len(self.tensors), 0))
