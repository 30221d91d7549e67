"""The real engine as a reading: TensorRT on a GPU, its tensors as unfused debug tensors or marked ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.core.progress import SILENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from pipeline.config import Profile
    from pipeline.core.progress import Progress
    from pipeline.data.batching import Batch
    from pipeline.engine.capture import Recorded
    from pipeline.engine.recorded import Samples
    from pipeline.errors.capture import Account, Arrays

__all__ = ["EngineReading", "engine_label"]


def engine_label(target: str, tensorrt: str) -> str:
    """What computed an engine's tensors, in words."""
    return f"the engine ({target} {tensorrt})"


class EngineReading:
    """An engine built from the INT8 graph whose ``tensors`` are read. Use as a context manager.

    See :class:`pipeline.engine.capture.Capture` for profiles and ways. No tensor of an engine with other outputs than
    the graph's is given.

    Args:
        samples: ``samples.npz`` with the graph's outputs; None: onnxruntime computes them for the first batch.

    Raises:
        CheckFailed: when it is first called: no engine that shows its tensors has the graph's outputs.
        InputError: TensorRT is not installed or lacks the way asked for; when it is first called: an input of another
            shape.
        ToolError: no GPU, or TensorRT fails.
    """

    def __init__(
        self,
        model: Path,
        tensors: Sequence[str],
        *,
        target: str,
        samples: Path | None = None,
        profiles: Sequence[Profile] = (),
        recorded: Recorded | None = None,
        progress: Progress = SILENT,
    ) -> None:
        from pipeline.engine.capture import Capture

        self._model, self._samples, self._target = model, samples, target
        self._capture = Capture(
            model,
            tensors,
            reference=self._reference,
            target=target,
            profiles=profiles,
            recorded=recorded,
            warn=progress.warn,
        )

    def _reference(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> Samples:
        from pipeline.engine.onnx_wire import read_model
        from pipeline.engine.recorded import Samples
        from pipeline.errors.capture import OrtReading

        if self._samples is not None:
            return Samples.read(self._samples, "int8")
        outputs = [spec.name for spec in read_model(self._model).graph.outputs]
        reading = OrtReading(self._model, outputs, label="the INT8 graph", optimise=False)
        return Samples(dict(feeds), reading.run(feeds))

    @property
    def label(self) -> str:
        return engine_label(self._target, self._capture.tensorrt)

    @property
    def account(self) -> Account:
        from pipeline.errors.capture import Account

        capture = self._capture
        return Account(capture.recorded, capture.ends, capture.scales, capture.unshown)

    def __enter__(self) -> EngineReading:
        self._capture.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._capture.__exit__(*error)

    def __call__(self, batch: Batch) -> Arrays:
        return self._capture(batch.feeds)
