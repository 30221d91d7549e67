"""Why two contexts probably differ. A judgement from what the contexts carry with them, said as such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.artifact import calibrator_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.consistency.comparison import Comparison, Row
    from pipeline.consistency.context import QuantContext, TensorContext

__all__ = ["likely_cause"]

_FP16_RELATIVE = 2.0**-10
"""Two roundings to FP16 (11 significant bits) move a value by at most this share."""
_ROUNDING_RELATIVE = 1e-5
"""Activations of two float32 implementations of the same network differ by about this share at their extremes."""
_ORDERED = ("ema", "ema-percentile")
"""Calibrators whose range depends on the order of the batches."""


def likely_cause(contexts: Sequence[QuantContext], comparison: Comparison) -> str:
    """The most probable reason for the mismatches of ``comparison``, in words.

    Recorded facts come first (another model, calibrator or data), then what the differences look like: ranges that saw
    the same extremes, values on the FP16 grid, differences of a rounding's size.
    """
    wrong = comparison.mismatches
    differing = sorted({number for row in wrong for number in row.differs})
    who = ", ".join(comparison.labels[number] for number in differing)
    if (names := _disagreement([context.model for context in contexts])) is not None:
        return f"another model: {_per_label(comparison.labels, names)}"
    weights = [row for row in wrong if row.kind == "weight"]
    if weights:
        return f"another model: {len(weights)} weights have other scales in {who}, which no calibration changes"
    missing = [row for row in wrong if row.problem == "missing"]
    if missing:
        return f"another model or another placement: {len(missing)} tensors are not quantised everywhere"
    if any(row.problem != "scale" for row in wrong):
        return f"another tool or another quantisation scheme made {who}: not only the scales differ"
    settings = [_settings(context) for context in contexts]
    if (names := _disagreement(settings)) is not None:
        return f"another calibrator: {_per_label(comparison.labels, names)}"
    if (names := _disagreement([context.data for context in contexts])) is not None:
        return f"other calibration data: {_per_label(comparison.labels, names)}"
    fp16 = [number for number in differing if _on_fp16_grid([row.values[number] for row in wrong])]
    if fp16 and max(row.relative for row in wrong) <= 2 * _FP16_RELATIVE:
        names_fp16 = ", ".join(comparison.labels[number] for number in fp16)
        return f"FP16 reduction: every differing scale of {names_fp16} is an FP16 number"
    same = _same_evidence(contexts, wrong)
    ordered = [name for name in _ORDERED if name in {context.calibrator for context in contexts}]
    if same is True and ordered:
        return f"another order of the batches: the same values were seen, and {ordered[0]} depends on their order"
    if same is False:
        return f"other calibration data: the values seen by {who} have other extremes or another count"
    largest = max(row.relative for row in wrong)
    if largest <= _ROUNDING_RELATIVE:
        return (
            f"float arithmetic: the largest difference is {largest:.2g} of the scale, as between two devices or "
            "library versions that compute the float model in another order"
        )
    if same is True:
        return f"another calibrator: {who} saw the same values and chose other ranges"
    return f"other calibration data, calibrator or model: {who} does not say what it was made from"


def _settings(context: QuantContext) -> str | None:
    if context.calibrator is None:
        return None
    return calibrator_text(context.calibrator, dict(context.params))


def _disagreement(values: Sequence[str | None]) -> list[str | None] | None:
    """The values, when at least two are known and they are not all equal."""
    return list(values) if len({value for value in values if value is not None}) > 1 else None


def _per_label(labels: Sequence[str], values: Sequence[str | None]) -> str:
    known = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
    return ", ".join(f"{label} {_short(value)}" for label, value in known)


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value


def _on_fp16_grid(scales: Sequence[float | None]) -> bool:
    """Whether every scale, or every range 127 * scale, is an FP16 number (to 2**-22, as a float32 scale has it)."""
    known = np.array([scale for scale in scales if scale is not None], np.float64)
    if not known.size:
        return False
    for values in (known, known * 127.0):
        with np.errstate(over="ignore"):
            grid = values.astype(np.float16).astype(np.float64)
        if np.all(np.abs(values - grid) <= 2.0**-22 * values):
            return True
    return False


def _same_evidence(contexts: Sequence[QuantContext], rows: Sequence[Row]) -> bool | None:
    """Whether the contexts saw the same values of the differing tensors; None when that is not recorded."""
    tables = [context.by_key() for context in contexts]
    verdict: bool | None = None
    for row in rows:
        entries = [table.get((row.kind, row.tensor)) for table in tables]
        seen = [_seen(entry) for entry in entries if entry is not None]
        known = {evidence for evidence in seen if evidence is not None}
        if len(known) > 1:
            return False
        if known and None not in seen:
            verdict = True
    return verdict


def _seen(entry: TensorContext) -> tuple[float | None, ...] | None:
    evidence = entry.evidence
    return None if evidence is None else (evidence.samples, evidence.minimum, evidence.maximum)
