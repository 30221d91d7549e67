"""Contexts compared tensor by tensor, and the verdict as data.

Metric, tolerance and verdict are apart: a :class:`Row` keeps every value, so a saved comparison can be judged again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.consistency.cause import likely_cause
from pipeline.consistency.context import QuantContext, TensorContext, TensorKind
from pipeline.core.errors import CheckFailed, InputError
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ABSOLUTE_CAP", "Comparison", "Row", "Tolerance", "assert_consistent", "compare"]

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


def compare(contexts: Sequence[QuantContext], tolerance: Tolerance | None = None) -> Comparison:
    """Compare at least two contexts.

    A tensor that a context does not show is a difference where that context claims to be complete (an artifact, a Q/DQ
    graph), and is left out of that context's comparison otherwise (a cache has no weights).

    Raises:
        InputError: fewer than two contexts, or no tensor that two of them show: there is nothing a check could find.
    """
    tolerance = tolerance or Tolerance()
    if len(contexts) < 2:
        raise InputError(
            f"a comparison needs at least two contexts, got {len(contexts)}", remedy="name another artifact or file"
        )
    tables = [context.by_key() for context in contexts]
    rows: list[Row] = []
    hidden = 0
    for kind, name in sorted({key for table in tables for key in table}):
        shown = [table.get((kind, name)) for table in tables]
        absent = tuple(i for i, entry in enumerate(shown) if entry is None and kind in contexts[i].complete)
        if sum(entry is not None for entry in shown) < 2 and not absent:
            hidden += 1
            continue
        rows.append(_row(kind, name, shown, absent, tolerance))
    if not any(sum(value is not None for value in row.values) > 1 for row in rows):
        described = "; ".join(f"{context.label}: {_examples(context)}" for context in contexts)
        raise InputError(
            f"no tensor is in two of the contexts, so nothing can be compared ({described})",
            remedy="compare results of the same model; tensor names come from its ONNX form",
        )
    comparison = Comparison(
        labels=tuple(context.label for context in contexts),
        digests=tuple(context.scales_digest for context in contexts),
        tolerance=tolerance,
        rows=tuple(rows),
        hidden=hidden,
    )
    if comparison.consistent:
        return comparison
    return comparison.model_copy(update={"cause": likely_cause(contexts, comparison)})


def assert_consistent(contexts: Sequence[QuantContext], atol: float = 1e-5, rtol: float = 0.0) -> None:
    """Raise unless every tensor agrees in all contexts; for use in tests and programs.

    Raises:
        CheckFailed: at least one tensor differs; the worst ones, who differs and the likely cause are named.
        InputError: there is nothing to compare.
    """
    comparison = compare(contexts, Tolerance(atol=atol, rtol=rtol))
    if not comparison.consistent:
        raise CheckFailed(describe(comparison))


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


def _examples(context: QuantContext) -> str:
    names = [tensor.name for tensor in context.tensors[:3]]
    return ", ".join(names) + (", ..." if len(context.tensors) > 3 else "") if names else "no tensors"


def _row(
    kind: TensorKind, name: str, shown: Sequence[TensorContext | None], absent: tuple[int, ...], tolerance: Tolerance
) -> Row:
    present = [(i, entry) for i, entry in enumerate(shown) if entry is not None]
    for problem, describe_entry in _STRUCTURE:
        groups: dict[str, list[int]] = {}
        for i, entry in present:
            groups.setdefault(describe_entry(entry), []).append(i)
        if len(groups) > 1:
            return _structural(kind, name, shown, problem, groups)
    scales = np.array([entry.scales for _, entry in present], np.float64)
    reference, agreeing = _consensus(scales, tolerance)
    distance = np.abs(scales - reference)
    relative = distance / np.abs(reference)
    channel = int(relative.max(axis=0).argmax())
    differs = tuple(i for (i, _), agrees in zip(present, agreeing, strict=True) if not agrees)
    row = Row(
        tensor=name,
        kind=kind,
        values=tuple(None if entry is None else entry.scales[channel] for entry in shown),
        channel=channel if scales.shape[1] > 1 else None,
        reference=float(reference[channel]),
        difference=float(distance.max()),
        relative=float(relative.max()),
        problem="scale" if differs else None,
        differs=differs,
    )
    if absent:
        return row.model_copy(
            update={
                "problem": "missing",
                "differs": tuple(sorted({*row.differs, *absent})),
                "detail": f"not quantised in {len(absent)} of {len(shown)} contexts",
            }
        )
    return row


_STRUCTURE: tuple[tuple[Problem, Any], ...] = (
    ("dtype", lambda entry: entry.dtype),
    ("channels", lambda entry: f"{len(entry.scales)} scales"),
    ("axis", lambda entry: f"axis {entry.axis}"),
    ("zero point", lambda entry: f"zero point {', '.join(map(str, entry.zero_points))}"),
)


def _structural(
    kind: TensorKind, name: str, shown: Sequence[TensorContext | None], problem: Problem, groups: dict[str, list[int]]
) -> Row:
    """A row whose scales cannot be set against each other, because what they apply to differs."""
    largest = max(groups.values(), key=len)
    first = shown[largest[0]]
    return Row(
        tensor=name,
        kind=kind,
        values=tuple(None if entry is None else entry.scales[0] for entry in shown),
        reference=first.scales[0] if first is not None else 0.0,
        difference=0.0,
        relative=0.0,
        problem=problem,
        differs=tuple(i for members in groups.values() if members is not largest for i in members),
        detail="; ".join(f"{text} in {len(members)} of {len(shown)} contexts" for text, members in groups.items()),
    )


def _consensus(scales: Array, tolerance: Tolerance) -> tuple[Array, list[bool]]:
    """The row of ``scales`` (contexts, slices) with which most rows agree, the first in a tie; who agrees with it."""
    distance = np.abs(scales[np.newaxis, :, :] - scales[:, np.newaxis, :])
    agrees = np.all(distance <= tolerance.allowed(scales)[:, np.newaxis, :], axis=2)
    chosen = int(np.sum(agrees, axis=1).argmax())
    return scales[chosen], np.asarray(agrees)[chosen].tolist()
