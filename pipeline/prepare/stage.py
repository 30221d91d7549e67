"""The prepare stage: rewrites in order, then proof that the model still computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import CheckFailed
from pipeline.core.progress import SILENT, Progress
from pipeline.onnxfile import check_file, load_model, save_model
from pipeline.onnxgraph import all_graphs, clear_meaningless_dimensions, infer_shapes, opset_of, tensor_specs
from pipeline.prepare.clean import (
    fold_constants,
    omit_empty_inputs,
    remove_dropout,
    remove_identity,
    remove_unused,
    simplify,
    standard_form,
    state_kernel_shapes,
)
from pipeline.prepare.names import name_nodes, one_line_names
from pipeline.prepare.operators import check_operators
from pipeline.prepare.pad import fold_pads
from pipeline.prepare.proof import TOLERANCE, compare
from pipeline.prepare.result import Change, PrepareResult
from pipeline.prepare.scale_shift import fold_scale_shift
from pipeline.prepare.static_shapes import fold_static_shapes
from pipeline.prepare.unshare import unshare_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir


__all__ = ["rewrite", "run"]

_MOST_ROUNDS = 4
Array = np.ndarray[Any, np.dtype[Any]]


def run(
    model: Path,
    *,
    folder: Path,
    sample_feeds: Sequence[Mapping[str, Array]] = (),
    progress: Progress = SILENT,
) -> PrepareResult:
    """Write the prepared ``model.onnx`` into ``folder``.

    Args:
        model: a valid ``.onnx`` file.
        sample_feeds: real inputs to compare on, beside random ones of the same shapes.

    Raises:
        InputError: ``model`` cannot be read.
        CheckFailed: the prepared model computes something else, or lost a dynamic dimension.
    """
    graph_model = load_model(model)
    before = _nodes(graph_model)
    with progress.task("prepare the graph", total=None, unit="passes") as task:
        changes = rewrite(graph_model, task.advance)
    path = save_model(graph_model, folder)
    check_file(path)
    inputs, outputs = tensor_specs(graph_model.graph.inputs), tensor_specs(graph_model.graph.outputs)
    after, opset = _nodes(graph_model), opset_of(graph_model)
    del graph_model
    comparison = compare(model, path, inputs, sample_feeds)
    for warning in comparison.warnings:
        progress.warn(warning)
    progress.note(f"prepared: {before} nodes became {after}" + (f" ({_summary(changes)})" if changes else ""))
    return PrepareResult(
        inputs=inputs,
        outputs=outputs,
        opset=opset,
        nodes_before=before,
        nodes_after=after,
        changes=changes,
        random_error=comparison.random_error,
        data_error=comparison.data_error,
        tolerance=TOLERANCE,
        rounding_noise=comparison.noise,
        warnings=comparison.warnings,
    ).at(folder)


def _nodes(model: ir.Model) -> int:
    return sum(len(graph) for graph in all_graphs(model))


def _summary(changes: Sequence[Change]) -> str:
    return ", ".join(f"{len(change.where)} x {change.kind}" for change in changes)


def rewrite(model: ir.Model, advance: Any = lambda: None) -> tuple[Change, ...]:
    """Apply every rewrite to ``model`` in place, and say what was done.

    Names of graph inputs and outputs and of the tensors that remain are kept.
    """
    found: dict[str, list[str]] = {}

    def note(kind: str, where: Sequence[str]) -> None:
        if where:
            found.setdefault(kind, []).extend(where)
        advance()

    note("function inlined", standard_form(model))
    note("tensor renamed: control character", one_line_names(model))
    check_operators(model)
    clear_meaningless_dimensions(model)
    declared = [_dynamic(values) for values in (model.graph.inputs, model.graph.outputs)]
    note("Dropout removed", remove_dropout(model))
    note("Identity removed", remove_identity(model))
    for _ in range(_MOST_ROUNDS):
        infer_shapes(model)
        before = _nodes(model)
        note("tensor made constant", fold_static_shapes(model))
        note("tensor made constant", fold_constants(model))
        simplify(model)
        note("Identity removed", remove_identity(model))
        note("Pad folded into Conv", fold_pads(model))
        for kind, where in fold_scale_shift(model).items():
            note(kind, where)
        remove_unused(model)
        if _nodes(model) == before:
            break
    note("empty input of Resize left out", omit_empty_inputs(model))
    remove_unused(model)
    note("weight copied for a second user", unshare_weights(model))
    note("node named", name_nodes(model))
    infer_shapes(model)
    state_kernel_shapes(model)
    clear_meaningless_dimensions(model)
    _check_dynamic(model, declared)
    return tuple(Change(kind=kind, where=tuple(where)) for kind, where in sorted(found.items()))


def _dynamic(values: Sequence[ir.Value]) -> dict[str, tuple[bool, ...] | None]:
    return {
        str(value.name): None if value.shape is None else tuple(not isinstance(dim, int) for dim in value.shape)
        for value in values
    }


def _check_dynamic(model: ir.Model, declared: Sequence[Mapping[str, tuple[bool, ...] | None]]) -> None:
    now = [_dynamic(values) for values in (model.graph.inputs, model.graph.outputs)]
    if [list(part) for part in now] != [list(part) for part in declared]:
        raise CheckFailed(f"preparing changed the inputs or outputs: {declared} became {now}")
    if now[0] != declared[0]:
        raise CheckFailed(f"preparing changed the dynamic dimensions of the inputs: {declared[0]} became {now[0]}")
