"""What a calibrator is. Third-party ones need nothing but this shape."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibrators.statistics import TensorStatistics

__all__ = ["Calibrator", "Parameters", "check_between"]


@runtime_checkable
class Calibrator(Protocol):
    """Turns the statistic of one tensor into the range [-amax, amax] that INT8 will cover."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    @property
    def params(self) -> Mapping[str, float]:
        """Every parameter with its value in force, for the manifest."""

    def amax(self, stats: TensorStatistics) -> float:
        """The range of a tensor that has at least one finite, non-zero value. Depends on ``stats`` alone."""


class Parameters:
    """Mixin for calibrators that are dataclasses: the fields are the parameters."""

    @property
    def params(self) -> dict[str, float]:
        return {item.name: float(getattr(self, item.name)) for item in dataclasses.fields(self)}  # type: ignore[arg-type]


def check_between(
    calibrator: str, parameter: str, value: float, *, low: float, high: float, open_above: bool = False
) -> None:
    """Raise :class:`InputError` unless ``low < value <= high`` (``< high`` when ``open_above``)."""
    if not low < value <= high or (open_above and value == high):
        raise InputError(
            f"{calibrator}: {parameter} must be above {low:g} and {'below' if open_above else 'at most'} {high:g}, "
            f"got {value:g}",
            remedy=f"give another {parameter}",
        )
