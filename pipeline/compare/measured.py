"""Figures of one graph under every shift, and which of them an experiment is decided by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from pipeline.compare.figures import AGREEMENT, LEFT_OUT, METRIC, RELATIVE_L2, TOP1, mean_of_known
from pipeline.compare.shifts import CLEAN, Shift
from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.compare.variants import Variant

__all__ = ["Condition", "Measured", "Score", "chosen_score", "has_figure"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Condition: TypeAlias = "tuple[str, float]"
"""Kind and strength of a shift, whatever the draw."""


@dataclass(frozen=True)
class Score:
    """The figure by which calibrators are judged; higher is better."""

    figure: Literal["metric", "top1", "agreement", "relative_l2"]

    @property
    def superlative(self) -> str:
        """What the best one's score is."""
        return "least" if self.figure == RELATIVE_L2 else "best"

    @property
    def name(self) -> str:
        return {METRIC: "metric", TOP1: "top-1", AGREEMENT: "agreement with FP32", RELATIVE_L2: "output error"}[
            self.figure
        ]

    @property
    def percent(self) -> bool:
        return self.figure in (TOP1, AGREEMENT)

    @property
    def own(self) -> bool:
        """FP32 has the figure too: it is no comparison with FP32."""
        return self.figure in (METRIC, TOP1)

    def of(self, figures: Mapping[str, Floats]) -> Floats:
        """One number per sample, higher is better."""
        values = figures[self.figure]
        return -values if self.figure == RELATIVE_L2 else values

    def text(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.2f} %"
        return f"{-value:.4g}" if self.figure == RELATIVE_L2 else f"{value:.4g}"

    def text_of_difference(self, value: float) -> str:
        return f"{100 * value:.2f} points" if self.percent else f"{value:.3g}"


@dataclass
class Measured:
    """What was measured of one graph."""

    label: str
    graph: str
    """SHA-256 of the graph's file."""
    calibration_samples: int | None = None
    subset: int | None = None
    """Number of the subset of the calibration samples, None for the experiment's own."""
    variant: Variant | None = None
    """None: FP32."""
    clipping_share: float | None = None
    """Share of the calibration values beyond the thresholds, over all quantised activations."""
    draws: dict[Condition, list[Mapping[str, Floats]]] = field(default_factory=dict)
    layers: Floats | None = None
    """Relative L2 error of each layer, mean over the samples looked at: (layers,)."""

    def add(self, shift: Shift, figures: Mapping[str, Floats]) -> None:
        self.draws.setdefault((shift.kind, shift.strength), []).append(figures)

    def figures(self, condition: Condition) -> dict[str, Floats]:
        """Per sample, mean over the draws."""
        draws = self.draws[condition]
        return {name: mean_of_known([draw[name] for draw in draws]) for name in draws[0] if name != "samples"}

    @property
    def clean(self) -> dict[str, Floats]:
        return self.figures((CLEAN.kind, CLEAN.strength))


_ORDER: Final[tuple[Literal["metric", "top1", "agreement", "relative_l2"], ...]] = (
    METRIC,
    TOP1,
    AGREEMENT,
    RELATIVE_L2,
)


def has_figure(figures: Mapping[str, Floats], figure: str) -> bool:
    """Every sample has it, but for those that relative figures leave out; and some sample does."""
    if figure not in figures:
        return False
    known = np.isfinite(figures[figure])
    left_out = figures[LEFT_OUT] > 0 if LEFT_OUT in figures else np.zeros(known.shape, np.bool_)
    return bool(known.any() and (known | left_out).all())


def chosen_score(measured: Sequence[Measured]) -> Score:
    """The first of metric, top-1, agreement and output error that every INT8 graph has, of all samples but those that
    relative figures leave out.

    Raises:
        InputError: there is none.
    """
    for figure in _ORDER:
        if all(has_figure(item.clean, figure) for item in measured):
            return Score(figure)
    raise InputError(
        "the outputs of FP32 and INT8 cannot be compared: their shapes depend on the values, or FP32 is almost zero in "
        "all samples",
        remedy="give a --metric that judges the outputs",
    )
