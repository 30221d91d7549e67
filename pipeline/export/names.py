"""Names in an exported graph: nodes and tensors by the module they come from, dimensions by what they mean."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from pipeline.onnxgraph import all_graphs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import onnx_ir as ir

__all__ = ["name_by_scope", "name_dimensions", "strip_prefix"]

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where the dynamo exporter notes the modules around a node: a list, outermost first, the operator last."""


def name_by_scope(model: ir.Model) -> None:
    """Name nodes ``/block/conv/Conv`` and their outputs ``/block/conv/Conv_output_0``, as TorchScript does.

    A name that is taken gets ``_1``, ``_2`` ... in graph order. Graph inputs, graph outputs and weights keep theirs.
    """
    used: dict[str, int] = {}
    for graph in all_graphs(model):
        outputs = set(map(id, graph.outputs))
        for node in graph:
            stem = f"{_path(node.metadata_props.get(_SCOPES))}/{node.op_type}"
            count = used.get(stem, 0)
            used[stem] = count + 1
            node.name = f"{stem}_{count}" if count else stem
            for position, value in enumerate(node.outputs):
                if id(value) not in outputs:
                    value.name = f"{node.name}_output_{position}"


def _path(text: str | None) -> str:
    try:
        scopes: Any = ast.literal_eval(text or "[]")
    except (SyntaxError, ValueError):
        return ""
    path, previous = "", ""
    for scope in scopes[:-1]:
        if not isinstance(scope, str) or scope.startswith("_empty_nn_module_stack"):
            return ""
        if scope:
            path += "/" + scope.removeprefix(f"{previous}.")
            previous = scope
    return path


def strip_prefix(model: ir.Model, prefix: str) -> None:
    """Take the wrapper module's name out of the names of weights (``module.``), nodes and tensors (``/module/``).

    A name that is taken, such as that of a node which the exporter put outside every module, gets ``_1``, ``_2`` ...
    """
    outer = f"/{prefix}/"
    nodes = _Names(node.name for graph in all_graphs(model) for node in graph)
    values = _Names(value.name for graph in all_graphs(model) for value in _values(graph))
    for graph in all_graphs(model):
        keep = {id(value) for value in (*graph.inputs, *graph.outputs)}
        for value in list(graph.initializers.values()):
            if id(value) not in keep and value.name is not None and value.name.startswith(f"{prefix}."):
                value.name = values.free(value.name.removeprefix(f"{prefix}."))
        for node in graph:
            old = node.name
            if old is not None and old.startswith(outer):
                node.name = nodes.free(old[len(outer) - 1 :])
            for value in node.outputs:
                if id(value) in keep or value.name is None or not value.name.startswith(outer):
                    continue
                own = bool(old) and value.name.startswith(f"{old}_output_")
                value.name = values.free(
                    f"{node.name}{value.name[len(old or '') :]}" if own else value.name[len(outer) - 1 :]
                )


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


class _Names:
    """The names in use, and new ones beside them."""

    def __init__(self, names: Iterable[str | None]) -> None:
        self._taken = set(names)

    def free(self, name: str) -> str:
        """``name``, or where that is taken ``name_1``, ``name_2`` ..., which is taken from now on."""
        found, count = name, 0
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        return found


def name_dimensions(model: ir.Model, dynamic: Mapping[str, Mapping[int, str]]) -> None:
    """Give the dynamic dimensions of the inputs their names, wherever the exporter's own symbols for them appear."""
    import onnx_ir as ir

    symbols: dict[str, str] = {}
    for value in model.graph.inputs:
        for axis, name in dynamic.get(str(value.name), {}).items():
            if value.shape is not None and isinstance(symbol := value.shape[axis], ir.SymbolicDim) and symbol.value:
                symbols.setdefault(symbol.value, name)
    values = [value for graph in all_graphs(model) for node in graph for value in node.outputs]
    for value in (*model.graph.inputs, *values):
        if value.shape is None:
            continue
        named = [_named(dim, symbols) for dim in value.shape]
        if any(new is not old for new, old in zip(named, value.shape, strict=True)):
            value.shape = ir.Shape(named)


def _named(dim: Any, symbols: dict[str, str]) -> Any:
    """A static dimension as it is, a known symbol by its name, anything else unknown."""
    if isinstance(dim, int):
        return dim
    return symbols.get(dim.value) if dim.value else None
