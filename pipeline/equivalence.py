"""Do two models compute the same? Example inputs, and the largest difference of each output in onnxruntime.

The measure of a float output is max|a - b| / max|a|; of an integer or boolean output the share of elements that differ
(an arg-max or a top-k jumps where two values tie within rounding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import QuantizeError
from pipeline.core.ort import make_session, read_graph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config import Profile
    from pipeline.records import TensorSpec

__all__ = [
    "Difference",
    "difference",
    "differences",
    "example_shapes",
    "random_feeds",
    "rounding_noise",
    "run_model",
    "run_on_random",
]

Array = np.ndarray[Any, np.dtype[Any]]
_NOISE_TRIALS = 3
_FREE_SIZES = (64, 32, 224, 16, 8, 1)
"""Tried in this order for dynamic dimensions about which nothing is known."""


@dataclass(frozen=True)
class Difference:
    """The worst output of a comparison."""

    output: str
    error: float
    """Relative error of a float output; share of differing elements of any other; infinity where only one is finite."""
    position: tuple[int, ...] = ()
    expected: float = np.nan
    found: float = np.nan
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Expected and found shape, where they are not the same."""

    @property
    def figure(self) -> float | None:
        """:attr:`error` as JSON can hold it: None where it is infinite."""
        return float(self.error) if np.isfinite(self.error) else None

    def describe(self) -> str:
        """What a message says of it."""
        if self.shapes is not None:
            return f"output {self.output!r} has the shape {self.shapes[1]} instead of {self.shapes[0]}"
        return (
            f"output {self.output!r} differs by {self.error:.3g} of its largest value "
            f"(at {self.position} it is {self.found:.6g} instead of {self.expected:.6g})"
        )


def difference(expected: Mapping[str, Array], found: Mapping[str, Array]) -> Difference:
    """The output with the largest difference. Names are equal; another shape counts as infinitely different."""
    return max(differences(expected, found).values(), key=lambda item: item.error)


def differences(expected: Mapping[str, Array], found: Mapping[str, Array]) -> dict[str, Difference]:
    """The difference of each output by name."""
    return {name: _of_output(name, expected[name], found[name]) for name in expected}


def _of_output(name: str, expected: Array, found: Array) -> Difference:
    if expected.shape != found.shape:
        return Difference(name, np.inf, shapes=(expected.shape, found.shape))
    if not expected.size:
        return Difference(name, 0.0)
    if expected.dtype.kind != "f":
        differs = expected != found
        position = _position(differs.astype(np.int8))
        return Difference(name, float(differs.mean()), position, float(expected[position]), float(found[position]))
    a, b = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(a)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(a - b))
    distance = np.where(np.isfinite(distance), distance, np.inf)
    position = _position(distance)
    largest = float(np.abs(a[finite]).max(initial=0.0))
    worst = float(distance[position])
    error = 0.0 if worst == 0 else worst / largest if largest > 0 else np.inf
    return Difference(name, error, position, float(a[position]), float(b[position]))


def _position(values: Array) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(int(values.argmax()), values.shape))


def example_shapes(inputs: Sequence[TensorSpec], profiles: Sequence[Profile] = ()) -> list[dict[str, tuple[int, ...]]]:
    """Shapes to try, the likeliest first: the profiles' smallest and optimal, otherwise guesses for dynamic dimensions.

    A guess may be wrong (a network may need multiples of 32), so a caller tries the next one where a model refuses.
    """
    shapes: list[dict[str, tuple[int, ...]]] = []
    for profile in profiles:
        for end in ("min", "opt"):
            found = {spec.name: _profiled(spec, profile, end) for spec in inputs}
            if all(shape is not None for shape in found.values()):
                shapes.append({name: shape for name, shape in found.items() if shape is not None})
    for size in _FREE_SIZES:
        shapes.append({spec.name: _guessed(spec, size) for spec in inputs})
    return list({str(item): item for item in shapes}.values())


def _profiled(spec: TensorSpec, profile: Profile, end: str) -> tuple[int, ...] | None:
    if spec.name in profile.inputs:
        shape: tuple[int, ...] = getattr(profile.inputs[spec.name], end)
        return shape
    return None if spec.dynamic else tuple(int(dim) for dim in spec.shape or ())


def _guessed(spec: TensorSpec, size: int) -> tuple[int, ...]:
    return tuple(
        dim if isinstance(dim, int) else (2 if axis == 0 else size) for axis, dim in enumerate(spec.shape or ())
    )


def random_feeds(inputs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Array]:
    """Reproducible arrays: standard normal for floats, 0 or 1 for integers and booleans (valid for ids and masks)."""
    generator = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for spec in inputs:
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            feeds[spec.name] = generator.standard_normal(shapes[spec.name], dtype=np.float32).astype(dtype)
        else:
            feeds[spec.name] = generator.integers(0, 2, shapes[spec.name]).astype(dtype)
    return feeds


def rounding_noise(model: Path, feeds: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
    """How far the tensors ``expected`` of ``model`` move when each float input moves by one unit in its last place.

    Two equal models may differ by as much: a network that ends in a sigmoid near zero, or that subtracts what is almost
    equal, has fewer correct digits than float32. The largest of a few seeded trials, by name.
    """
    generator = np.random.default_rng(0)
    trials = []
    for _ in range(_NOISE_TRIALS):
        moved = dict(feeds)
        for name, array in feeds.items():
            if array.dtype.kind == "f":
                step = np.finfo(array.dtype).eps * generator.choice([-1.0, 1.0], array.shape)
                moved[name] = (array * (1 + step)).astype(array.dtype)
        trials.append(moved)
    found = [differences(expected, moved) for moved in run_model(model, trials, capture=list(expected))]
    return {name: max(trial[name].error for trial in found) for name in expected}


def run_model(
    model: Path, feeds: Sequence[Mapping[str, Array]], *, capture: Sequence[str] = ()
) -> list[dict[str, Array]]:
    """Outputs of ``model`` and the tensors ``capture`` by name for each of ``feeds``.

    A graph with Q/DQ nodes runs without onnxruntime's optimisations: they differ with what of it is a constant, round
    differently, and a Q/DQ pair makes a whole step of the last place. The session is gone when this returns.

    Raises:
        ToolError: onnxruntime refuses the model. Its own exceptions escape where it refuses the feeds.
    """
    import onnxruntime

    session = make_session(model, capture=capture, optimise=not _rounds_to_steps(model))
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # what it would print is in its exception
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, dict(feed), options), strict=True)) for feed in feeds]


def run_on_random(
    model: Path, inputs: Sequence[TensorSpec], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[int, dict[str, Array]] | str:
    """Outputs of ``model`` on random inputs of the first of ``shapes`` that it takes, and which that is; or why not.

    The inputs are those of :func:`random_feeds` with the place in ``shapes`` as seed.
    """
    for number, shape in enumerate(shapes):
        try:
            return number, run_model(model, [random_feeds(inputs, shape, seed=number)])[0]
        except QuantizeError as error:
            return error.message
        except Exception:  # onnxruntime refuses these shapes with one of several types: try the next
            continue
    return "no input shape was found that the model takes"


def _rounds_to_steps(model: Path) -> bool:
    proto = read_graph(model)
    bodies = (proto.graph.node, *(function.node for function in proto.functions))
    return any(node.op_type == "QuantizeLinear" for nodes in bodies for node in nodes)
