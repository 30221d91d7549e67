"""The export stage: from what the user named to a checked ``model.onnx``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact import FP32_MODEL, MANIFEST
from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.export.from_onnx import export_onnx_file
from pipeline.export.from_python import export_python
from pipeline.usercode import parse_code

if TYPE_CHECKING:
    from pipeline.config import InputSpec, Profile
    from pipeline.export.result import ExportResult

__all__ = ["run"]


def run(
    model: str,
    *,
    inputs: tuple[InputSpec, ...] = (),
    profiles: tuple[Profile, ...] = (),
    opset: int = 17,
    folder: Path,
    progress: Progress = SILENT,
    timeout_s: float | None = None,
) -> ExportResult:
    """Write ``model.onnx`` into ``folder``.

    Args:
        model: a ``.onnx`` file, ``file.py:callable`` or ``package.module:callable``.
        inputs: example inputs of a PyTorch model; not for a ``.onnx`` file.
        profiles: what varies; dimensions in which min and max differ become dynamic.
        opset: of the exported model. A ``.onnx`` file is converted only from below 13 or above ``max(opset, 17)``.
        timeout_s: seconds for each run of the user's code; None: no limit.

    Raises:
        InputError: the model is missing, unreadable or not valid, or the user's code fails.
        CheckFailed: the exported model computes something else than the original.
        ToolError: the child process was killed, or neither of PyTorch's exporters can export the model.
    """
    path = Path(model).expanduser()
    if path.suffix == ".onnx" or (path.is_file() and path.suffix != ".py"):
        if inputs:
            raise InputError(
                f"--input {inputs[0].name} is given with the .onnx file {model}",
                remedy="leave --input out: an ONNX model has its own inputs",
            )
        return export_onnx_file(path, profiles=profiles, opset=opset, folder=folder, progress=progress)
    code = parse_code(model)
    if code is None:
        remedy = f"name the callable in it: {model}:NAME" if path.suffix == ".py" else None
        if (path / MANIFEST).is_file():
            remedy = f"of an artifact, give the float model: {path / FP32_MODEL}"
        raise InputError(
            f"model {model!r} is neither a .onnx file nor file.py:callable nor package.module:callable", remedy=remedy
        )
    return export_python(
        code, inputs=inputs, profiles=profiles, opset=opset, folder=folder, progress=progress, timeout_s=timeout_s
    )
