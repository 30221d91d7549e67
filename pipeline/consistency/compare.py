"""Contexts compared tensor by tensor (the result: :mod:`pipeline.consistency.comparison`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.consistency.cause import likely_cause
from pipeline.consistency.comparison import Array, Comparison, Problem, Row, Tolerance, describe
from pipeline.core.errors import CheckFailed, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.consistency.context import QuantContext, TensorContext, TensorKind

__all__ = ["assert_consistent", "compare"]


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
