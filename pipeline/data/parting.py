"""Which samples a search measures on, judges on and never sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Parts", "parted", "spread"]

_FEWEST = 16
"""Held-aside samples below which none is spared for figures that nothing was chosen by."""


@dataclass(frozen=True)
class Parts:
    """Held-aside samples, by what they are for."""

    check: frozenset[int]
    """Points are judged on these."""
    unseen: frozenset[int]
    """The search never looks at these; empty where there are too few samples."""
    note: str = ""
    """Why there are none."""


def parted(samples: Collection[int], multiple: int, *, held_aside: bool) -> Parts:
    """Every other group of ``multiple`` samples (the model's static batch) judges, the others are never seen."""
    ordered = sorted(samples)
    enough = len(ordered) >= max(_FEWEST, 2 * multiple)
    if not held_aside or not enough:
        what = f"only {len(ordered)} samples are held aside" if held_aside else "no samples are held aside"
        return Parts(
            frozenset(ordered),
            frozenset(),
            f"{what}: the figures are of the samples by which the mix of precisions was chosen, and flatter it",
        )
    unseen = frozenset(number for place, number in enumerate(ordered) if place // multiple % 2)
    return Parts(frozenset(ordered) - unseen, unseen)


def spread(samples: Collection[int], count: int, multiple: int) -> frozenset[int]:
    """About ``count`` of the samples, evenly spaced, and a multiple of ``multiple`` of them."""
    ordered = sorted(samples)
    wish = max(1, min(count, len(ordered)) // multiple) * multiple
    wish = min(wish, len(ordered))
    return frozenset(ordered[place * len(ordered) // wish] for place in range(wish))
