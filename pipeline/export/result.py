"""What the export stage returns."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.onnxfile import MODEL
from pipeline.records import Record, StageResult, TensorSpec

__all__ = ["ExportCheck", "ExportResult"]


class ExportCheck(Record):
    """The exported model against PyTorch."""

    shapes: tuple[dict[str, tuple[int, ...]], ...]
    """Input shapes of each comparison."""
    max_relative_error: float
    """max|torch - onnx| / max|torch| over all outputs and comparisons."""
    tolerance: float

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(next((shape[0] for shape in shapes.values() if shape), 1) for shapes in self.shapes)


class ExportResult(StageResult):
    """``model.onnx`` (and ``model.onnx.data`` for large weights) in :attr:`folder`."""

    kind: Literal["onnx", "python"]
    spec: str
    """File name, or ``file.py:callable``, without a path."""
    source_sha256: str
    """Of the ``.onnx`` file with its external data, or of the user's Python files and the weights they read."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    exporter: Literal["dynamo", "torchscript"] | None = None
    """Which of PyTorch's exporters; None for a ``.onnx`` file."""
    check: ExportCheck | None = None
    """None for a ``.onnx`` file."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def model_path(self) -> Path:
        return self.folder / MODEL
