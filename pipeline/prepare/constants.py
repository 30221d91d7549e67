"""Constants of a graph: reading one, and giving one node another without touching the other users of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.onnxgraph import add_initializer

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["constant", "new_initializer", "replace_by_constant", "set_constant"]


def constant(value: ir.Value | None) -> np.ndarray[Any, np.dtype[Any]] | None:
    """The array of an initializer, None for anything computed or given from outside."""
    if value is None or value.const_value is None or value.is_graph_input() or value.producer() is not None:
        return None
    array: np.ndarray[Any, np.dtype[Any]] = value.const_value.numpy()
    return array


def new_initializer(graph: ir.Graph, array: np.ndarray[Any, np.dtype[Any]], stem: str) -> ir.Value:
    """A new initializer named ``stem``, or ``stem_1``, ``stem_2`` ... where that is taken."""
    taken = {value.name for value in graph.inputs} | {value.name for node in graph for value in node.outputs}
    return add_initializer(graph, stem, array, taken | set(graph.initializers))


def replace_by_constant(graph: ir.Graph, node: ir.Node, array: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Put ``array`` in the place of the node's only output, under its name, and remove the node."""
    old = node.outputs[0]
    name = str(old.name)
    old.name = None
    old.replace_all_uses_with(new_initializer(graph, array, name))
    graph.remove(node, safe=True)


def set_constant(
    graph: ir.Graph, node: ir.Node, index: int, array: np.ndarray[Any, np.dtype[Any]], *, stem: str
) -> None:
    """Make ``array`` the node's input ``index``, in the present initializer where it has no other user."""
    import onnx_ir as ir

    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    present = node.inputs[index]
    if present is not None and present.is_initializer() and len(present.uses()) == 1 and not present.is_graph_output():
        present.const_value = ir.tensor(array, name=present.name)
        present.shape = ir.Shape(array.shape)
        return
    node.replace_input_with(index, new_initializer(graph, array, stem))
