"""Target ``tensorrt``: the INT8 graphs as engines on the card in this machine.

Each distinct graph becomes an engine; where noise is put on the activations, a second one is built from the graph with
the noise inputs. FP32 stays in onnxruntime, so that the reference is the same for every target, and so do the layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.compare.activations import NOISE_PREFIX, add_noise_inputs
from pipeline.compare.archive import read_batches
from pipeline.compare.task import FileSet
from pipeline.config import Profile, ShapeRange
from pipeline.core.errors import InputError
from pipeline.core.files import write_bytes
from pipeline.core.ort import make_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.compare.task import Setting
    from pipeline.core.progress import Progress
    from pipeline.engine.records import BuildOptions
    from pipeline.runner import StageRunner

__all__ = ["EngineBuilder", "EngineSession", "require_tensorrt"]

_NOISY = "noisy.onnx"


def require_tensorrt() -> str | None:
    """TensorRT's version.

    Raises:
        InputError: it does not work on this machine.
    """
    from pipeline.engine.probe import probe

    status = probe("tensorrt")
    if not status.works:
        raise InputError(
            f"target tensorrt does not work here: {status.reason}",
            remedy="`quantize doctor` says which targets do; --target onnx needs no card",
        )
    return status.version


class EngineBuilder:
    """Builds engines as stages, so that each is built once."""

    def __init__(self, setting: Setting, runner: StageRunner, options: BuildOptions, progress: Progress) -> None:
        from pipeline.engine.device import describe_device

        self._setting = setting
        self._runner = runner
        self._options = options
        self._progress = progress
        self._place = {"version": require_tensorrt(), "card": str(describe_device())}

    def build(self, int8: FileSet, *, noisy: bool) -> FileSet:
        """The engine of a graph, with inputs for noise or without."""
        from pipeline import build as stage

        profile = _profile(self._setting, noisy=noisy)

        def action(folder: Path) -> stage.BuildResult:
            model = int8.path
            if noisy:
                model = _with_noise_inputs(int8.path, self._setting.activations, folder)
            return stage.run(
                model,
                target="tensorrt",
                profiles=(profile,),
                folder=folder,
                options=self._options,
                progress=self._progress,
            )

        key = {
            "model": list(int8.digests),
            "noise": list(self._setting.activations) if noisy else [],
            "profile": str(profile),
            "options": self._options.model_dump(mode="json"),
            **self._place,
        }
        finished = self._runner.run("engine", stage.BuildResult, key, action)
        names = (stage.PLAN_FILE, stage.BUILD_FILE)
        return FileSet(finished.result.folder, names, tuple(finished.files[name] for name in names))


def _with_noise_inputs(model: Path, tensors: Sequence[str], folder: Path) -> Path:
    import onnx_ir as ir

    from pipeline.onnxfile import load_model

    loaded = load_model(model)
    add_noise_inputs(loaded, tensors)
    ir.external_data.load_to_model(loaded)
    write_bytes(folder / _NOISY, ir.to_proto(loaded).SerializeToString(deterministic=True))
    return folder / _NOISY


def _profile(setting: Setting, *, noisy: bool) -> Profile:
    """From one sample to a whole stored batch, for the inputs and the noise.

    Raises:
        InputError: samples of several sizes; an evaluation engine has one.
    """
    largest: dict[str, tuple[int, ...]] = {}
    feeds: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    for batch in read_batches(setting.samples.path):
        for name, values in batch.feeds.items():
            known = largest.setdefault(name, values.shape)
            if values.shape[1:] != known[1:]:
                raise InputError(
                    f"target tensorrt needs samples of one size; input {name!r} has {known[1:]} and {values.shape[1:]}",
                    remedy="resize the samples, or compare with --target onnx",
                )
        feeds = feeds or batch.feeds
    smallest = dict(largest) if setting.static_batch else {name: (1, *shape[1:]) for name, shape in largest.items()}
    if noisy:
        session = make_session(setting.fp32.path, capture=setting.activations, threads=1)
        inputs = [spec.name for spec in session.get_inputs()]
        for shapes in (smallest, largest):
            part = {name: feeds[name][: shapes[name][0]] for name in inputs}
            values = session.run(list(setting.activations), part)
            for name, array in zip(setting.activations, values, strict=True):
                shapes[NOISE_PREFIX + name] = array.shape
    return Profile(
        inputs={name: ShapeRange(min=smallest[name], opt=shape, max=shape) for name, shape in largest.items()}
    )


class EngineSession:
    """An engine behind the little of onnxruntime's interface that the evaluation uses. Close it after use."""

    def __init__(self, files: FileSet) -> None:
        from pipeline.engine.records import BUILD_FILE, EngineRecord
        from pipeline.engine.runner import Runner

        record = EngineRecord.model_validate_json((files.folder / BUILD_FILE).read_bytes())
        self._runner = Runner(files.path, target="tensorrt", record=record)
        self.inputs = tuple(spec.name for spec in self._runner.inputs)
        self.outputs = tuple(spec.name for spec in self._runner.outputs)

    def run(self, names: Sequence[str], feeds: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> list[Any]:
        found = self._runner(self._runner.taken(feeds))
        return [found[name] for name in names]

    def close(self) -> None:
        self._runner.close()
