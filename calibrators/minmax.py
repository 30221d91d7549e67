"""minmax: amax = max |x| over all data.

Parameters: none.
Source: TensorRT's IInt8MinMaxCalibrator, onnxruntime's MinMaxCalibrater; the range of every max calibrator.
Known failure: one outlier sets the scale; with a long tail most values share few of the 127 levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from calibrators.protocol import Parameters

if TYPE_CHECKING:
    from calibrators.statistics import TensorStatistics

__all__ = ["MinMax"]


@dataclass(frozen=True)
class MinMax(Parameters):
    """The whole range (module docstring)."""

    name: ClassVar[str] = "minmax"

    def amax(self, stats: TensorStatistics) -> float:
        return stats.amax
