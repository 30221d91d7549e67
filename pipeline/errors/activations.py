"""What quantisation does to one activation tensor: how much is clipped, how much is rounded, and its histogram.

For values x, scale s and threshold T = 127 s, with q(x) = s * clamp(round-half-even(x / s), -128, 127) as ONNX's
QuantizeLinear has it:

- a value is *clipped* when |x| > T, otherwise *rounded*;
- the error energy Σ (x - q(x))² splits into that of clipped and that of rounded values. A large clipped part says that
  the threshold is too low (the calibrator is to blame), a large rounded part that 8 bits are too few for this range.

The histogram counts |x| / T in :data:`BINS` bins over [0, :data:`SPAN`], a value equal to T below it; what is above is
counted as overflow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BINS", "SPAN", "ActivationFigures", "quantisation_energy", "sweep_activation"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

BINS = 256
SPAN = 2.0
"""The histogram reaches to twice the threshold."""


@dataclass
class ActivationFigures:
    """Totals for one quantised tensor over everything seen; grows by :meth:`add`."""

    tensor: str
    amax: float
    values: int = 0
    clipped: int = 0
    clipped_energy: float = 0.0
    rounded_energy: float = 0.0
    energy: float = 0.0
    largest: float = 0.0
    zeros: int = 0
    histogram: Counts = field(default_factory=lambda: np.zeros(BINS + 1, np.int64))
    """Shape (:data:`BINS` + 1,): the last counts the overflow."""

    @property
    def clipped_share(self) -> float:
        """Share of values beyond the threshold."""
        return self.clipped / self.values if self.values else 0.0

    @property
    def clipping_error_share(self) -> float:
        """Share of the error energy that comes from clipped values; the rest is rounding. 0 without any error."""
        total = self.clipped_energy + self.rounded_energy
        return self.clipped_energy / total if total else 0.0

    @property
    def relative_l2(self) -> float:
        """‖x - q(x)‖ / ‖x‖; 0 for a tensor of zeros, which INT8 holds exactly."""
        total = self.clipped_energy + self.rounded_energy
        return float(np.sqrt(total / self.energy)) if self.energy else 0.0

    def add(self, sums: Floats, histogram: Counts) -> None:
        """Take in the results of :func:`sweep_activation`."""
        totals = sums.sum(axis=0)
        self.values += int(histogram.sum())
        self.clipped += int(totals[0])
        self.clipped_energy += float(totals[1])
        self.rounded_energy += float(totals[2])
        self.energy += float(totals[3])
        self.zeros += int(totals[4])
        self.largest = max(self.largest, float(sums[:, 5].max(initial=0.0)))
        self.histogram += histogram


def sweep_activation(values: Array, scale: float) -> tuple[Floats, Counts]:
    """Figures of one tensor in one sweep. Releases the interpreter lock.

    Args:
        values: float32 of shape (samples, values per sample), finite.
        scale: positive.

    Returns:
        float64 of shape (samples, 6): clipped values, their error energy, the rounded ones' error energy, the energy of
        x, zeros, the largest |x|; and the histogram of all samples, int64 of shape (BINS + 1,).
    """
    from pipeline.errors import kernels

    sums = np.zeros((values.shape[0], 6))
    histogram = np.zeros(BINS + 1, np.int64)
    # A hair less than one, so that a value equal to the threshold counts below it: it is not clipped.
    to_bin = np.float32(BINS / SPAN * (1.0 - 2.0**-20)) / (np.float32(127.0) * np.float32(scale))
    kernels.activation_sums(values, np.float32(scale), to_bin, sums, histogram)
    return sums, histogram


def quantisation_energy(values: Array, scales: Sequence[float]) -> Floats:
    """Σ (x - q(x))² per sample for several scales: shape (samples, scales). Releases the interpreter lock.

    x / s is computed as x * (1 / s), so a value on the edge between two codes may fall to the other one; its error is
    the same to within float32.

    Args:
        values: float32 of shape (samples, values per sample), finite.
    """
    from pipeline.errors import kernels

    sums = np.zeros((values.shape[0], len(scales)))
    kernels.scale_energies(values, np.asarray(scales, np.float32), sums)
    return sums
