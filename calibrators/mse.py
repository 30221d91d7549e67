"""mse: the threshold of least expected squared quantisation error.

E(T) = integral of p(x) (x - s clip(round(x / s), 0, 127))^2 dx with s = T / 127 and p the density of |x| that the
histogram gives (even within a bin; exact zeros have no error). The integral is exact for that density
(:mod:`calibrators.error`).

E is evaluated at T = amax 2^(-j / 32) down to amax / 1024, then around the best in steps of 2^(-1/1024); of equals the
largest threshold is taken.

Parameters: none.
Source: R. Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-deployment" (the
criterion); the search over thresholds of one histogram as in NVIDIA's HistogramCalibrator.
Known failure: squared error weighs a clipped large value most, so with heavy tails it stays near minmax; and the error
of the tensor is not the error of the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from calibrators.protocol import Parameters
from calibrators.ranges import LEVELS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrators.statistics import TensorStatistics

__all__ = ["Mse", "squared_error"]

_OCTAVES: Final = 10
_COARSE: Final = 32
_FINE: Final = 1024


def squared_error(
    counts: NDArray[np.int64], width: float, thresholds: NDArray[np.float64], zeros: int = 0
) -> NDArray[np.float64]:
    """Sum of squared quantisation errors of the values in a histogram, float64 (thresholds,).

    Args:
        counts: (bins,) of |x|; of bin 0, ``zeros`` are exact zeros.
        width: bin width.
        thresholds: (thresholds,), positive.
    """
    from calibrators.error import squared_errors

    dense = counts.astype(np.float64)
    dense[0] -= zeros
    errors: NDArray[np.float64] = squared_errors(dense, width, np.ascontiguousarray(thresholds, np.float64), LEVELS)
    return errors


@dataclass(frozen=True)
class Mse(Parameters):
    """Least squared error (module docstring)."""

    name: ClassVar[str] = "mse"

    def amax(self, stats: TensorStatistics) -> float:
        # In units of amax, so that squares neither overflow nor vanish.
        width = stats.width / stats.amax
        coarse = 2.0 ** (-np.arange(_OCTAVES * _COARSE + 1) / _COARSE)
        best = coarse[int(np.argmin(squared_error(stats.bins, width, coarse, stats.zeros)))]
        steps = np.arange(-_FINE // _COARSE, _FINE // _COARSE + 1)
        fine = np.minimum(best * 2.0 ** (-steps / _FINE), 1.0)
        return float(stats.amax * fine[int(np.argmin(squared_error(stats.bins, width, fine, stats.zeros)))])
