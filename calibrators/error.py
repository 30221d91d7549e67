"""Compiled: the squared quantisation error of a histogram's values, for many thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibrators.kernels import compiled

__all__ = ["squared_errors"]


@compiled
def squared_errors(counts: Any, width: Any, thresholds: Any, levels: Any) -> Any:
    """Sum of (x - s clip(round(x / s), 0, levels))^2 over the values of a histogram, s = threshold / levels.

    Within the cell of one quantised value q the integral is M2 - 2 q M1 + q^2 M0, with M0, M1 and M2 the integrals of
    p, x p and x^2 p over the cell: differences of cumulative sums at the bin edges and, within a bin, of polynomials.

    Args:
        counts: float64 (bins,); the values of a bin lie evenly in it.
        width: bin width.
        thresholds: float64 (thresholds,), positive.

    Returns:
        float64 (thresholds,).
    """
    bins = counts.size
    mass, first, second = np.zeros(bins + 1), np.zeros(bins + 1), np.zeros(bins + 1)
    for k in range(bins):
        lower, upper = k * width, (k + 1) * width
        density = counts[k] / width
        mass[k + 1] = mass[k] + counts[k]
        first[k + 1] = first[k] + density * (upper * upper - lower * lower) / 2.0
        second[k + 1] = second[k] + density * (upper * upper * upper - lower * lower * lower) / 3.0
    end = bins * width
    result = np.empty(thresholds.size)
    for t in range(thresholds.size):
        scale = thresholds[t] / levels
        error, m0, m1, m2 = 0.0, 0.0, 0.0, 0.0
        for q in range(levels + 1):
            edge = min((q + 0.5) * scale, end) if q < levels else end
            k = min(int(edge / width), bins - 1)
            lower = k * width
            density = counts[k] / width
            n0 = mass[k] + density * (edge - lower)
            n1 = first[k] + density * (edge * edge - lower * lower) / 2.0
            n2 = second[k] + density * (edge * edge * edge - lower * lower * lower) / 3.0
            value = q * scale
            error += (n2 - m2) - 2.0 * value * (n1 - m1) + value * value * (n0 - m0)
            m0, m1, m2 = n0, n1, n2
        result[t] = error
    return result
