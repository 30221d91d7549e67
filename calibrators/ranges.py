"""From a statistic to the range that goes into the graph: the one place where degenerate tensors are decided.

Whatever the statistic and the calibrator say, the scale is a positive, normal, finite float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from calibrators.protocol import Calibrator
    from calibrators.statistics import TensorStatistics

__all__ = ["DEFAULT_AMAX", "LEVELS", "SMALLEST_AMAX", "RangeWarning", "resolve_amax", "scale_of"]

LEVELS: Final = 127
"""INT8 is used symmetrically, -127..127; the zero point is 0."""

DEFAULT_AMAX: Final = 1.0
"""Range of a tensor that showed no non-zero finite value: any scale represents what was seen."""

SMALLEST_AMAX: Final = LEVELS * 2.0**-63
"""Least range: the product of two such scales (activation and weight) is still a normal float32."""


@dataclass(frozen=True)
class RangeWarning:
    """Why a tensor's range is not what the calibrator alone would say, or deserves a look."""

    kind: Literal["never-seen", "all-zero", "constant", "tiny", "non-finite", "no-range"]
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def scale_of(amax: float) -> np.float32:
    """amax / 127, computed in float32 as TensorRT does."""
    scale: np.float32 = np.float32(amax) / np.float32(LEVELS)
    return scale


def resolve_amax(stats: TensorStatistics, calibrator: Calibrator) -> tuple[float, RangeWarning | None]:
    """The range to quantise a tensor with, and a warning when the tensor is degenerate.

    ============  =========================================================  ==========================================
    kind          when                                                       range
    ============  =========================================================  ==========================================
    never-seen    no finite value at all                                     :data:`DEFAULT_AMAX`
    all-zero      every finite value is zero                                 :data:`DEFAULT_AMAX`
    constant      one non-zero value throughout                              its magnitude
    no-range      the calibrator gives 0, NaN or infinity (for example a     the greatest magnitude
                  percentile of a tensor that is nearly all zeros)
    tiny          the range is below :data:`SMALLEST_AMAX`                   :data:`SMALLEST_AMAX`
    non-finite    NaN or infinities were counted and left out                as the calibrator says
    ============  =========================================================  ==========================================
    """
    bad = stats.nans + stats.infs
    if stats.finite == 0:
        seen = f"all {bad} values are NaN or infinite" if bad else "no value was seen"
        return DEFAULT_AMAX, RangeWarning("never-seen", f"{seen} in calibration; amax {DEFAULT_AMAX:g} is used")
    if stats.amax == 0.0:
        text = f"all {stats.finite} values are zero in calibration; amax {DEFAULT_AMAX:g} is used"
        return DEFAULT_AMAX, RangeWarning("all-zero", text)
    warning = None
    if bad:
        warning = RangeWarning("non-finite", f"{stats.nans} NaN and {stats.infs} infinite values were left out")
    if stats.minimum == stats.maximum:
        amax = stats.amax
        warning = RangeWarning("constant", f"all {stats.finite} values are {stats.minimum:g} in calibration")
    else:
        amax = float(calibrator.amax(stats))
        if not (math.isfinite(amax) and amax > 0.0):
            text = f"{calibrator.name} gives amax {amax:g}; the greatest magnitude, {stats.amax:g}, is used"
            amax, warning = stats.amax, RangeWarning("no-range", text)
    if amax < SMALLEST_AMAX:
        text = f"amax {amax:g} is below the smallest useful one; {SMALLEST_AMAX:g} is used"
        return SMALLEST_AMAX, RangeWarning("tiny", text)
    return amax, warning
