"""How often scales agree in several settings, and a demonstration of what an FP16 reduction does to them.

A data-parallel calibration may average each rank's range with an all-reduce in FP16. FP16 has 11 significant bits:
every addition rounds, and the order of the ranks decides how. A histogram fares worse: FP16 counts are whole only up to
2048 and infinite from 65520 on. The exact merge adds int64 counts of bins with power-of-two widths: no rounding, so no
order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.consistency.compare import compare
from pipeline.consistency.comparison import Comparison, Tolerance
from pipeline.consistency.context import QuantContext
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Scenario", "fp16_mean", "fp16_scenario", "of_comparison"]


class Scenario(Record):
    """One line of the report."""

    name: str
    tensors: int
    within: int
    """Tensors within tolerance."""
    tolerance: Tolerance
    identical: bool
    """Every context has the same bits."""
    worst: str
    """The tensor of the largest relative difference."""
    largest: float
    """That relative difference."""
    source: str
    """Where it comes from."""

    @property
    def rate(self) -> float:
        return self.within / self.tensors


def of_comparison(name: str, comparison: Comparison, *, source: str = "") -> Scenario:
    worst = comparison.worst
    identical = len(set(comparison.digests)) == 1
    return Scenario(
        name=name,
        tensors=len(comparison.rows),
        within=len(comparison.rows) - len(comparison.mismatches),
        tolerance=comparison.tolerance,
        identical=identical,
        worst=worst.tensor,
        largest=worst.relative,
        source=source or comparison.cause or ("none: equal bit for bit" if identical else "within tolerance"),
    )


def fp16_mean(values: np.ndarray[Any, Any], order: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float16]]:
    """The mean over ranks as a ring of FP16 additions in ``order`` computes it.

    Args:
        values: (ranks, tensors).
    """
    with np.errstate(over="ignore"):
        total = values[order[0]].astype(np.float16)
        for rank in order[1:]:
            total = total + values[rank].astype(np.float16)
        mean: np.ndarray[Any, np.dtype[np.float16]] = (total / np.float16(len(order))).astype(np.float16)
    return mean


def fp16_scenario(amax: Mapping[str, Sequence[float]], *, tolerance: Tolerance) -> Scenario | None:
    """Average every rank's range in FP16, starting the ring at each rank in turn, and compare with the float64 mean.

    Args:
        amax: tensor to each rank's own range.

    Returns:
        None when no tensor survives FP16 (beyond 65504, or below its smallest number).
    """
    names = list(amax)
    values = np.array([amax[name] for name in names], np.float64).T
    size = values.shape[0]
    exact = values.mean(axis=0)
    rings = [[(start + step) % size for step in range(size)] for start in range(size)]
    reduced = [fp16_mean(values, ring).astype(np.float64) for ring in rings]
    usable = [
        column for column in range(len(names)) if all(np.isfinite(row[column]) and row[column] > 0 for row in reduced)
    ]
    if not usable:
        return None
    contexts = [
        QuantContext.of_amax({names[column]: float(row[column]) for column in usable}, label=label)
        for label, row in [("exact mean", exact), *((f"ring from rank {i}", row) for i, row in enumerate(reduced))]
    ]
    pairs = [compare([contexts[0], other], tolerance) for other in contexts[1:]]
    worst = max(pairs, key=lambda comparison: comparison.worst.relative)
    lost = len(names) - len(usable)
    within = min(len(pair.rows) - len(pair.mismatches) for pair in pairs)
    orders = len({context.scales_digest for context in contexts[1:]})
    return Scenario(
        name=f"{size} ranks, mean of their ranges in FP16",
        tensors=len(names),
        within=within,
        tolerance=tolerance,
        identical=False,
        worst=worst.worst.tensor,
        largest=worst.worst.relative,
        source=f"rounding to 11 bits at every addition; {orders} results for {size} orders of the ranks"
        + (f", {lost} tensors out of FP16's range" if lost else ""),
    )
