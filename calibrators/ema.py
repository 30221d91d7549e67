"""ema: exponential moving average of the batch maxima.

amax_0 = m_0;  amax_t = alpha * amax_{t-1} + (1 - alpha) * m_t, with m_t = max |x| of batch t, in the order of the
global batch index (not of arrival: shards and workers cannot change it).

Parameters: ``alpha`` 0.9, the weight of the past.
Source: MQBench's EMAMinMaxObserver (ratio 0.9); B. Jacob et al., "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", section 3.1.
Known failure: the result depends on the batch size and on the order of the data, and the last 1 / (1 - alpha) batches
weigh most: give it shuffled data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from calibrators.protocol import Parameters, check_between

if TYPE_CHECKING:
    from collections.abc import Iterable

    from calibrators.statistics import TensorStatistics

__all__ = ["Ema", "moving_average"]


def moving_average(values: Iterable[float], weight: float) -> float:
    """``weight`` * previous + (1 - ``weight``) * next over ``values``, the first one seeding it; 0.0 for none."""
    result: float | None = None
    for value in values:
        result = float(value) if result is None else weight * result + (1.0 - weight) * float(value)
    return 0.0 if result is None else result


@dataclass(frozen=True)
class Ema(Parameters):
    """Moving average of the batch maxima (module docstring)."""

    name: ClassVar[str] = "ema"

    alpha: float = 0.9

    def __post_init__(self) -> None:
        check_between(self.name, "alpha", self.alpha, low=0.0, high=1.0, open_above=True)

    def amax(self, stats: TensorStatistics) -> float:
        return moving_average(stats.batch_amax.tolist(), self.alpha)
