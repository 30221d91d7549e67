"""How well an engine's optimisation profiles fit the shapes that requests really have, and which would fit better.

Distance of a request from the profile that serves it: the sum over dimensions of |log2(dimension / opt)|, so that 1
means a factor of two in one dimension. Kernels are chosen for the optimum.

Requests that the model itself can never take, of another rank or with another static dimension, are counted and shown
apart: no profile is suggested for them, since none that holds them could be built.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config import LARGEST_DIMENSION, Profile, ShapeRange
from pipeline.core.errors import InputError, did_you_mean
from pipeline.engine.profiles import Request, Shape, choose_profile, covers, distance_from_opt
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.records import TensorSpec

__all__ = ["Coverage", "Impossible", "ProfileUse", "coverage", "impossible", "read_requests", "suggest"]

_COUNT = "count"
_NUMBER = re.compile(r"[0-9]{1,18}")
_SHAPE = re.compile(r"[1-9][0-9]{0,18}(x[1-9][0-9]{0,18})*")
_SHOWN = 20
"""Characters of a wrong cell in a message."""
_CANDIDATES = 500
_ITERATIONS = 50


class ProfileUse(Record):
    """One profile's part of the requests."""

    profile: str
    requests: int
    share: float
    mean_distance: float


class Impossible(Record):
    """Requests that the model never takes, whatever the profiles."""

    shapes: str
    requests: int
    reason: str


class Coverage(Record):
    """All of them."""

    requests: int
    covered: float
    """Share of requests that some profile allows."""
    mean_distance: float
    """Over the covered requests."""
    uses: tuple[ProfileUse, ...]
    uncovered: tuple[tuple[str, int], ...]
    """Shapes that no profile allows, with their number, most frequent first."""


def read_requests(path: Path, inputs: Sequence[str]) -> Counter[Request]:
    """Requests from a CSV file: a column per input with shapes such as ``8x3x224x224``, and ``count`` if wanted.

    Lines of count 0 are no requests.

    Raises:
        InputError: the file is missing, empty or no CSV; a column is unknown, missing or there twice; a line has more
            cells than the header; or a shape or count cannot be read.
    """
    found: Counter[Request] = Counter()
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:  # spreadsheets write a byte order mark
            reader = csv.DictReader(stream)
            columns = reader.fieldnames or []
            if twice := [column for number, column in enumerate(columns) if column in columns[:number]]:
                raise InputError(f"{path}: its header has {twice[0]!r} twice")
            for column in columns:
                if column not in inputs and column != _COUNT:
                    raise InputError(
                        f"{path}: the model has no input {column!r}; {did_you_mean(column, [*inputs, _COUNT])}"
                    )
            if missing := [name for name in inputs if name not in columns]:
                raise InputError(
                    f"{path}: no column for input {missing[0]!r}; its header must be {','.join(inputs)}[,{_COUNT}]"
                )
            for number, row in enumerate(reader, 2):
                surplus = list(row.get(None) or ())  # where csv puts them
                if any(surplus):  # a spreadsheet ends lines in empty ones
                    raise InputError(
                        f"{path}, line {number}: {len(columns) + len(surplus)} cells below {len(columns)} columns: "
                        f"{','.join(surplus)!r} has no header",
                        remedy=f"the number of requests goes into a column {_COUNT}; a cell with commas needs quotes",
                    )
                shapes = tuple((name, _shape(row[name], path, number, name)) for name in inputs)
                count = (row.get(_COUNT) or "1").strip()
                if not _NUMBER.fullmatch(count):
                    shown = count if len(count) <= _SHOWN else f"{count[:_SHOWN]}..."
                    raise InputError(f"{path}, line {number}: count {shown!r} is not a number of requests")
                if int(count):  # a shape that was never asked for says nothing
                    found[shapes] += int(count)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", remedy="give the CSV file with the requests"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file: {error}") from error
    if not found:
        raise InputError(f"{path} has no requests", remedy=f"one line per request below the header {','.join(inputs)}")
    return found


def _shape(text: str | None, path: Path, line: int, name: str) -> Shape:
    if not _SHAPE.fullmatch((text or "").strip()):
        raise InputError(f"{path}, line {line}: {text!r} is not a shape of {name!r} such as 8x3x224x224")
    shape = tuple(int(dim) for dim in (text or "").split("x"))
    if max(shape) > LARGEST_DIMENSION:
        raise InputError(
            f"{path}, line {line}: {max(shape)} in the shape of {name!r} is beyond the largest dimension, "
            f"{LARGEST_DIMENSION}"
        )
    return shape


