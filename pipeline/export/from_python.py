"""Export of a user's PyTorch module: in a child process, with one of PyTorch's exporters, checked against PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline import onnxfile
from pipeline.core.errors import CheckFailed, QuantizeError, ToolError
from pipeline.core.files import sha256_json
from pipeline.equivalence import Difference, difference, run_model
from pipeline.export.from_onnx import make_portable
from pipeline.export.names import name_by_scope, name_dimensions, strip_prefix
from pipeline.export.opset import PORTABLE, strip_graph_metadata
from pipeline.export.result import ExportCheck, ExportResult
from pipeline.onnxfile import MODEL, check_file, load_model, save_model
from pipeline.onnxgraph import clear_meaningless_dimensions, lift_constants, opset_of, tensor_specs
from pipeline.usercode import UserProcess

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.config import InputSpec, Profile
    from pipeline.core.progress import Progress
    from pipeline.records import Dependency
    from pipeline.usercode import CodeSpec

__all__ = ["export_python"]

TOLERANCE = 1e-3
_DYNAMO_OPSET = 18
"""The oldest opset that the dynamo exporter writes."""
_CONSTANT_SIZE = (
    "a size was probably taken for a constant during export: compute shapes from tensors in forward, "
    "or give a profile in which this dimension does not vary"
)
Method = Literal["dynamo", "torchscript"]
Array = np.ndarray[Any, np.dtype[Any]]


def export_python(
    code: CodeSpec,
    *,
    inputs: tuple[InputSpec, ...],
    profiles: tuple[Profile, ...],
    opset: int,
    folder: Path,
    progress: Progress,
    timeout_s: float | None,
) -> ExportResult:
    """See :func:`pipeline.export.run`.

    The dynamo exporter comes first: its graphs have no shape arithmetic left over from tracing. It writes opset 18 and
    more, which is rewritten to 17. What it cannot export, or cannot be rewritten, goes to the TorchScript exporter,
    which writes any opset from 13 on but follows one path through Python's control flow.
    """
    methods: tuple[Method, ...] = ("dynamo", "torchscript") if opset >= PORTABLE else ("torchscript",)
    notes: list[str] = []
    work = folder / ".export"
    try:
        for method in methods:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            with progress.task(f"export with PyTorch's {method} exporter", total=1, unit="models") as task:
                header, dependencies = _run_child(code, method, inputs, profiles, opset, work, timeout_s)
                failure = header.get("export_failed")
                if failure is None:
                    model, failure = _finished(load_model(work / MODEL), header, method, opset)
                task.advance()
            if failure is None:
                break
            notes.append(f"PyTorch's {method} exporter cannot export {code.text}: {failure}")
            progress.note(notes[-1])
        else:
            raise ToolError("\n".join(notes), remedy="export the model yourself and give the .onnx file")
        path = save_model(model, folder)
        check_file(path)
        specs = tensor_specs(model.graph.inputs), tensor_specs(model.graph.outputs)
        final_opset = opset_of(model)
        del model
        check = _compare(code, path, [work / name for name in header["checks"]])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    warnings = [f"{code.text}: tracing took a value for a constant: {text}" for text in header["warnings"]]
    warnings += [
        f"{code.text}: forward has no parameter {name!r}; by its position this input is forward's {own!r}, and the "
        f"exported model calls it {name!r}"
        for name, own in header["renamed"].items()
    ]
    for warning in warnings:
        progress.warn(warning)
    progress.note(
        f"exported with {method}, opset {final_opset}; largest relative error against PyTorch "
        f"{check.max_relative_error:.2e} (batch sizes {', '.join(map(str, check.batch_sizes))})"
    )
    return ExportResult(
        kind="python",
        spec=code.display,
        source_sha256=sha256_json([[Path(item.path).name, item.sha256] for item in dependencies]),
        inputs=specs[0],
        outputs=specs[1],
        opset=final_opset,
        exporter=method,
        check=check,
        notes=tuple(notes),
        warnings=tuple(warnings),
        dependencies=dependencies,
    ).at(folder)


def _run_child(
    code: CodeSpec,
    method: Method,
    inputs: tuple[InputSpec, ...],
    profiles: tuple[Profile, ...],
    opset: int,
    work: Path,
    timeout_s: float | None,
) -> tuple[dict[str, Any], tuple[Dependency, ...]]:
    task = {
        "task": "export",
        "method": method,
        "opset": max(opset, _DYNAMO_OPSET) if method == "dynamo" else opset,
        "folder": str(work.resolve()),
        "external_above_bytes": onnxfile.EXTERNAL_ABOVE_BYTES,
        "inputs": [spec.model_dump(mode="json") for spec in inputs],
        "profiles": [profile.model_dump(mode="json")["inputs"] for profile in profiles],
    }
    with UserProcess(code, task, timeout_s=timeout_s) as process:
        header, _ = process.receive()
        return header, process.dependencies()


def _finished(model: ir.Model, header: dict[str, Any], method: Method, opset: int) -> tuple[ir.Model, str | None]:
    """``model`` with readable names, in an opset of at most ``opset``, without traces of the machine; or why not."""
    from onnx_ir.passes.common import (
        InlinePass,
        RemoveUnusedFunctionsPass,
        RemoveUnusedNodesPass,
        RemoveUnusedOpsetsPass,
    )
    from onnxscript.optimizer import fold_constants

    InlinePass()(model)
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    if method == "dynamo":
        name_by_scope(model)
    strip_prefix(model, "module")
    name_dimensions(
        model, {name: {int(a): text for a, text in axes.items()} for name, axes in header["dynamic"].items()}
    )
    lift_constants(model)
    fold_constants(model, onnx_shape_inference=True)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    warnings: list[str] = []
    model = make_portable(model, opset, name="the exported model", notes=[], warnings=warnings)
    clear_meaningless_dimensions(model)
    strip_graph_metadata(model)
    return model, warnings[0] if warnings else None


def _compare(code: CodeSpec, path: Path, files: list[Path]) -> ExportCheck:
    """Run ``path`` on what the child saved; raises :class:`CheckFailed` above the tolerance."""
    worst: Difference | None = None
    shapes = []
    for file in files:
        with np.load(file, allow_pickle=False) as saved:
            arrays = dict(saved)
        feeds = {name.removeprefix("input:"): array for name, array in arrays.items() if name.startswith("input:")}
        expected = {name.removeprefix("output:"): array for name, array in arrays.items() if name.startswith("output:")}
        shapes.append({name: array.shape for name, array in feeds.items()})
        try:
            found = run_model(path, [feeds])[0]
        except QuantizeError:
            raise
        except Exception as error:  # onnxruntime refuses an input with one of several types
            raise CheckFailed(
                f"{code.text}: the exported model does not run on inputs of {_text(shapes[-1])}, PyTorch does: {error}",
                remedy=_CONSTANT_SIZE,
            ) from error
        current = difference(expected, found)
        worst = current if worst is None or current.error > worst.error else worst
        if current.error > TOLERANCE:
            raise CheckFailed(
                f"{code.text}: the exported model computes something else than PyTorch on inputs of "
                f"{_text(shapes[-1])}: {current.describe()}, the limit is {TOLERANCE:g}",
                remedy=_CONSTANT_SIZE if current.shapes else "control flow that depends on values is the usual cause",
                figures={"output": current.output, "relative_error": current.figure, "tolerance": TOLERANCE},
            )
    return ExportCheck(
        shapes=tuple(shapes), max_relative_error=worst.error if worst is not None else 0.0, tolerance=TOLERANCE
    )


def _text(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
