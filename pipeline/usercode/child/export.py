"""Export of the user's PyTorch module with one of PyTorch's two exporters, and its outputs on check inputs.

Importing this module imports torch.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import numpy as np
import torch

from .examples import Example, check_inputs, resolve_example
from .loading import Complaint, WithRemedy, describe_exception, is_library
from .recording import FileRecorder

__all__ = ["export"]

_MOST_CHARACTERS = 400
_ASSUMED_FLOATS = (
    "its inputs were taken to be float32, as profiles name no type: give --input NAME:SHAPE:DTYPE, "
    "such as ids:1x16:int64, or return (module, example inputs)"
)
_TRACE_OPSET_LIMIT = 20
"""Newest opset of the TorchScript exporter."""


def export(target: Any, task: dict[str, Any], recorder: FileRecorder) -> dict[str, Any]:
    """Write ``model.onnx`` and ``check-<n>.npz`` into the task's folder.

    The task holds ``method`` ("dynamo" or "torchscript"), ``opset``, ``folder``, ``inputs`` (name, shape, dtype; a
    shape may hold words), ``profiles`` (input name to min, opt, max) and ``external_above_bytes``, the size of weights
    from which on they go to a file of their own.

    Returns:
        ``inputs`` (names in order), ``outputs``, ``dynamic`` (input name to axis to name of the dimension), ``checks``
        (file names), ``warnings``, ``renamed`` (input name to the parameter of ``forward`` it stands for); or
        ``export_failed`` with the exporter's words.
    """
    torch.manual_seed(0)
    # Its fused kernels have no ONNX equal.
    torch.backends.mha.set_fastpath_enabled(False)
    module, given = _module(target)
    recorder.packages_loaded()
    module.eval()
    example = resolve_example(module, given, task["inputs"], task["profiles"])
    with torch.no_grad():
        # Before the exporter, so that an error in the model itself shows as one of the user's code.
        try:
            result = module(*example.args, **example.kwargs)
        except Exception as error:
            if given is None and not task["inputs"]:
                raise WithRemedy(_ASSUMED_FLOATS) from error
            raise
        outputs = _named_outputs(result, example.names)
        flat = _Flat(module, example, list(outputs))
        path = os.path.join(task["folder"], "model.onnx")  # noqa: PTH118
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", torch.jit.TracerWarning)
            try:
                _EXPORTERS[task["method"]](flat, example, list(outputs), path, task)
            except Exception as error:
                return {"export_failed": _brief(error)}
        files = []
        for number, tensors in enumerate(check_inputs(example)):
            arrays = {f"input:{name}": tensor.numpy() for name, tensor in tensors.items()}
            found = _named_outputs(module(*example.rebuilt(tensors)[0], **example.rebuilt(tensors)[1]), example.names)
            arrays.update({f"output:{name}": tensor.numpy() for name, tensor in found.items()})
            files.append(f"check-{number}.npz")
            np.savez(os.path.join(task["folder"], files[-1]), **arrays)  # noqa: PTH118
    return {
        "inputs": example.names,
        "outputs": list(outputs),
        "dynamic": {name: {str(axis): text for axis, text in axes.items()} for name, axes in example.dynamic.items()},
        "checks": files,
        "warnings": _tracer_warnings(caught),
        "renamed": example.renamed,
    }


def _module(target: Any) -> tuple[torch.nn.Module, Any]:
    result = target() if callable(target) and not isinstance(target, torch.nn.Module) else target
    given = None
    if isinstance(result, tuple) and len(result) == 2:
        result, given = result
    if not isinstance(result, torch.nn.Module):
        raise Complaint(
            f"the callable must return an nn.Module, or (module, example inputs), it returned {type(result).__name__}",
            "return the module",
        )
    for name, tensor in (*result.named_parameters(), *result.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise Complaint(
                f"the module's {name!r} is {str(tensor.dtype).removeprefix('torch.')}; calibration needs float32",
                "return module.float(); what is not quantised can be made float16 later",
            )
    return result.cpu(), given


class _Flat(torch.nn.Module):  # type: ignore[misc]
    """The user's module with tensors in by position and a tuple of tensors out."""

    def __init__(self, module: torch.nn.Module, example: Example, outputs: list[str]) -> None:
        super().__init__()
        self.module = module
        self._example = example
        self._outputs = outputs
        self.eval()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._example.rebuilt(dict(zip(self._example.names, tensors, strict=True)))
        return tuple(_flatten(self.module(*args, **kwargs)))


def _flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None:
        return []
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _flatten(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _flatten(item)]
    raise Complaint(
        f"the module's output holds {type(value).__name__}, which is no tensor",
        "return tensors, or tuples, lists or dicts of tensors",
    )


def _named_outputs(value: Any, taken: list[str]) -> dict[str, torch.Tensor]:
    """Flat outputs by name: ``output``, ``output_0`` ..., or the keys of a dict."""
    tensors = _flatten(value)
    if not tensors:
        raise Complaint("the module returns no tensor")
    names = ["output"] if len(tensors) == 1 else [f"output_{number}" for number in range(len(tensors))]
    if isinstance(value, dict):
        keys = [str(key) for key, item in value.items() if item is not None]
        if len(keys) == len(tensors):
            names = keys
    return {name if name not in taken else f"{name}_out": tensor for name, tensor in zip(names, tensors, strict=True)}


def _dynamo(module: _Flat, example: Example, outputs: list[str], path: str, task: dict[str, Any]) -> None:
    # One entry for the one variadic parameter of _Flat.forward.
    shapes = tuple(dict.fromkeys(example.dynamic.get(name, {}), torch.export.Dim.DYNAMIC) for name in example.names)
    program = torch.onnx.export(
        module,
        tuple(example.tensors.values()),
        dynamo=True,
        optimize=False,
        verbose=False,
        opset_version=task["opset"],
        input_names=example.names,
        output_names=outputs,
        dynamic_shapes=(shapes,),
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    program.save(path, external_data=_bytes(module) > task["external_above_bytes"])


def _torchscript(module: _Flat, example: Example, outputs: list[str], path: str, task: dict[str, Any]) -> None:
    torch.onnx.export(
        module,
        tuple(example.tensors.values()),
        path,
        dynamo=False,
        opset_version=min(task["opset"], _TRACE_OPSET_LIMIT),
        input_names=example.names,
        output_names=outputs,
        dynamic_axes=example.dynamic,
    )


_EXPORTERS = {"dynamo": _dynamo, "torchscript": _torchscript}


def _brief(error: Exception) -> str:
    """The exporter's words without its advice and colours."""
    text = re.sub(r"\x1b\[\d+m", "", describe_exception(error))
    _, marker, summary = text.partition("## Exception summary ")
    return (summary if marker else text)[:_MOST_CHARACTERS]


def _bytes(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def _tracer_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    """Each warning of the tracer about the user's own files once, as ``file:line: text``."""
    found: dict[str, None] = {}
    for item in caught:
        if is_library(item.filename):
            continue
        text = str(item.message).split("\n")[0].split(". ")[0]
        found[f"{os.path.basename(item.filename)}:{item.lineno}: {text}"] = None  # noqa: PTH119
    return list(found)
