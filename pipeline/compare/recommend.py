"""Which calibrator to take, and whether the data can tell it from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from pipeline.compare.bootstrap import Resampling, best_row
from pipeline.compare.figures import RELATIVE_L2
from pipeline.compare.shifts import CLEAN
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.compare.measured import Measured, Score

__all__ = ["Comparison", "Recommendation", "recommend"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_FEW: Final = 100


class Comparison(Record):
    """The best calibrator on the clean samples against another one."""

    calibrator: str
    difference: float
    """Score of the best minus its score."""
    low: float
    high: float
    """95 % interval, simultaneous for all comparisons."""
    told_apart: bool
    same_graph: bool
    """Both give the same graph, to the bit."""
    samples_needed: int | None
    """About how many samples would tell them apart; None where no difference is seen."""


class Recommendation(Record):
    calibrator: str
    best: str
    """The one with the highest score on the clean samples."""
    comparisons: tuple[Comparison, ...]
    alike: tuple[str, ...]
    """Calibrators that cannot be told from the best, itself included."""
    reasons: tuple[str, ...]
    resolution: float | None
    """Differences of the score below this cannot be told on these samples: the median half-width of the intervals."""


def recommend(measured: Sequence[Measured], score: Score, samples: int, seed: int) -> Recommendation:
    """Among the calibrators that cannot be told from the best on clean data, the one that does best under the shifts
    that were measured; where that tells nothing either, the one of least output error; then the first.

    Args:
        measured: INT8 graphs of one calibration set, in the order of the experiment.
    """
    resampling = Resampling(samples, seed)
    clean = np.stack([score.of(item.clean) for item in measured])
    best = best_row(list(clean))
    differences = resampling.against(best, clean)
    alike = [row for row, difference in enumerate(differences) if not difference.told_apart]
    reasons = [_first_reason(measured, score, best, alike, clean, samples)]
    candidates = alike
    if len(candidates) > 1 and (shifted := _shifted_scores(measured, score)) is not None:
        candidates, reason = _best_under_shift(measured, score, shifted, candidates, resampling)
        reasons.append(reason)
    chosen = candidates[0]
    if len(candidates) > 1:
        chosen, reason = _least_error(measured, candidates)
        reasons.append(reason)
    half_widths = [item.mean - item.low for row, item in enumerate(differences) if row != best]
    resolution = float(np.median(half_widths)) if half_widths else None
    if resolution is not None and len(alike) > 1:
        reasons.append(
            f"On {samples} samples differences below about {score.text_of_difference(resolution)} cannot be told."
        )
    if samples < _FEW:
        reasons.append(f"{samples} samples are few: give more with --verify-samples for a sharper answer.")
    return Recommendation(
        calibrator=measured[chosen].label,
        best=measured[best].label,
        comparisons=tuple(
            Comparison(
                calibrator=item.label,
                difference=difference.mean,
                low=difference.low,
                high=difference.high,
                told_apart=difference.told_apart,
                same_graph=item.graph == measured[best].graph,
                samples_needed=None if difference.told_apart else difference.needed,
            )
            for row, (item, difference) in enumerate(zip(measured, differences, strict=True))
            if row != best
        ),
        alike=tuple(measured[row].label for row in alike),
        reasons=tuple(reasons),
        resolution=resolution,
    )


def _first_reason(
    measured: Sequence[Measured], score: Score, best: int, alike: Sequence[int], clean: Floats, samples: int
) -> str:
    value = score.text(float(clean[best].mean()))
    head = f"{measured[best].label} has the best {score.name}, {value} on {samples} samples"
    others = [measured[row].label for row in alike if row != best]
    if len(measured) == 1:
        return f"{head}; it is the only one."
    if not others:
        return f"{head}, and can be told from every other."
    return f"{head}, but cannot be told apart from {', '.join(others)}."


def _shifted_scores(measured: Sequence[Measured], score: Score) -> Floats | None:
    """Per calibrator and sample, the mean score over the shifted conditions; None where there are none."""
    conditions = [key for key in measured[0].draws if key != (CLEAN.kind, CLEAN.strength)]
    if not conditions:
        return None
    return np.stack([np.mean([score.of(item.figures(key)) for key in conditions], axis=0) for item in measured])


def _best_under_shift(
    measured: Sequence[Measured], score: Score, shifted: Floats, candidates: list[int], resampling: Resampling
) -> tuple[list[int], str]:
    rows = shifted[candidates]
    best = best_row(list(rows))
    differences = resampling.against(best, rows)
    left = [
        candidate for candidate, difference in zip(candidates, differences, strict=True) if not difference.told_apart
    ]
    value = score.text(float(rows[best].mean()))
    text = f"Of these {measured[candidates[best]].label} does best under the shifts ({value})"
    if len(left) == len(candidates):
        return left, f"{text}, but not by a difference that can be told."
    worse = ", ".join(measured[candidate].label for candidate in candidates if candidate not in left)
    return left, f"{text}; measurably worse there: {worse}."


def _least_error(measured: Sequence[Measured], candidates: Sequence[int]) -> tuple[int, str]:
    errors = [float(np.mean(measured[row].clean[RELATIVE_L2])) for row in candidates]
    if not np.isfinite(errors).all():
        return candidates[0], f"{measured[candidates[0]].label} is the first of them."
    least = int(np.argmin(errors))
    chosen = candidates[least]
    return chosen, (
        f"{measured[chosen].label} has the least error at the outputs among them (relative L2 {errors[least]:.4g})."
    )
