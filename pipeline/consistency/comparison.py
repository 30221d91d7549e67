"""What a comparison of contexts found, tensor by tensor: the rows, the verdict as data and in words.

Metric, tolerance and verdict are apart: a :class:`Row` keeps every value, so a saved comparison can be judged again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.consistency.context import TensorKind
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ABSOLUTE_CAP", "Array", "Comparison", "Problem", "Row", "Tolerance", "describe", "row_text"]

ABSOLUTE_CAP = 0.01
"""The absolute tolerance never allows more than this share of a scale: 1e-5 would hide any change to one of 1e-6."""

Array = np.ndarray[Any, np.dtype[np.float64]]


class Tolerance(Record):
    """Two scales agree when |a - r| <= min(atol, :data:`ABSOLUTE_CAP` * r) + rtol * r, r being the reference."""

    atol: float = 1e-5
    rtol: float = 0.0

    def allowed(self, reference: Array) -> Array:
        return np.minimum(self.atol, ABSOLUTE_CAP * np.abs(reference)) + self.rtol * np.abs(reference)

    def __str__(self) -> str:
        return f"atol {self.atol:g}, rtol {self.rtol:g}"


Problem = Literal["scale", "zero point", "dtype", "axis", "channels", "missing"]


class Row(Record):
    """One tensor over all contexts."""

    tensor: str
    kind: TensorKind
    values: tuple[float | None, ...]
    """The scale in each context, at :attr:`channel` for a per-channel tensor; None: that context does not show it."""
    channel: int | None = None
    """Slice of the largest difference; None for one scale."""
    reference: float
    """What most contexts say (the first of them in a tie), at the same slice."""
    difference: float
    """Largest |scale - reference| over contexts and slices."""
    relative: float
    """Largest |scale - reference| / reference."""
    problem: Problem | None = None
    """None: within tolerance."""
    differs: tuple[int, ...] = ()
    """Numbers of the contexts that do not agree with the reference."""
    detail: str = ""
    """For a problem other than the scale: each context's value in words."""


class Comparison(Record):
    """All rows, and what they say together."""

    labels: tuple[str, ...]
    digests: tuple[str, ...]
    """:attr:`QuantContext.scales_digest` of each context."""
    tolerance: Tolerance
    rows: tuple[Row, ...]
    cause: str = ""
    """What probably made them differ; empty when they agree."""
    hidden: int = 0
    """Tensors that only one context shows and that no other had to show; they are not compared."""

    @property
    def mismatches(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.problem is not None)

    @property
    def consistent(self) -> bool:
        return not self.mismatches

    @property
    def rate(self) -> float:
        """Tensors within tolerance / all compared; 1.0 means everything agrees."""
        return 1.0 - len(self.mismatches) / len(self.rows)

    @property
    def worst(self) -> Row:
        """The row of the largest relative difference; one with a structural problem comes before any."""
        return max(self.rows, key=lambda row: (row.problem not in (None, "scale"), row.relative))

    @property
    def who(self) -> tuple[str, ...]:
        """Labels of the contexts that differ from the rest in at least one tensor."""
        numbers = {number for row in self.rows for number in row.differs}
        return tuple(self.labels[number] for number in sorted(numbers))


def describe(comparison: Comparison, *, most: int = 5) -> str:
    """The verdict in a few lines, with at most so many of the tensors that differ."""
    wrong = sorted(comparison.mismatches, key=lambda row: (row.problem == "scale", -row.relative))
    lines = [
        f"{len(wrong)} of {len(comparison.rows)} tensors differ ({comparison.tolerance}) in {', '.join(comparison.who)}"
    ]
    for row in wrong[:most]:
        lines.append(f"  {row_text(row, comparison.labels)}")
    if 0 < most < len(wrong):
        lines.append(f"  and {len(wrong) - most} more")
    lines.append(f"likely cause: {comparison.cause}")
    return "\n".join(lines)


def row_text(row: Row, labels: Sequence[str]) -> str:
    if row.problem != "scale":
        return f"{row.tensor}: {row.detail}"
    where = "" if row.channel is None else f"[channel {row.channel}]"
    values = ", ".join(
        f"{label} {value:.9g}" for label, value in zip(labels, row.values, strict=True) if value is not None
    )
    return f"{row.tensor}{where}: {values} (difference {row.difference:.3g}, {100 * row.relative:.3g} %)"
