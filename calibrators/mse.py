"""mse: the threshold of least expected squared quantisation error.

E(T) = integral of p(x) (x - s clip(round(x / s), 0, 127))^2 dx with s = T / 127 and p the density of |x| that the
histogram gives (even within a bin; exact zeros have no error). The integral is exact for that density: within the
cell of one quantised value q it is M2 - 2 q M1 + q^2 M0, with M0, M1, M2 the moments up to a point, piecewise
polynomials known from cumulative sums.

E is evaluated at T = amax 2^(-j / 64) down to amax / 1024, then around the best in steps of 2^(-1/1024); of equals the
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
_COARSE: Final = 64
_FINE: Final = 1024


class _Moments:
    """Integrals of p, x p and x^2 p from 0 to a point, for the density of a histogram."""

    def __init__(self, counts: NDArray[np.float64], width: float) -> None:
        edges = np.arange(counts.size + 1) * width
        self._counts, self._width, self._edges = counts, width, edges
        self._sums = [
            np.concatenate([[0.0], np.cumsum(counts * np.diff(edges ** (order + 1)) / ((order + 1) * width))])
            for order in range(3)
        ]

    def up_to(self, points: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Moments of order 0, 1 and 2 up to each point."""
        k = np.clip((points / self._width).astype(np.int64), 0, self._counts.size - 1)
        lower, inside = self._edges[k], np.minimum(points, self._edges[-1])
        density = self._counts[k] / self._width
        return [
            self._sums[order][k] + density * (inside ** (order + 1) - lower ** (order + 1)) / (order + 1)
            for order in range(3)
        ]


def squared_error(
    counts: NDArray[np.int64], width: float, thresholds: NDArray[np.float64], zeros: int = 0
) -> NDArray[np.float64]:
    """Sum of squared quantisation errors of the values in a histogram, float64 (thresholds,).

    Args:
        counts: (bins,) of |x|; of bin 0, ``zeros`` are exact zeros.
        width: bin width.
        thresholds: (thresholds,), positive.
    """
    dense = counts.astype(np.float64)
    dense[0] -= zeros
    moments = _Moments(dense, width)
    scale = thresholds[:, None] / LEVELS
    levels = np.arange(LEVELS + 1, dtype=np.float64)
    ends = np.concatenate([levels[:-1] + 0.5, [np.inf]])
    upper = np.minimum(ends * scale, counts.size * width)
    parts = [np.diff(moment, axis=1, prepend=0.0) for moment in moments.up_to(upper)]
    values = levels * scale
    return np.asarray((parts[2] - 2.0 * values * parts[1] + values**2 * parts[0]).sum(axis=1))


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
