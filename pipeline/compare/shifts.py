"""The shifts an experiment evaluates: none, noise on activations, changed images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeline.compare.images import GRADES, IMAGE_SHIFTS
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ACTIVATIONS", "CLEAN", "NONE", "Shift", "planned_shifts"]

NONE: Final = "none"
ACTIVATIONS: Final = "activations"


class Shift(Record):
    """One condition under which FP32 and every INT8 graph are evaluated alike."""

    kind: str
    """``none``, ``activations``, or a key of :data:`pipeline.compare.images.IMAGE_SHIFTS`."""
    strength: float = 0.0
    """Standard deviation of the noise for ``activations``, the grade for images."""
    draw: int = 0
    """Which drawing of the noise on activations."""

    @property
    def label(self) -> str:
        if self.kind == NONE:
            return "no shift"
        if self.kind == ACTIVATIONS:
            return f"noise {self.strength:g}"
        return f"image {self.kind} {self.strength:g}"


CLEAN: Final = Shift(kind=NONE)


def planned_shifts(sigmas: Sequence[float], draws: int, images: Sequence[str]) -> tuple[Shift, ...]:
    """Every condition once, the clean one first; noise of strength 0 is the clean one."""
    shifts = [CLEAN]
    shifts += [
        Shift(kind=ACTIVATIONS, strength=sigma, draw=draw)
        for sigma in sorted({sigma for sigma in sigmas if sigma > 0})
        for draw in range(draws)
    ]
    shifts += [
        Shift(kind=kind, strength=float(grade)) for kind in IMAGE_SHIFTS if kind in set(images) for grade in GRADES
    ]
    return tuple(shifts)
