"""What the prepare stage returns."""

from __future__ import annotations

from pathlib import Path

from pipeline.onnxfile import MODEL
from pipeline.records import Record, StageResult, TensorSpec

__all__ = ["Change", "PrepareResult"]


class Change(Record):
    """One kind of rewrite and where it was applied."""

    kind: str
    """What was done, such as ``BatchNormalization folded into Conv``."""
    where: tuple[str, ...]
    """Names of the nodes or weights, as they were at that moment."""


class PrepareResult(StageResult):
    """``model.onnx`` (and ``model.onnx.data`` for large weights) in :attr:`folder`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    nodes_before: int
    nodes_after: int
    changes: tuple[Change, ...]
    random_error: float | None
    """max|before - after| / max|before| over all outputs on random inputs; None: no shape that it takes was found."""
    data_error: float | None
    """The same on the given samples; None: none were given."""
    tolerance: float
    rounding_noise: float | None = None
    """Measured where an error is above the tolerance: how far rounding the inputs alone moves the model's outputs."""
    warnings: tuple[str, ...] = ()

    @property
    def model_path(self) -> Path:
        return self.folder / MODEL
