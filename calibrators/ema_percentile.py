"""ema-percentile: exponential moving average of the batches' percentiles.

amax_0 = p_0;  amax_t = decay * amax_{t-1} + (1 - decay) * p_t, with p_t the ``percentile`` of |x| in batch t alone, in
the order of the global batch index.

Parameters: ``percentile`` 99.99, one of those kept for every batch (:data:`calibrators.statistics.PERCENTILES`, and
100 for the maximum); ``decay`` 0.95.
Source: MQBench's EMAQuantileObserver, with one percentile of the whole batch.
Known failure: as `ema`, order and batch size matter; with small batches a high percentile is nearly the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from calibrators.ema import moving_average
from calibrators.protocol import Parameters, check_between
from calibrators.statistics import PERCENTILES
from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from calibrators.statistics import TensorStatistics

__all__ = ["EmaPercentile"]


@dataclass(frozen=True)
class EmaPercentile(Parameters):
    """Moving average of the batch percentiles (module docstring)."""

    name: ClassVar[str] = "ema-percentile"

    percentile: float = 99.99
    decay: float = 0.95

    def __post_init__(self) -> None:
        check_between(self.name, "decay", self.decay, low=0.0, high=1.0, open_above=True)
        if self.percentile not in (*PERCENTILES, 100.0):
            raise InputError(
                f"{self.name}: percentile {self.percentile:g} is not kept per batch",
                remedy=f"choose one of {', '.join(f'{value:g}' for value in (*PERCENTILES, 100.0))}",
            )

    def amax(self, stats: TensorStatistics) -> float:
        if self.percentile == 100.0:
            return moving_average(stats.batch_amax.tolist(), self.decay)
        column = PERCENTILES.index(self.percentile)
        return moving_average(stats.batch_percentiles[:, column].tolist(), self.decay)
