"""legacy: a quantile of |x|, and a cut-off by regression of the histogram's tail.

NVIDIA documents of IInt8LegacyCalibrator only that the *quantile* in (0, 1] "selects the region maximum" and that the
*regression cutoff*, a fraction of the maximum, bounds the regression that determines it; the algorithm is not
published. Here:

- amax_q = F^-1(quantile), as `percentile`; quantile 1 is the maximum.
- With cutoff < 1, a straight line is fitted to the logarithm of the counts (least squares, weighted by the counts, over
  256 equal bins of [0, max |x|], the non-empty ones from the fullest up to cutoff * max |x|), the model being an
  exponential tail; amax_r is where it falls to one value per bin. A line that does not fall, or fewer than three bins,
  cuts nothing.
- amax = min(amax_q, amax_r, max |x|).

TensorRT 8.6.0 itself (EfficientNet-Lite0, quantile 0.999, cutoff 0.5; from its verbose log and its caches) counts 2048
equal bins up to the maximum. Its quantile is the upper edge of the bin that reaches it: ours to one of those bins. Its
regression starts at the fullest bin after the first and may end *above* the maximum; it is preferred to the quantile
unless it is no number or more than twice the maximum (1.62 times was taken, 2.05 times not). Where its region ends is
not known, so that with a regression the two differ: theirs is 0.58 to 2.3 times ours on that network.

Parameters: ``quantile`` 0.999 (what long-tailed data wants), ``cutoff`` 1.0 (no regression).
Source: TensorRT's NvInfer.h for the meaning of the two parameters; the regression is this project's reading of it.
Known failure: as `percentile`; a tail that is not exponential (ReLU6's heap at 6, a bounded Sigmoid) is fitted badly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from calibrators.entropy import resampled
from calibrators.protocol import Parameters, check_between

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrators.statistics import TensorStatistics

__all__ = ["Legacy", "regression_cutoff"]

_BINS: Final = 256
_MIN_POINTS: Final = 3


def regression_cutoff(counts: NDArray[np.float64], fraction: float) -> float:
    """Bin number (fractional) at which the fitted exponential falls to one value; the number of bins if it never does.

    Args:
        counts: (bins,) of a magnitude.
        fraction: of the bins, the end of the fitted region.
    """
    first = int(counts.argmax())
    region = np.arange(first, max(int(fraction * counts.size), first))
    region = region[counts[region] > 0]
    if region.size < _MIN_POINTS:
        return float(counts.size)
    x, y, weight = region + 0.5, np.log(counts[region]), counts[region] / counts[region].sum()
    x_mean, y_mean = float(weight @ x), float(weight @ y)
    slope = float(weight @ ((x - x_mean) * (y - y_mean))) / float(weight @ (x - x_mean) ** 2)
    return float(counts.size) if slope >= 0.0 else min(x_mean - y_mean / slope, float(counts.size))


@dataclass(frozen=True)
class Legacy(Parameters):
    """Quantile and regression cut-off (module docstring)."""

    name: ClassVar[str] = "legacy"

    quantile: float = 0.999
    cutoff: float = 1.0

    def __post_init__(self) -> None:
        check_between(self.name, "quantile", self.quantile, low=0.0, high=1.0)
        check_between(self.name, "cutoff", self.cutoff, low=0.0, high=1.0)

    def amax(self, stats: TensorStatistics) -> float:
        result = stats.percentile(100.0 * self.quantile)
        if self.cutoff < 1.0:
            counts = stats.bins.copy()
            counts[0] -= stats.zeros
            tail = regression_cutoff(resampled(counts, stats.width, stats.amax, stats.amax, _BINS), self.cutoff)
            result = min(result, tail * stats.amax / _BINS)
        return result
