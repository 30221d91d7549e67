"""entropy: the threshold that loses least information, in the sense of the Kullback-Leibler divergence.

The procedure of TensorRT as S. Migacz published it ("8-bit Inference with TensorRT", GTC 2017). With c[0..2047] the
histogram of |x| and w its bin width, for every i from 128 to 2048:

- P = c[0..i-1], and all that lies outside is added to P[i-1]; P is divided by its sum.
- Q: c[0..i-1], without the outside, is put into 128 levels of neighbouring bins, and each level's sum is spread evenly
  over its non-empty bins (empty bins stay empty); Q is divided by its sum.
- KL(P||Q) = sum P ln(P / Q).

amax = (i + 1/2) w for the least divergence, at most max |x|. What the slides leave open was found by comparing with the
caches of TensorRT 8.6.0's IInt8EntropyCalibrator2 (tests/calibrators/data): on histograms like its own, the rules below
give the same i for 149 of 150 tensors of EfficientNet-Lite0.

- *Levels* when i is no multiple of 128: bin k belongs to level floor(128 k / i).
- *Zero bin*: c[0] is replaced by c[1]. The zeros of a ReLU, half of all values, would otherwise be spread over the
  other bins of the first level, and only thresholds at which that level is a single bin would be chosen.
- *Empty bins and epsilon*: no smoothing, no epsilon. If c[i-1] is 0 and something lies outside, Q is 0 where P is not,
  the divergence is infinite and the candidate is not taken.
- *Ties*: the largest threshold, which clips least.
- *Range*: TensorRT's histogram reaches to the first batch's maximum, doubled until all later batches fit, so its result
  depends on what happens to be in the first batch. Here it reaches to max |x|, which depends on the data alone;
  ``tensorrt_range`` 1 does as TensorRT. Against its caches the median difference is below 0.1 % either way, and within
  10 % are 95 % of the tensors, or 98 % with its range: the divergence is ragged, and another bin width can make
  another of its minima the least.

The 2048 bins are made from the narrower ones of the statistic (at least 4096 over max |x|), and one that lies across
an edge is shared in proportion.

Parameters: ``tensorrt_range`` 0, or 1 as above.
Known failure: few values (a small output layer, few samples) give a ragged histogram whose divergence is mostly noise;
candidates start at a sixteenth of the range, so an outlier more than 16 times the useful range keeps the threshold too
high; and the divergence does not know what values are for: large rare activations that carry the signal are clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from calibrators.protocol import Parameters
from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrators.statistics import TensorStatistics

__all__ = ["CANDIDATE_BINS", "LOG2_LEVELS", "Entropy", "least_divergence", "resampled", "spread_over_levels"]

CANDIDATE_BINS: Final = 2048
LOG2_LEVELS: Final = 7


def resampled(
    counts: NDArray[np.int64], width: float, amax: float, limit: float, bins: int = CANDIDATE_BINS
) -> NDArray[np.float64]:
    """``counts`` of bins of ``width`` as ``bins`` equal bins over [0, ``limit``], float64.

    The values of a bin lie evenly in it; those of the last one in use, below ``amax``, which is at most ``limit``.
    """
    last = int(amax / width)
    edges = np.arange(last + 2) * width
    edges[-1] = max(amax, edges[-2] + width * 2.0**-20)  # values that all lie on the last edge need room
    cumulative = np.concatenate([[0], np.cumsum(counts[: last + 1])]).astype(np.float64)
    targets = np.arange(bins + 1) * (limit / bins)
    targets[-1] = max(targets[-1], edges[-1])
    return np.diff(np.interp(targets, edges, cumulative))


def spread_over_levels(counts: NDArray[np.float64], levels: int) -> NDArray[np.float64]:
    """The distribution Q before it is normalised: each level's sum, spread evenly over its non-empty bins.

    The slides' example: [1, 0, 2, 3, 5, 3, 1, 7] in 2 levels is [2, 0, 2, 2, 4, 4, 4, 4]. The compiled
    :func:`calibrators.divergence.divergences` never makes this array; it is here to say, and test, what it computes.
    """
    level = np.arange(counts.size) * levels // counts.size
    sums = np.bincount(level, counts, levels)
    filled = np.bincount(level, counts > 0, levels)
    return np.where(counts > 0, (sums / np.maximum(filled, 1))[level], 0.0)


def least_divergence(counts: NDArray[np.float64], log2_levels: int = LOG2_LEVELS) -> int:
    """The number i of bins to keep; all of them when no candidate is finite."""
    from calibrators.divergence import divergences

    divergence = divergences(np.ascontiguousarray(counts, np.float64), log2_levels)
    return (1 << log2_levels) + int(np.flatnonzero(divergence == divergence.min())[-1])


@dataclass(frozen=True)
class Entropy(Parameters):
    """Least Kullback-Leibler divergence (module docstring)."""

    name: ClassVar[str] = "entropy"

    tensorrt_range: float = 0.0

    def __post_init__(self) -> None:
        if self.tensorrt_range not in (0.0, 1.0):
            raise InputError(f"{self.name}: tensorrt_range must be 0 or 1, got {self.tensorrt_range:g}")

    def amax(self, stats: TensorStatistics) -> float:
        limit = self._limit(stats)
        counts = resampled(stats.bins, stats.width, stats.amax, limit)
        counts[0] = counts[1]
        if not counts.any():  # every value is in the zero bin: the range comes from a single far larger batch
            return stats.amax
        return min((least_divergence(counts) + 0.5) * limit / CANDIDATE_BINS, stats.amax)

    def _limit(self, stats: TensorStatistics) -> float:
        first = float(stats.batch_amax[0]) if stats.batch_amax.size else 0.0
        if not self.tensorrt_range or first == 0.0:
            return stats.amax
        return first * 2.0 ** math.ceil(math.log2(stats.amax / first))
