"""How sure are the figures? A paired bootstrap over the samples.

The samples are drawn anew, with replacement, :data:`RESAMPLES` times, the same drawing for everything that is compared:
two calibrators see the same images, so what the images have in common cancels in their difference.

Intervals of one figure are percentile intervals. For "is B worse than the best?" one asks about all others at once, and
which one is the best was read off the same samples. So the intervals of differences are simultaneous for all pairs:
difference +- c * standard error, with c the 95 % quantile over the resamples of the largest |difference* - difference|
/ standard error among all pairs (the studentised maximum, as in J. Romano and M. Wolf, "Exact and Approximate Stepdown
Methods for Multiple Hypothesis Testing", 2005, without the steps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CONFIDENCE", "RESAMPLES", "Difference", "Interval", "Resampling"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 5000
_CHUNK_COUNTS: Final = 1 << 24


@dataclass(frozen=True)
class Interval:
    """A mean over the samples and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Best minus other; the interval holds for all pairs at once."""

    mean: float
    low: float
    high: float
    needed: int | None
    """About how many samples would tell the two apart, if the difference is what it seems; None when it is 0."""

    @property
    def told_apart(self) -> bool:
        return self.low > 0.0


class Resampling:
    """The drawings for one set of samples.

    Args:
        samples: how many there are.
        seed: of the drawings.
    """

    def __init__(self, samples: int, seed: int, *, resamples: int = RESAMPLES) -> None:
        if samples < 1:
            raise ValueError("a bootstrap needs at least one sample")
        self.samples = samples
        self.resamples = resamples
        self._seed = seed

    def means(self, values: Floats) -> Floats:
        """Mean of each row of ``values`` (k, samples) in every resample: (k, resamples)."""
        generator = np.random.Generator(np.random.Philox(self._seed))
        means = np.empty((values.shape[0], self.resamples))
        step = max(1, _CHUNK_COUNTS // self.samples)
        for start in range(0, self.resamples, step):
            rows = min(step, self.resamples - start)
            drawn = generator.integers(0, self.samples, (rows, self.samples))
            drawn += np.arange(rows)[:, None] * self.samples
            counts = np.bincount(drawn.reshape(-1), minlength=rows * self.samples).reshape(rows, self.samples)
            means[:, start : start + rows] = values @ counts.T.astype(np.float64) / self.samples
        return means

    def intervals(self, values: Floats) -> list[Interval]:
        """The mean of each row of ``values`` (k, samples), with its percentile interval.

        A row with NaN, of samples that it is not about, is resampled among the others, of which there is at least one.
        """
        known = ~np.isnan(values)
        if known.all():
            return self._intervals(values)
        found: list[Interval] = []
        whole = iter(self._intervals(values[known.all(axis=1)])) if known.all(axis=1).any() else iter(())
        for row, mask in zip(values, known, strict=True):
            part = Resampling(int(mask.sum()), self._seed, resamples=self.resamples)
            found.append(next(whole) if mask.all() else part._intervals(row[mask][None])[0])
        return found

    def _intervals(self, values: Floats) -> list[Interval]:
        tail = 100.0 * (1.0 - CONFIDENCE) / 2.0
        low, high = np.percentile(self.means(values), [tail, 100.0 - tail], axis=1)
        return [
            Interval(float(mean), float(a), float(b)) for mean, a, b in zip(values.mean(axis=1), low, high, strict=True)
        ]

    def against(self, best: int, values: Floats) -> list[Difference]:
        """Row ``best`` minus every row of ``values`` (k, samples), the row itself included (all zeros there)."""
        means, resampled = values.mean(axis=1), self.means(values)
        factor = _simultaneous_factor(means, resampled)
        errors = (resampled[best] - resampled).std(axis=1)
        return [
            self._difference(float(means[best] - mean), float(error) * factor)
            for mean, error in zip(means, errors, strict=True)
        ]

    def _difference(self, mean: float, half_width: float) -> Difference:
        needed = int(np.ceil(self.samples * (half_width / mean) ** 2)) if mean > 0.0 else None
        return Difference(mean, mean - half_width, mean + half_width, needed)


def _simultaneous_factor(means: Floats, resampled: Floats) -> float:
    """The 95 % quantile of the largest studentised deviation among all pairs of rows."""
    largest = np.zeros(resampled.shape[1])
    for first in range(len(means)):
        deviation = (resampled[first] - resampled[first + 1 :]) - (means[first] - means[first + 1 :])[:, None]
        errors = deviation.std(axis=1)
        uncertain = errors > 0.0
        if uncertain.any():
            studentised = np.abs(deviation[uncertain]) / errors[uncertain, None]
            largest = np.maximum(largest, studentised.max(axis=0))
    return float(np.percentile(largest, 100.0 * CONFIDENCE))


def best_row(values: Sequence[Floats]) -> int:
    """The row of the greatest mean, the first of equals."""
    return int(np.argmax([float(row.mean()) for row in values]))
