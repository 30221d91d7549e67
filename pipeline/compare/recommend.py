"""Which calibrator to take, and whether the data can tell it from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from pipeline.compare.bootstrap import Resampling, best_row
from pipeline.compare.figures import RELATIVE_L2, mean_of_known
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
    @property
    def tied(self) -> bool:
        """Exactly as good."""
        return self.difference == 0.0

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


def recommend(measured: Sequence[Measured], score: Score, seed: int) -> Recommendation:
    """Among the calibrators that cannot be told from the best on clean data, the one that does best under the shifts
    that were measured; where that tells nothing either, the one of least output error; then the first.

    Args:
        measured: INT8 graphs of one calibration set, in the order of the experiment.
    """
    clean = _of_all([score.of(item.clean) for item in measured])
    samples = clean.shape[1]
    resampling = Resampling(samples, seed)
    best = best_row(list(clean))
    differences = resampling.against(best, clean)
    alike = [row for row, difference in enumerate(differences) if not difference.told_apart]
    reasons = [_first_reason(measured, score, best, alike, clean, samples)]
    candidates = alike
    if len(candidates) > 1 and (shifted := _shifted_scores(measured, score)) is not None:
        candidates, reason = _best_under_shift(measured, score, shifted, candidates, seed)
        reasons.append(reason)
    chosen = candidates[0]
    if len(candidates) > 1:
        chosen, reason = _least_error(measured, candidates)
        reasons.append(reason)
    half_widths = [item.mean - item.low for row, item in enumerate(differences) if row != best]
    resolution = float(np.median(half_widths)) if half_widths else None
    if resolution and len(alike) > 1:  # 0: all are equal, sample by sample
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
    """What the clean samples tell."""
    value = score.text(float(clean[best].mean()))
    tied = _tied(list(clean), best)
    equal = [measured[row].label for row in tied]
    others = [measured[row].label for row in alike if row not in tied]
    same_graph = len({measured[row].graph for row in tied}) == 1
    if len(tied) == len(measured) > 1:
        how = f"give the same graph: {score.name}" if same_graph else f"have exactly the same {score.name},"
        return f"{_named(equal)} {how} {value} on {samples} samples."
    has = "has" if len(tied) == 1 else "have"
    head = f"{_named(equal)} {has} the {score.superlative} {score.name}, {value} on {samples} samples"
    if len(measured) == 1:
        return f"{head}; it is the only one."
    if len(tied) > 1:
        head += f", {'both' if len(tied) == 2 else 'all'} {'by the same graph' if same_graph else 'exactly so'}"
    if not others:
        return f"{head}, and can be told from every other."
    return f"{head}, but cannot be told apart from {_named(others)}."


def _tied(rows: Sequence[Floats], best: int) -> list[int]:
    """The rows of exactly the mean of the best one, itself included."""
    most = float(rows[best].mean())
    return [number for number, row in enumerate(rows) if float(row.mean()) == most]


def _named(labels: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def _shifted_scores(measured: Sequence[Measured], score: Score) -> Floats | None:
    """Per calibrator and sample, the mean score over the shifted conditions; None where there are none, or no sample
    that they are about."""
    conditions = [key for key in measured[0].draws if key != (CLEAN.kind, CLEAN.strength)]
    if not conditions:
        return None
    found = _of_all([mean_of_known([score.of(item.figures(key)) for key in conditions]) for item in measured])
    return found if found.size else None


def _of_all(rows: Sequence[Floats]) -> Floats:
    """The rows, (k, samples), without the samples that some row is not about (NaN)."""
    stacked = np.stack(rows)
    return stacked[:, ~np.isnan(stacked).any(axis=0)]


def _best_under_shift(
    measured: Sequence[Measured], score: Score, shifted: Floats, candidates: list[int], seed: int
) -> tuple[list[int], str]:
    rows = shifted[candidates]
    best = best_row(list(rows))
    differences = Resampling(rows.shape[1], seed).against(best, rows)
    left = [
        candidate for candidate, difference in zip(candidates, differences, strict=True) if not difference.told_apart
    ]
    value = score.text(float(rows[best].mean()))
    tied = _tied(list(rows), best)
    if len(tied) == len(candidates):
        return left, f"Under the shifts they are exactly alike ({value})."
    best_ones = _named([measured[candidates[row]].label for row in tied])
    text = f"Of these {best_ones} {'does' if len(tied) == 1 else 'do'} best under the shifts ({value})"
    if len(left) == len(candidates):
        return left, f"{text}, but not by a difference that can be told."
    worse = _named([measured[candidate].label for candidate in candidates if candidate not in left])
    return left, f"{text}; measurably worse there: {worse}."


def _least_error(measured: Sequence[Measured], candidates: Sequence[int]) -> tuple[int, str]:
    errors = [float(mean_of_known(measured[row].clean[RELATIVE_L2])) for row in candidates]
    if not np.isfinite(errors).all():
        return candidates[0], f"{measured[candidates[0]].label} is the first of them."
    least = int(np.argmin(errors))
    chosen = candidates[least]
    tied = [measured[row] for row, error in zip(candidates, errors, strict=True) if error == errors[least]]
    if len(tied) > 1:
        labels = _named([item.label for item in tied])
        why = "are the same graph" if len({item.graph for item in tied}) == 1 else "have the same error at the outputs"
        return chosen, f"{labels} {why} (relative L2 {errors[least]:.4g}); {tied[0].label} is the first of them."
    return chosen, (
        f"{measured[chosen].label} has the least error at the outputs among them (relative L2 {errors[least]:.4g})."
    )
