"""An engine looked into: layers, their times where they can be measured, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.artifact import SAMPLES, Artifact, engine_folder
from pipeline.core.errors import InputError
from pipeline.engine.bench import shapes_for_batch
from pipeline.engine.inspect import EngineLayer, parse_layers
from pipeline.engine.lint import Finding, lint_build, lint_layers, lint_shapes
from pipeline.engine.loading import artifact_engine
from pipeline.engine.profiles import choose_profile
from pipeline.engine.records import LAYERS_FILE, EngineRecord
from pipeline.engine.runner import Runner
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.engine.profiles import Shape

__all__ = ["EngineView", "view_engine"]


class EngineView(Record):
    """What `quantize inspect --engine` shows."""

    target: str
    tensorrt: str
    built_on: str
    layers: tuple[EngineLayer, ...]
    """Of all profiles, one after the other; where something was measured, of the profile in use."""
    times_ms: dict[str, float]
    """Median per layer name; empty when nothing was measured."""
    shapes: dict[str, tuple[int, ...]]
    """What was measured with."""
    findings: tuple[Finding, ...]

    @property
    def float_convolutions(self) -> tuple[EngineLayer, ...]:
        return tuple(layer for layer in self.layers if layer.convolution and layer.computes_float)


def view_engine(artifact: Artifact, target: str, *, batch: int | None = None) -> EngineView:
    """Look into one of an artifact's engines.

    Args:
        batch: measure each layer's time at this batch size, on the card in this machine; None: measure nothing.

    Raises:
        InputError: no such engine; or one built without a GPU, of which TensorRT tells nothing; or no profile allows
            the batch.
        ToolError: the times are wanted and there is no card, or TensorRT fails.
    """
    plan, record = artifact_engine(artifact, target)
    name = f"{engine_folder(target)}/{LAYERS_FILE}"
    text = artifact.path(name).read_text() if name in artifact.manifest.files else None
    times: dict[str, float] = {}
    shapes: dict[str, Shape] = {}
    profile: int | None = None
    if batch is not None:
        with Runner(plan, target=target, record=record) as runner:
            shapes = shapes_for_batch(runner.profiles, batch)
            times = runner.layer_times(_feeds(artifact, runner, shapes))
            text = runner.layer_information(shapes)  # says more than the plan alone: formats of dynamic tensors
            profile = choose_profile(runner.profiles, shapes)
    if text is None:
        raise InputError(
            f"the {target} engine of {artifact.folder} was {record.built_on} and cannot be looked into there",
            remedy="give --batch on a machine that can run it, or build it there: quantize build --from "
            f"{artifact.folder} --target {target}",
        )
    layers = tuple(layer for layer in parse_layers(text) if profile is None or layer.profile == profile)
    return EngineView(
        target=target,
        tensorrt=record.tensorrt,
        built_on=record.built_on,
        layers=layers,
        times_ms=times,
        shapes=shapes,
        findings=(*lint_layers(layers, times), *_elsewhere(record, shapes)),
    )


def _elsewhere(record: EngineRecord, shapes: Mapping[str, Shape]) -> tuple[Finding, ...]:
    """Findings about the build and the profiles."""
    tuned = lint_shapes(record.profiles, shapes) if record.profiles and shapes else ()
    return (*lint_build(record.messages), *tuned)


def _feeds(artifact: Artifact, runner: Runner, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """The artifact's samples, repeated to fill ``shapes``; noise for an input they do not fit."""
    generator = np.random.default_rng(0)
    feeds = {}
    with np.load(artifact.path(SAMPLES), allow_pickle=False) as stored:
        for spec in runner.inputs:
            key, shape = f"inputs/{spec.name}", shapes[spec.name]
            if key in stored.files and stored[key].shape[1:] == shape[1:]:
                feeds[spec.name] = np.resize(stored[key], shape).astype(spec.dtype)
            else:
                feeds[spec.name] = generator.standard_normal(shape).astype(spec.dtype)
    return feeds
