"""The real engine as a reading: TensorRT on a GPU with the layers' tensors as extra outputs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.config import Profile, ShapeRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays

__all__ = ["EngineReading"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class EngineReading:
    """An engine built from the INT8 graph with ``tensors`` marked as outputs. Use as a context manager.

    The engine is built for the first batch's shapes, with any smaller number of samples; its profile can be given
    instead. A marked tensor has to be stored, so it keeps TensorRT from fusing across it.

    Raises (when it is first called):
        InputError: a tensor that TensorRT's network lacks, or an input of another shape.
        ToolError: no GPU, or TensorRT fails.
    """

    def __init__(self, model: Path, tensors: Sequence[str], *, target: str, profiles: Sequence[Profile] = ()) -> None:
        self._model = model
        self._tensors = tuple(tensors)
        self._target = target
        self._profiles = tuple(profiles)
        self._runner: Any = None
        self._version = ""

    @property
    def label(self) -> str:
        version = f" {self._version}" if self._version else ""
        return f"the engine ({self._target}{version}, tensors marked as outputs)"

    def __enter__(self) -> EngineReading:
        self._scratch = tempfile.TemporaryDirectory(prefix="quantize-engine-")
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._scratch.cleanup()

    def __call__(self, batch: Batch) -> Arrays:
        if self._runner is None:
            self._start(batch.feeds)
        values: Arrays = dict(self._runner(batch.feeds))
        return values

    def _start(self, feeds: Mapping[str, Array]) -> None:
        from pipeline.engine.capture import build_capture
        from pipeline.engine.runner import Runner

        plan = Path(self._scratch.name) / "capture.plan"
        profiles = self._profiles or (_up_to(feeds),)
        record = build_capture(self._model, self._tensors, profiles, plan_path=plan, target=self._target)
        self._version = record.tensorrt
        self._runner = Runner(plan, target=self._target, record=record)


def _up_to(feeds: Mapping[str, Array]) -> Profile:
    """From one sample to as many as ``feeds`` has, the other dimensions as they are."""
    return Profile(
        inputs={
            name: ShapeRange(min=(1, *values.shape[1:]), opt=values.shape, max=values.shape)
            for name, values in feeds.items()
        }
    )
