"""entropy: the threshold that loses least information, in the sense of the Kullback-Leibler divergence.

The procedure of TensorRT as S. Migacz published it ("8-bit Inference with TensorRT", GTC 2017). With c[0..2047] the
histogram of |x| over [0, amax] and w its bin width, for every i from 128 to 2048:

- P = c[0..i-1], and all that lies outside is added to P[i-1]; P is divided by its sum.
- Q: c[0..i-1], without the outside, is put into 128 levels of neighbouring bins, and each level's sum is spread evenly
  over its non-empty bins (empty bins stay empty); Q is divided by its sum.
- KL(P||Q) = sum P ln(P / Q).

amax = (i + 1/2) w for the least divergence, at most max |x|. What the slides leave open is defined so:

- *Levels* when i is no multiple of 128: level j holds the bins floor(j i / 128) up to floor((j + 1) i / 128) - 1.
- *Zero*: exact zeros are left out (their number is known), for INT8 represents them exactly at any scale. Left in,
  the half of a ReLU's output that is zero would be spread over the other bins of the first level, and only
  thresholds at which that level is a single bin would be chosen.
- *Empty bins and epsilon*: no smoothing, no epsilon. If Q[i-1] is 0 where P[i-1] is not (the last bin is empty and
  something lies outside), the divergence is infinite and the candidate is not taken.
- *Ties*: the largest threshold, which clips least.
- *2048 bins over exactly [0, amax]* are made from the statistic's narrower ones (at least 4096 over that range), a bin
  on an edge being shared in proportion.

Parameters: none.
Known failure: few values (a small output layer, few samples) give a ragged histogram whose divergence is mostly noise;
candidates start at amax / 16, so an outlier more than 16 times the useful range keeps the threshold too high; and the
divergence does not know what the values are for: large rare activations that carry the signal are clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from calibrators.protocol import Parameters

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrators.statistics import TensorStatistics

__all__ = ["CANDIDATE_BINS", "LOG2_LEVELS", "Entropy", "least_divergence", "resampled", "spread_over_levels"]

CANDIDATE_BINS: Final = 2048
LOG2_LEVELS: Final = 7


def resampled(counts: NDArray[np.int64], width: float, limit: float, bins: int = CANDIDATE_BINS) -> NDArray[np.float64]:
    """``counts`` of bins of ``width`` as ``bins`` equal bins over [0, ``limit``], float64.

    The values of a bin lie evenly in it; those of the bin in which ``limit`` lies, below ``limit``.
    """
    used = min(int(limit / width) + 1, counts.size)
    edges = np.arange(used + 1) * width
    edges[-1] = min(edges[-1], limit) if edges[-2] < limit else limit
    cumulative = np.concatenate([[0], np.cumsum(counts[:used])]).astype(np.float64)
    cumulative[-1] = float(counts.sum())
    targets = np.arange(bins + 1) * (limit / bins)
    targets[-1] = edges[-1]
    return np.diff(np.interp(targets, edges, cumulative))


def spread_over_levels(counts: NDArray[np.float64], levels: int) -> NDArray[np.float64]:
    """The distribution Q before it is normalised: each level's sum, spread evenly over its non-empty bins.

    The slides' example: [1, 0, 2, 3, 5, 3, 1, 7] in 2 levels is [2, 0, 2, 2, 4, 4, 4, 4]. The compiled
    :func:`calibrators.divergence.divergences` never makes this array; it is here to say, and test, what it computes.
    """
    result = np.zeros(counts.size)
    for level in range(levels):
        part = slice(level * counts.size // levels, (level + 1) * counts.size // levels)
        filled = counts[part] > 0
        if filled.any():
            result[part][filled] = counts[part].sum() / filled.sum()
    return result


def least_divergence(counts: NDArray[np.float64], log2_levels: int = LOG2_LEVELS) -> int:
    """The number i of bins to keep; all of them when no candidate is finite."""
    from calibrators.divergence import divergences

    divergence = divergences(np.ascontiguousarray(counts, np.float64), log2_levels)
    best = divergence.min()
    return (1 << log2_levels) + int(np.flatnonzero(divergence == best)[-1])


@dataclass(frozen=True)
class Entropy(Parameters):
    """Least Kullback-Leibler divergence (module docstring)."""

    name: ClassVar[str] = "entropy"

    def amax(self, stats: TensorStatistics) -> float:
        counts = stats.bins.copy()
        counts[0] -= stats.zeros
        kept = least_divergence(resampled(counts, stats.width, stats.amax))
        return min((kept + 0.5) * stats.amax / CANDIDATE_BINS, stats.amax)
