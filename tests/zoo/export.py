"""PyTorch to ONNX for the zoo: opset 17, named inputs, dynamic axes."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


def export_onnx(
    module: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    path: Path,
    *,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    outputs: Sequence[str] = ("output",),
    opset: int = 17,
) -> Path:
    """Write ``module`` to ``path`` with the tracing exporter, which writes opset 17 directly and keeps readable node
    names."""
    import torch

    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            buffer,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=opset,
            dynamic_axes={name: dict(axes) for name, axes in (dynamic_axes or {}).items()},
            dynamo=False,
        )
    path.write_bytes(buffer.getvalue())
    return path
