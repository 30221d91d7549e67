"""An engine against the outputs that an artifact's ``samples.npz`` has for a few inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.core.errors import CheckFailed, InputError
from pipeline.engine.profiles import covers, nearest_allowed
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config import Profile
    from pipeline.engine.serving import Serving

__all__ = ["OUTPUT_TOLERANCE", "EngineCheck", "Samples", "check_engine_outputs", "check_outputs", "fit_samples", "fits"]

OUTPUT_TOLERANCE = 0.1
"""Largest relative L2 difference of an engine's output from the Q/DQ graph's in onnxruntime. Kernels round differently,
which moves single values by a quantisation step; a wrong scale or a lost layer gives about 1."""


class EngineCheck(Record):
    """The engine's outputs against those recorded in the artifact."""

    relative_l2: dict[str, float]
    """Per output: ||engine - recorded|| / ||recorded|| over all samples."""
    agreement: dict[str, float]
    """Per output: share of places along all but the last axis whose arg-max is the same."""
    samples: int


@dataclass(frozen=True)
class Samples:
    """Inputs, samples along the first axis, and what one graph of the artifact gave for them in onnxruntime."""

    feeds: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]

    @classmethod
    def read(cls, path: Path, graph: Literal["int8", "fp32"]) -> Samples:
        """From ``samples.npz``: the keys ``inputs/NAME`` and ``int8/NAME`` or ``fp32/NAME``.

        Raises:
            CheckFailed: no output of that graph is recorded.
        """
        with np.load(path, allow_pickle=False) as stored:
            feeds, expected = (
                {name.removeprefix(key): stored[name] for name in stored.files if name.startswith(key)}
                for key in ("inputs/", f"{graph}/")
            )
        if not expected:
            raise CheckFailed(
                f"{path} has no recorded output of the {graph} graph: the engine cannot be checked",
                remedy="build the artifact again",
            )
        return cls(feeds, expected)


def check_engine_outputs(runner: Serving, samples: Samples, tolerance: float) -> EngineCheck:
    """Run the samples and compare.

    Raises:
        CheckFailed: no profile allows the samples, or as :func:`check_outputs`.
    """
    fitted, kept = fit_samples(samples.feeds, runner.profiles)
    outputs = {name: values[:kept] for name, values in runner(runner.taken(fitted)).items()}
    return check_outputs(outputs, samples.expected, kept, tolerance)


def fits(feeds: Mapping[str, np.ndarray], profiles: Sequence[Profile]) -> bool:
    """Whether :func:`fit_samples` finds a batch that some profile allows."""
    try:
        fit_samples(feeds, profiles)
    except (CheckFailed, InputError):
        return False
    return True


def fit_samples(feeds: Mapping[str, np.ndarray], profiles: Sequence[Profile]) -> tuple[dict[str, np.ndarray], int]:
    """Samples in a batch that some profile allows: repeated where that is larger, cut where it is smaller.

    Returns:
        The feeds, and how many leading samples are to be compared.

    Raises:
        CheckFailed: no profile allows the samples' own shapes at any batch.
    """
    shapes = {name: values.shape for name, values in feeds.items()}
    count = next(iter(shapes.values()))[0] if shapes else 0
    if any(covers(profile, shapes) for profile in profiles):
        return dict(feeds), count
    _, nearest = nearest_allowed(profiles, shapes)
    batch = next(iter(nearest.values()))[0]
    wanted = {name: (batch, *shape[1:]) for name, shape in shapes.items()}
    if not any(covers(profile, wanted) for profile in profiles):
        raise CheckFailed(
            f"no profile allows the recorded samples: {', '.join(f'{n} {s}' for n, s in shapes.items())}",
            remedy="build with a profile that covers the shapes of the data the artifact was verified on",
        )
    return {name: np.resize(values, wanted[name]) for name, values in feeds.items()}, min(count, batch)


def check_outputs(
    outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], samples: int, tolerance: float
) -> EngineCheck:
    """Compare floating-point outputs with the recorded ones.

    Raises:
        CheckFailed: an output is missing, has another shape, is not finite, or is further away than ``tolerance``.
    """
    distances, agreement = {}, {}
    problems: list[str] = []
    for name, recorded in expected.items():
        wanted = (recorded[:samples] if recorded.ndim else recorded).astype(np.float64)
        if name not in outputs:
            problems.append(f"the engine has no output {name!r}; it has {', '.join(outputs)}")
            continue
        found = outputs[name].astype(np.float64)
        if found.shape != wanted.shape:
            problems.append(f"output {name!r} has shape {found.shape}, recorded is {wanted.shape}")
            continue
        if not np.all(np.isfinite(found)):
            problems.append(f"output {name!r} of the engine has NaN or infinity")
            continue
        norm = float(np.linalg.norm(wanted))
        distances[name] = float(np.linalg.norm(found - wanted)) / norm if norm else float(np.linalg.norm(found))
        if wanted.ndim:
            agreement[name] = float(np.mean(found.argmax(-1) == wanted.argmax(-1)))
        if distances[name] > tolerance:
            problems.append(
                f"output {name!r} of the engine differs from the recorded one by {distances[name]:.3g} (relative L2), "
                f"allowed is {tolerance:g}"
            )
    check = EngineCheck(relative_l2=distances, agreement=agreement, samples=samples)
    if problems:
        raise CheckFailed(
            "; ".join(problems),
            remedy="the engine was not added; build without FP16, or ask `quantize errors --engine` for the layer",
            figures={"check": check.model_dump(mode="json"), "tolerance": tolerance},
        )
    return check
