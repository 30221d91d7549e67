"""Which optimisation profile serves which shapes. Arithmetic on shapes only; no TensorRT."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.config import Profile, ShapeRange
from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Request",
    "Shape",
    "choose_profile",
    "covers",
    "distance_from_opt",
    "nearest_allowed",
    "samples_outside",
]

Shape = tuple[int, ...]
Request = tuple[tuple[str, Shape], ...]
"""Input names with shapes, in one order for all."""


def covers(profile: Profile, shapes: Mapping[str, Shape]) -> bool:
    """Every input of the profile lies in its range."""
    return all(name in shapes and shape_range.contains(shapes[name]) for name, shape_range in profile.inputs.items())


def distance_from_opt(profile: Profile, shapes: Mapping[str, Shape]) -> float:
    """Sum over inputs and dimensions of |log2(dimension / opt)|: how far a request is from what was tuned for."""
    return sum(
        abs(math.log2(dim / best)) if dim > 0 and best > 0 else abs(dim - best)
        for name, shape_range in profile.inputs.items()
        for dim, best in zip(shapes[name], shape_range.opt, strict=True)
    )


def _volume(profile: Profile) -> int:
    return sum(math.prod(shape_range.max) for shape_range in profile.inputs.values())


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """The profile whose optimum is nearest, of those that allow ``shapes``; of equals the smallest, then the first.

    Raises:
        InputError: none allows them; the profile and shape nearest to each input's are named.
    """
    allowed = [number for number, profile in enumerate(profiles) if covers(profile, shapes)]
    if allowed:
        return min(
            allowed,
            key=lambda number: (distance_from_opt(profiles[number], shapes), _volume(profiles[number]), number),
        )
    number, nearest = nearest_allowed(profiles, shapes)
    profile = profiles[number]
    wrong = [
        f"input {name!r} has shape {_text(shapes[name])}, profile {number} allows {_text(shape_range.min)} to "
        f"{_text(shape_range.max)}, nearest {_text(nearest[name])}"
        for name, shape_range in profile.inputs.items()
        if not shape_range.contains(shapes[name])
    ]
    raise InputError(
        f"no optimisation profile of the engine allows these shapes ({len(profiles)} profiles): " + "; ".join(wrong),
        remedy="send one of the nearest shapes, or build the engine with a profile that covers yours (--profile)",
    )


def nearest_allowed(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> tuple[int, dict[str, Shape]]:
    """The profile that needs the least change of ``shapes``, and the shapes changed to fit it.

    Raises:
        InputError: an input has another number of dimensions than the profiles.
    """
    best: tuple[float, int, dict[str, Shape]] | None = None
    for number, profile in enumerate(profiles):
        nearest = {name: _clamp(name, shapes[name], shape_range) for name, shape_range in profile.inputs.items()}
        change = sum(
            abs(math.log2(max(new, 1) / max(old, 1)))
            for name, shape in nearest.items()
            for new, old in zip(shape, shapes[name], strict=True)
        )
        if best is None or change < best[0]:
            best = (change, number, nearest)
    if best is None:
        raise InputError("the engine has no optimisation profile")
    return best[1], best[2]


def samples_outside(profiles: Sequence[Profile], samples: Mapping[Request, int]) -> tuple[str, ...]:
    """A warning where samples have shapes that no profile allows: the commonest of them, and the nearest profile.

    Args:
        samples: shapes of a sample's inputs, without the batch axis, to the number of such samples.
    """
    if not profiles:
        return ()
    inner = [
        Profile(
            inputs={
                name: ShapeRange(min=own.min[1:], opt=own.opt[1:], max=own.max[1:])
                for name, own in profile.inputs.items()
            }
        )
        for profile in profiles
    ]
    outside = {
        shapes: count for shapes, count in samples.items() if not any(covers(own, dict(shapes)) for own in inner)
    }
    if not outside:
        return ()
    shapes = min(outside, key=lambda found: (-outside[found], found))
    commonest = dict(shapes)
    ranks = {name: len(own.min) for name, own in inner[0].inputs.items()}
    nearest = all(name in commonest and len(commonest[name]) == rank for name, rank in ranks.items())
    number = nearest_allowed(inner, commonest)[0] if nearest else 0
    unfit = [
        f"input {name!r} with {_text(commonest[name])}, where profile {number} allows {_text(own.min)} to "
        f"{_text(own.max)}"
        for name, own in inner[number].inputs.items()
        if name in commonest and not own.contains(commonest[name])
    ]
    return (
        f"{sum(outside.values())} of {sum(samples.values())} calibration samples have shapes that no profile allows, "
        f"most of them {'; '.join(unfit)} (the nearest of {len(profiles)}): the engine will see no such samples, and "
        "ranges may differ from those it will see",
    )


def _clamp(name: str, shape: Shape, allowed: ShapeRange) -> Shape:
    if len(shape) != len(allowed.min):
        raise InputError(
            f"input {name!r} has {len(shape)} dimensions {_text(shape)}, the engine wants {len(allowed.min)}"
        )
    return tuple(min(max(dim, low), high) for dim, low, high in zip(shape, allowed.min, allowed.max, strict=True))


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"
