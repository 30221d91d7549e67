"""percentile: the magnitude below which ``percentile`` per cent of all values lie.

amax = F^-1(percentile / 100), F the distribution of |x| (zeros included) given by the histogram, interpolated linearly
within the bin (a width of at most amax / 4096).

Parameters: ``percentile`` 99.99 (99.9 clips more, 99.999 less).
Source: H. Wu et al., "Integer Quantization for Deep Learning Inference: Principles and Empirical Evaluation" (2020).
Known failure: it clips the same share of every tensor, whether that share carries the signal (the few large
activations of transformers) or none; and zeros count, so a sparse ReLU output is clipped harder than a dense one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from calibrators.protocol import Parameters, check_between

if TYPE_CHECKING:
    from calibrators.statistics import TensorStatistics

__all__ = ["Percentile"]


@dataclass(frozen=True)
class Percentile(Parameters):
    """A percentile of all magnitudes (module docstring)."""

    name: ClassVar[str] = "percentile"

    percentile: float = 99.99

    def __post_init__(self) -> None:
        check_between(self.name, "percentile", self.percentile, low=0.0, high=100.0)

    def amax(self, stats: TensorStatistics) -> float:
        return stats.percentile(self.percentile)
