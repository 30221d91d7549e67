"""Export of a model that is ONNX already: read, check, and convert only where nothing else helps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.core.files import copy_file, sha256_file, sha256_json
from pipeline.export.check import check_converted, check_widened
from pipeline.export.opset import LOWEST, MAX_IR_VERSION, PORTABLE, CannotConvert, convert, lower_ir_version
from pipeline.export.result import ExportResult
from pipeline.export.widen import widen
from pipeline.onnxfile import MODEL, check_file, external_files, load_model, save_model
from pipeline.onnxgraph import all_graphs, infer_shapes, opset_of, tensor_specs
from pipeline.prepare.names import name_nodes
from pipeline.records import Dependency

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.config import Profile
    from pipeline.core.progress import Progress

__all__ = ["export_onnx_file", "make_portable"]

_MOST_REASONS = 5
_FREE_WEIGHTS_IR_VERSION = 4
"""Before it, every weight had to be an input as well."""


def export_onnx_file(
    path: Path, *, profiles: tuple[Profile, ...], opset: int, folder: Path, progress: Progress
) -> ExportResult:
    """See :func:`pipeline.export.run`."""
    model = load_model(path)
    check_file(path)
    external = external_files(path)
    beside = tuple(Dependency(path=str(file.absolute()), sha256=sha256_file(file)) for file in external)
    hashes = [(path.name, sha256_file(path)), *((Path(item.path).name, item.sha256) for item in beside)]
    digest = sha256_json(hashes) if external else hashes[0][1]
    notes: list[str] = []
    warnings: list[str] = []
    version, ir_version = opset_of(model), model.ir_version
    notes += [f"{path.name}: {change}" for change in _mend(model)]
    inputs = tensor_specs(model.graph.inputs)
    widened = widen(model)
    if widened is not None:
        notes.append(f"{path.name}: {widened.note}")
    model = make_portable(model, opset, name=path.name, notes=notes, warnings=warnings)
    if widened is not None:
        warnings.append(f"{path.name} {widened.advice}")
    if notes or external:
        # External weights are copied, not linked: onnx and onnx_ir refuse to read them through links.
        written = save_model(model, folder)
        check_file(written)
    else:
        written = folder / MODEL
        copy_file(path, written)  # no link: the user's file must not change with it, nor it with the user's file
    specs = tensor_specs(model.graph.inputs), tensor_specs(model.graph.outputs)
    result_opset = opset_of(model)
    del model
    if widened is not None:
        warnings += check_widened(path, written, (inputs, specs[0]), profiles, dtype=widened.dtype)
    elif result_opset != version or ir_version > MAX_IR_VERSION:
        warnings += check_converted(path, written, specs[0], profiles, opsets=(version, result_opset))
    for note in notes:
        progress.note(note)
    for warning in warnings:
        progress.warn(warning)
    return ExportResult(
        kind="onnx",
        spec=path.name,
        source_sha256=digest,
        inputs=specs[0],
        outputs=specs[1],
        opset=result_opset,
        notes=tuple(notes),
        warnings=tuple(warnings),
        dependencies=beside,
    ).at(folder)


def _mend(model: ir.Model) -> list[str]:
    """Change in place what is valid ONNX, common in old files, and no later step can take; returns what was changed."""
    from onnx_ir.passes.common import RemoveInitializersFromInputsPass

    changes = []
    weights = {value.name for value in model.graph.inputs if value.is_initializer()}
    if weights:
        RemoveInitializersFromInputsPass()(model)
        model.ir_version = max(model.ir_version, _FREE_WEIGHTS_IR_VERSION)
        changes.append(f"{len(weights)} weights are listed among the inputs as well; they are constants from here on")
    names = [node.name for graph in all_graphs(model) for node in graph if node.name]
    if len(set(names)) < len(names):
        # onnxruntime refuses them. The name of a node has no meaning for what it computes.
        changes.append(f"{len(names) - len(set(names))} nodes have the name of another one and are numbered")
        name_nodes(model)
    return changes


def make_portable(model: ir.Model, opset: int, *, name: str, notes: list[str], warnings: list[str]) -> ir.Model:
    """Bring ``model`` to an opset from 13 to ``max(opset, 17)`` and an IR version of at most 9, if it is not there.

    Appends to ``notes`` what was changed, and to ``warnings`` what could not be.

    Raises:
        InputError: the model is older than opset 13 and cannot be converted.
    """
    from onnx_ir.passes.common import InlinePass

    version, ir_version = opset_of(model), model.ir_version
    newest = max(opset, PORTABLE)
    if version < LOWEST:
        try:
            model = convert(model, newest)
        except CannotConvert as error:
            raise InputError(
                f"{name} has opset {version}, INT8 with per-channel weights needs {LOWEST} or more, and it cannot be "
                f"converted: {_listed(error.reasons)}",
                remedy=f"export the model with opset {PORTABLE} from its framework",
            ) from error
        notes.append(f"{name}: converted from opset {version} to {newest}")
    elif version > newest:
        InlinePass()(model)
        infer_shapes(model)
        # A failed conversion leaves the graph half changed, so it works on a copy; the weights are shared.
        copy = model.clone()
        try:
            model = convert(copy, newest)
        except CannotConvert as error:
            warnings.append(f"{name} stays at opset {version}, TensorRT 8.6 cannot load it: {_listed(error.reasons)}")
        else:
            notes.append(f"{name}: converted from opset {version} to {newest}")
    if ir_version > MAX_IR_VERSION and not warnings:
        lower_ir_version(model)
        notes.append(f"{name}: IR version lowered from {ir_version} to {MAX_IR_VERSION}")
    return model


def _listed(reasons: list[str]) -> str:
    more = len(reasons) - _MOST_REASONS
    return "; ".join(reasons[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
