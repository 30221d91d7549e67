"""What a tensor's histogram says about a range: how much is clipped, and how large the quantisation error will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from calibrators import TensorStatistics

__all__ = ["clipped_values", "expected_error"]


def clipped_values(stats: TensorStatistics, amax: float) -> float:
    """How many values have a magnitude above ``amax``; those of the bin that holds it lie evenly in it."""
    if stats.finite == 0 or amax >= stats.amax:
        return 0.0
    bin_of_amax = int(amax / stats.width)
    above = float(stats.bins[bin_of_amax + 1 :].sum())
    lower = bin_of_amax * stats.width
    upper = min(lower + stats.width, stats.amax)
    return above + float(stats.bins[bin_of_amax]) * (upper - amax) / (upper - lower)


def expected_error(stats: TensorStatistics, amax: float) -> float:
    """Relative L2 error of the tensor when it is quantised with the range ``amax``: sqrt(E[(x - Q(x))^2] / E[x^2]).

    Both expectations come from the histogram, values lying evenly in their bin (:mod:`calibrators.mse`). 0 for a tensor
    without a non-zero value.
    """
    from calibrators.mse import squared_error

    if stats.amax == 0.0:
        return 0.0
    width = stats.width / stats.amax  # in units of the largest magnitude, so that squares neither overflow nor vanish
    threshold = np.array([amax / stats.amax])
    error = float(squared_error(stats.bins, width, threshold, stats.zeros)[0])
    counts = stats.bins.astype(np.float64)
    counts[0] -= stats.zeros
    edges = np.arange(counts.size + 1) * width
    power = float(counts @ (np.diff(edges**3) / (3.0 * width)))
    return float(np.sqrt(error / power)) if power > 0.0 else 0.0