def impossible(inputs: Sequence[TensorSpec], requests: Mapping[Request, int]) -> dict[Request, Impossible]:
    """Those of ``requests`` that the model takes in no profile, the most frequent first, with the reason."""
    found = {}
    for request, count in requests.items():
        shapes = dict(request)
        reasons = [text for spec in inputs if (text := _unfit(spec, shapes[spec.name]))]
        if reasons:
            found[request] = Impossible(shapes=_text(request), requests=count, reason="; ".join(reasons))
    return dict(sorted(found.items(), key=lambda item: (-item[1].requests, item[0])))


def _unfit(spec: TensorSpec, shape: Shape) -> str:
    """Why the model's input never has this shape; empty where it may."""
    if spec.shape is None:
        return ""
    model = "x".join(map(str, spec.shape)) or "a scalar"
    if len(shape) != len(spec.shape):
        return f"input {spec.name!r} has rank {len(spec.shape)} in the model ({model}), not {len(shape)}"
    for axis, (dim, given) in enumerate(zip(spec.shape, shape, strict=True)):
        if isinstance(dim, int) and dim != given:
            return f"dimension {axis} of input {spec.name!r} is {dim} in the model ({model}), not {given}"
    return ""


def coverage(profiles: Sequence[Profile], requests: Mapping[Request, int]) -> Coverage:
    """Which profile serves which share of ``requests``, and how far from its optimum."""
    counts = [0] * len(profiles)
    distances = [0.0] * len(profiles)
    uncovered: Counter[str] = Counter()
    for request, count in requests.items():
        shapes = dict(request)
        if not any(covers(profile, shapes) for profile in profiles):
            uncovered[_text(request)] += count
            continue
        number = choose_profile(profiles, shapes)
        counts[number] += count
        distances[number] += count * distance_from_opt(profiles[number], shapes)
    total, served = sum(requests.values()), sum(counts)
    return Coverage(
        requests=total,
        covered=served / total,
        mean_distance=sum(distances) / served if served else 0.0,
        uses=tuple(
            ProfileUse(
                profile=str(profile),
                requests=count,
                share=count / total,
                mean_distance=distance / count if count else 0.0,
            )
            for profile, count, distance in zip(profiles, counts, distances, strict=True)
        ),
        uncovered=tuple(uncovered.most_common()),
    )


def suggest(requests: Mapping[Request, int], count: int) -> tuple[Profile, ...]:
    """``count`` profiles that allow all ``requests`` and lie near them: weighted k-medoids in log2 of the dimensions.

    Equal requests give equal profiles, whatever their order.

    Raises:
        InputError: the requests have different numbers of dimensions, or ``count`` is below 1.
    """
    if count < 1:
        raise InputError(f"at least one profile is needed, got {count}")
    shapes = sorted(requests)
    ranks = {tuple((name, len(shape)) for name, shape in request) for request in shapes}
    if len(ranks) > 1:
        raise InputError("the requests have different numbers of dimensions, no profile can allow them all")
    points = np.log2([[dim for _, shape in request for dim in shape] for request in shapes])
    weights = np.array([requests[request] for request in shapes], dtype=np.float64)
    medoids = _medoids(points, weights, min(count, len(shapes)))
    nearest = np.abs(points[:, None] - points[medoids][None]).sum(-1).argmin(1)
    profiles = []
    for cluster, medoid in enumerate(medoids):
        members = [shapes[index] for index in np.flatnonzero(nearest == cluster)]
        profiles.append(_profile(members, shapes[medoid]))
    return tuple(sorted(profiles, key=str))


def _medoids(points: np.ndarray, weights: np.ndarray, count: int) -> list[int]:
    """Indices of ``count`` points: farthest first from the heaviest, then improved until nothing changes."""
    chosen = [int(np.argmax(weights))]
    while len(chosen) < count:
        distance = np.abs(points[:, None] - points[chosen][None]).sum(-1).min(1) * weights
        chosen.append(int(np.argmax(distance)))
    for _ in range(_ITERATIONS):
        nearest = np.abs(points[:, None] - points[chosen][None]).sum(-1).argmin(1)
        improved = []
        for cluster, old in enumerate(chosen):
            members = np.flatnonzero(nearest == cluster)
            heaviest = members[np.argsort(-weights[members], kind="stable")[:_CANDIDATES]]
            if not len(members):
                improved.append(old)
                continue
            costs = (np.abs(points[heaviest][:, None] - points[members][None]).sum(-1) * weights[members]).sum(1)
            improved.append(int(heaviest[np.argmin(costs)]))
        if improved == chosen:
            break
        chosen = improved
    return chosen


def _profile(members: Sequence[Request], medoid: Request) -> Profile:
    inputs = {}
    for index, (name, best) in enumerate(medoid):
        shapes = np.array([member[index][1] for member in members])
        low, high = (tuple(int(dim) for dim in edge) for edge in (shapes.min(0), shapes.max(0)))
        inputs[name] = ShapeRange(min=low, opt=best, max=high)
    return Profile(inputs=inputs)


def _text(request: Request) -> str:
    return ";".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in request)
