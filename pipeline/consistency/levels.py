"""The effective scale of a quantised tensor, from its dequantised values alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MIN_LEVELS", "Levels", "measure_scale"]

MIN_LEVELS = 8
"""Distinct magnitudes needed to tell the scale from a multiple of it: eight random levels are all even (the scale would
be taken for twice as much) once in 256."""

_MOST_LEVELS = 128
"""Magnitudes of INT8: 1 to 128."""
_SAME = 1e-3
"""Values closer than this share of the least possible scale are one level, apart by rounding."""
_FITS = 0.1
"""Largest distance from a multiple, in scales, that still counts as sitting on it (127 steps in FP16: up to 0.08)."""


@dataclass(frozen=True)
class Levels:
    """What the values of one tensor show."""

    scale: float | None
    """The largest number that all values are multiples of; None: there is none, or every value is zero."""
    residual: float
    """Largest distance of a value from a multiple of the scale, in scales; 0.5 where there is no scale."""
    levels: int
    """Distinct non-zero magnitudes."""

    @property
    def determined(self) -> bool:
        return self.scale is not None and self.levels >= MIN_LEVELS


def measure_scale(values: np.ndarray[Any, Any]) -> Levels:
    """The scale s with values = s * q for integers q in -128..127.

    The smallest magnitude is a multiple of s, so s is that one divided by 1, 2, 3 ...; the first quotient that all
    values are multiples of is it, refined by least squares (s = sum(v q) / sum(q**2)): float32 values, each off by 6e-8
    of itself, give it to 1e-7.

    Args:
        values: a float array of any shape; NaN and infinity count as sitting on no multiple.
    """
    magnitudes = np.abs(np.asarray(values, np.float64).reshape(-1))
    if not np.isfinite(magnitudes).all():
        return Levels(None, 0.5, 0)
    unique = np.unique(magnitudes)
    unique = unique[unique > 0.0]
    if not unique.size:
        return Levels(None, 0.0, 0)
    least = float(unique[-1]) / _MOST_LEVELS
    starts = np.concatenate([[True], np.diff(unique) > _SAME * least])
    levels = unique[starts]
    if levels.size > _MOST_LEVELS:
        return Levels(None, 0.5, int(levels.size))
    smallest = float(levels[0])
    for divisor in range(1, int(smallest / (least * (1.0 - _FITS / _MOST_LEVELS))) + 1):
        scale = smallest / divisor
        for _ in range(2):
            steps = np.rint(levels / scale)
            scale = float((levels * steps).sum() / (steps * steps).sum())
        residual = float(np.abs(unique / scale - np.rint(unique / scale)).max())
        if residual <= _FITS:
            return Levels(scale, residual, int(levels.size))
    return Levels(None, 0.5, int(levels.size))
