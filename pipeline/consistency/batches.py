"""The scale that each batch alone would give, against the one of all batches together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from calibrators import Calibrator
    from calibrators.statistics import TensorStatistics
    from pipeline.core.progress import Progress
    from pipeline.data import Batch
    from pipeline.placement import PlacementPlan

__all__ = ["DEFAULT_BATCH_RTOL", "BatchReport", "BatchSpread", "spread", "statistics_by_batch"]

DEFAULT_BATCH_RTOL = 0.1
"""A batch whose scale is within a tenth of the merged one would have done as well: one bit is a factor of two."""
_WORRY_SHARE = 0.5
_WORRY_RATIO = 4.0


class BatchSpread(Record):
    """One tensor over all batches. Scales in the tensor's unit."""

    tensor: str
    merged: float
    """The scale from all batches together."""
    smallest: float
    median: float
    largest: float
    within: int
    """Batches whose own scale is within the tolerance of the merged one."""
    seen: int
    """Batches in which the tensor had a non-zero value."""

    @property
    def share(self) -> float:
        return self.within / self.seen if self.seen else 0.0

    @property
    def ratio(self) -> float:
        """Largest over smallest scale."""
        return self.largest / self.smallest if self.smallest else float("inf")

    @property
    def worrying(self) -> bool:
        """Fewer than half of the batches would do, or they differ by two bits."""
        return self.share < _WORRY_SHARE or self.ratio > _WORRY_RATIO


class BatchReport(Record):
    """All tensors, the least certain first."""

    calibrator: str
    batches: tuple[int, ...]
    rtol: float
    rows: tuple[BatchSpread, ...]
    scales: tuple[tuple[float | None, ...], ...]
    """One row for each of :attr:`rows`, one column for each batch; None: the tensor was all zero in that batch."""

    @property
    def rate(self) -> float:
        """Share of all (tensor, batch) pairs within tolerance."""
        return sum(row.within for row in self.rows) / max(1, sum(row.seen for row in self.rows))

    @property
    def worrying(self) -> tuple[BatchSpread, ...]:
        return tuple(row for row in self.rows if row.worrying)


def statistics_by_batch(
    model: Path,
    tensors: Sequence[str],
    batches: Iterable[Batch],
    *,
    progress: Progress = SILENT,
    total: int | None = None,
) -> dict[int, dict[str, TensorStatistics]]:
    """Run the float model over ``batches``; each batch's own statistics, by its index.

    Memory grows with the number of batches: about 64 KiB for each tensor and batch.
    """
    from pipeline.activations import ActivationPass

    found: dict[int, dict[str, TensorStatistics]] = {}
    with progress.task("calibrating each batch", total=total, unit="samples") as task:
        for each in ActivationPass(model, tensors)(batches):
            found[each.batch.index] = each.statistics
            task.advance(len(each.batch.samples))
    return found


def spread(
    plan: PlacementPlan,
    by_batch: Mapping[int, Mapping[str, TensorStatistics]],
    calibrator: Calibrator,
    *,
    rtol: float = DEFAULT_BATCH_RTOL,
) -> BatchReport:
    """What each batch alone would give for every tensor to calibrate.

    Raises:
        InputError: fewer than two batches.
    """
    from pipeline.consistency.exchange import merge_all, merge_pair
    from pipeline.quantize import activation_ranges

    if len(by_batch) < 2:
        raise InputError(
            f"a spread over batches needs at least two batches, got {len(by_batch)}",
            remedy="give more --samples or a smaller --batch-size",
        )
    indices = sorted(by_batch)
    whole = merge_all([dict(by_batch[index]) for index in indices], merge_pair)
    points = [point for point in plan.activations if point.source is None]
    merged, _ = activation_ranges(points, whole, calibrator)
    table = np.full((len(points), len(indices)), np.nan)
    for column, index in enumerate(indices):
        ranges, _ = activation_ranges(points, by_batch[index], calibrator)
        for row, point in enumerate(points):
            if by_batch[index][point.tensor].amax > 0.0:
                table[row, column] = ranges[point.tensor]
    rows = [
        _spread(point.tensor, merged[point.tensor], values, rtol) for point, values in zip(points, table, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda row: (rows[row].share, -rows[row].ratio, rows[row].tensor))
    return BatchReport(
        calibrator=calibrator.name,
        batches=tuple(indices),
        rtol=rtol,
        rows=tuple(rows[row] for row in order),
        scales=tuple(tuple(None if np.isnan(v) else v / 127.0 for v in table[row].tolist()) for row in order),
    )


def _spread(tensor: str, merged: float, ranges: np.ndarray[Any, np.dtype[np.float64]], rtol: float) -> BatchSpread:
    seen = ranges[~np.isnan(ranges)]
    low, middle, high = (seen.min(), np.median(seen), seen.max()) if seen.size else (merged, merged, merged)
    return BatchSpread(
        tensor=tensor,
        merged=merged / 127.0,
        smallest=float(low) / 127.0,
        median=float(middle) / 127.0,
        largest=float(high) / 127.0,
        within=int((np.abs(seen - merged) <= rtol * merged).sum()),
        seen=int(seen.size),
    )
