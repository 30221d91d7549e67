"""Serve an artifact that has two plans: INT8, and float for the profiles where it was measured to be faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pipeline.artifact import Artifact, engine_folder
from pipeline.core.errors import CheckFailed, InputError
from pipeline.engine.fastest import Fastest
from pipeline.engine.loading import artifact_engine
from pipeline.engine.profiles import choose_profile, covers
from pipeline.engine.records import FASTEST_FILE, FLOAT_PLAN_FILE, FLOAT_RECORD_FILE, EngineRecord
from pipeline.engine.runner import Runner
from pipeline.engine.serving import Arrays, Request, Serving

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import numpy as np

    from pipeline.config import Profile
    from pipeline.engine.profiles import Shape
    from pipeline.records import TensorSpec

__all__ = ["FastestRunner", "float_engine", "open_runner", "serve"]


class FastestRunner(Serving):
    """Two runners behind one interface: each request goes to the plan that is faster for its shape.

    Each plan has slots of its own: at most ``in_flight`` requests of either are on the card, and both plans' weights
    and scratch memory. The answers of the float plan are FP16's, those of the other INT8's.

    Args:
        int8: decides which shapes are allowed, and by which profile.
        other: the float plan; its profiles may be fewer.
        float_profiles: numbers of INT8's profiles whose shapes the float plan serves.

    Raises:
        InputError: the plans take or return other tensors, or lie on two cards.
    """

    def __init__(self, int8: Runner, other: Runner, float_profiles: Collection[int]) -> None:
        for what, first, second in (("inputs", int8.inputs, other.inputs), ("outputs", int8.outputs, other.outputs)):
            if [(s.name, s.dtype) for s in first] != [(s.name, s.dtype) for s in second]:
                raise InputError(
                    f"the {what} of the INT8 plan are {_text(first)}, those of the float plan {_text(second)}",
                    remedy="build both with the same options: quantize build --from ARTIFACT --fastest",
                )
        if int8.device is not other.device:
            raise InputError("the INT8 and the float plan lie on two cards", remedy="load both on one")
        self._int8, self._other, self._float = int8, other, frozenset(float_profiles)
        self.device = int8.device
        self.in_flight = min(int8.in_flight, other.in_flight)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._int8.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._int8.outputs

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return self._int8.profiles

    @property
    def device_bytes(self) -> int:
        return self._int8.device_bytes + self._other.device_bytes

    @property
    def uncaptured(self) -> Mapping[str, str]:
        return {**self._int8.uncaptured, **self._other.uncaptured}

    def plan_for(self, shapes: Mapping[str, Shape]) -> Literal["int8", "float"]:
        return "int8" if self.runner_for(shapes) is self._int8 else "float"

    def runner_for(self, shapes: Mapping[str, Shape]) -> Runner:
        """The float plan's runner where its profile won and it allows the shapes; else INT8's, errors included."""
        both = all(any(covers(p, shapes) for p in plan.profiles) for plan in (self._other, self._int8))
        return self._other if both and choose_profile(self.profiles, shapes) in self._float else self._int8

    def open_request(self, shapes: Mapping[str, Shape]) -> Request:
        return self.runner_for(shapes).open_request(shapes)

    def check(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        return self._int8.check(feeds)

    def close(self) -> None:
        self._int8.close()
        self._other.close()


def _text(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name} ({spec.dtype})" for spec in specs)


def float_engine(artifact: Artifact, target: str) -> tuple[Path, EngineRecord, Fastest] | None:
    """The float plan beside an artifact's INT8 plan, its record and the choices; None where none is kept.

    Raises:
        CheckFailed: a file of it is missing from the manifest, or not what that says.
    """
    place, files = engine_folder(target), artifact.manifest.files
    names = [f"{place}/{name}" for name in (FLOAT_PLAN_FILE, FLOAT_RECORD_FILE, FASTEST_FILE)]
    if names[0] not in files:
        return None
    remedy = f"quantize build --from {artifact.folder} --target {target} --fastest"
    for name in names:
        if name not in files:
            raise CheckFailed(f"{artifact.folder} has {names[0]} without {name}", remedy=remedy)
    plan, record, choices = (artifact.path(name, remedy=remedy) for name in names)
    return (
        plan,
        EngineRecord.model_validate_json(record.read_bytes()),
        Fastest.model_validate_json(choices.read_bytes()),
    )


def open_runner(artifact: Artifact, target: str = "tensorrt", **options: Any) -> Serving:
    """As :func:`serve`, for an artifact that is open."""
    plan, record = artifact_engine(artifact, target)
    found = float_engine(artifact, target)
    int8 = Runner(plan, target=target, record=record, **options)
    if found is None:
        return int8
    try:
        other = Runner(found[0], target=target, record=found[1], **options)
        try:
            return FastestRunner(int8, other, found[2].float_profiles)
        except BaseException:
            other.close()
            raise
    except BaseException:
        int8.close()
        raise


def serve(folder: Path, *, target: str = "tensorrt", **options: Any) -> Serving:
    """What serves an artifact fastest: its engine, or engine and float plan where one is kept.

    :meth:`Runner.from_artifact` runs the INT8 plan alone, whatever was measured.

    Args:
        options: those of :class:`Runner`; they hold for either plan.

    Raises:
        InputError: no such artifact or engine, or one for another card or version.
        CheckFailed: a plan is not the one that the manifest lists.
    """
    return open_runner(Artifact.open(folder), target, **options)
