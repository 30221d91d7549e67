"""Changes to a graph that came with Q/DQ nodes: new constants, and a note of what was done to which node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.onnxgraph import add_initializer
from pipeline.placement.graph import GraphView

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["SHOWN", "Edit", "along", "axis_of", "listed"]

SHOWN = 8
"""Names in one message; the others are counted."""


class Edit:
    """A model under repair."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = GraphView(model)
        self.repairs: dict[str, list[str]] = {}
        """What was done -> names of the nodes."""
        self.taken = {
            value.name for node in self.graph.nodes for value in (*node.inputs, *node.outputs) if value is not None
        }

    def refresh(self) -> None:
        """See the graph as it is after nodes came or went."""
        self.graph = GraphView(self.graph.model)

    def note(self, text: str, node: ir.Node) -> None:
        self.repairs.setdefault(text, []).append(node.name or "")

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """A new initializer."""
        value = add_initializer(self.graph.model.graph, name, array, self.taken)
        self.taken.add(value.name)
        return value

    def set_zero(self, node: ir.Node, scale: np.ndarray[Any, Any]) -> None:
        """Give a Q or DQ the int8 zero point 0, of the shape of its scale."""
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        zero = np.zeros(scale.shape, np.int8)
        node.replace_input_with(2, self.constant(f"{node.outputs[0].name}_zero_point", zero))

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let every node that reads ``old``, also inside a control-flow body, read ``new``."""
        for use in tuple(old.uses()):
            use.node.replace_input_with(use.idx, new)

    def remove_unread(self, node: ir.Node) -> None:
        """Take ``node`` away, and what only it needed, as far as nothing reads their outputs."""
        import onnx_ir as ir

        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            return
        before = [value.producer() for value in node.inputs if value is not None]
        if isinstance(node.graph, ir.Graph):
            node.graph.remove(node, safe=True)
        for producer in before:
            if producer is not None and producer.graph is not None:
                self.remove_unread(producer)


def axis_of(graph: GraphView, node: ir.Node, scale: np.ndarray[Any, Any]) -> int | None:
    """Axis of a vector of scales by ONNX's definition, or where it was lost, the only one whose length fits."""
    attribute = node.attributes.get("axis")
    shape = graph.shape(node.inputs[0])
    if attribute is not None:
        axis = attribute.as_int()
        return axis + len(shape) if axis < 0 and shape is not None else axis
    if scale.size == 1 or shape is None:
        return 1
    fits = [index for index, dim in enumerate(shape) if dim == scale.size]
    return 1 if 1 in fits else fits[0] if len(fits) == 1 else None


def along(vector: np.ndarray[Any, Any], axis: int, ndim: int) -> np.ndarray[Any, Any]:
    """``vector`` shaped to broadcast along ``axis`` of a tensor with ``ndim`` axes; one number stays one."""
    if vector.size == 1:
        return vector.reshape(())
    shape = [1] * ndim
    shape[axis] = vector.size
    return vector.reshape(shape)


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
