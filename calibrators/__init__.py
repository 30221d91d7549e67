"""Calibrators: from the statistics of a float model's tensors to INT8 ranges. All symmetric: scale = amax / 127."""

from calibrators.protocol import Calibrator
from calibrators.ranges import DEFAULT_AMAX, SMALLEST_AMAX, RangeWarning, resolve_amax, scale_of
from calibrators.registry import get, names
from calibrators.statistics import TensorStatistics, load_statistics, save_statistics

__all__ = [
    "DEFAULT_AMAX",
    "SMALLEST_AMAX",
    "Calibrator",
    "RangeWarning",
    "TensorStatistics",
    "get",
    "load_statistics",
    "names",
    "resolve_amax",
    "save_statistics",
    "scale_of",
]
