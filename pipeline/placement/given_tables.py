"""Tables of integers that are looked up first and dequantised then, as weight-only tools write an embedding.

TensorRT takes a quantised constant in front of DequantizeLinear alone. Dequantising the table and looking up then gives
the very same numbers: both operators treat every row, or every element, by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.placement.ops import LAYOUT

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.given_edit import Edit
    from pipeline.placement.graph import GraphView

__all__ = ["constant_behind", "dequantise_tables"]

_MOVING = (*LAYOUT, "Gather", "Slice")
"""Values of their first input, in another order or some of them."""


def constant_behind(graph: GraphView, value: ir.Value | None) -> tuple[ir.Value, list[ir.Node]] | None:
    """The int8 or uint8 constant that ``value`` is taken from, and the nodes from it to ``value``, in that order."""
    chain: list[ir.Node] = []
    while value is not None and not graph.is_constant(value):
        node = graph.producer(value, *_MOVING)
        if node is None:
            return None
        chain.insert(0, node)
        value = node.inputs[0]
    values = graph.array(value)
    return (value, chain) if value is not None and values is not None and values.dtype in (np.int8, np.uint8) else None


def dequantise_tables(edit: Edit) -> None:
    """Move every DequantizeLinear behind such nodes to the front of them.

    Left alone, for the checks to refuse: integers that others read too, and scales along an axis that is made by the
    look-up or lost in a change of shape.
    """
    for node in edit.graph.nodes:
        if edit.graph.op(node) != "DequantizeLinear":
            continue
        found = constant_behind(edit.graph, node.inputs[0])
        if found is None or not found[1] or not _alone(edit.graph, node, found[1]):
            continue
        table, chain = found
        if _scales_of_table(edit, node, chain):
            _to_front(edit, node, table, chain)
            edit.note("a DequantizeLinear behind a look-up in constants came in front of it (the same values)", node)
            edit.refresh()


def _alone(graph: GraphView, node: ir.Node, chain: list[ir.Node]) -> bool:
    readers = [*chain[1:], node]
    return all(graph.only_reader(each.outputs[0]) is reader for each, reader in zip(chain, readers, strict=True))


def _scales_of_table(edit: Edit, node: ir.Node, chain: list[ir.Node]) -> bool:
    """Let ``node``, still in its place, have the parameters that it needs in front of ``chain``; False if none are."""
    import onnx_ir as ir

    graph, first = edit.graph, chain[0]
    scale, zero = (node.inputs[index] if len(node.inputs) > index else None for index in (1, 2))
    numbers = graph.array(scale)
    if numbers is not None and numbers.size == 1:
        node.attributes.pop("axis", None)  # of no meaning, and perhaps out of the table's range
        return zero is None or graph.is_constant(zero)
    shape, indices = graph.shape(first.inputs[0]), graph.shape(first.inputs[1] if len(first.inputs) > 1 else None)
    if len(chain) > 1 or graph.op(first) != "Gather" or not shape or indices is None:
        return False
    attribute, gathered = node.attributes.get("axis"), first.attributes.get_int("axis", 0) % len(shape)
    axis = (1 if attribute is None else attribute.as_int()) % max(len(shape) + len(indices) - 1, 1)
    if numbers is not None:
        if gathered <= axis < gathered + len(indices):
            return False
        found = axis if axis < gathered else axis - len(indices) + 1
    elif axis == gathered and len(indices) == 1:  # a scale per row, looked up as the row is
        rows = [_looked_up(graph, value, first) for value in (scale, zero) if value is not None]
        if any(row is None for row in rows):
            return False
        for index, row in enumerate(rows, start=1):
            node.replace_input_with(index, row)
        found = gathered
    else:
        return False
    node.attributes["axis"] = ir.AttrInt64("axis", found)
    return True


def _looked_up(graph: GraphView, value: ir.Value, table: ir.Node) -> ir.Value | None:
    """The constant of one number per row of which ``value`` is looked up with the indices of ``table``."""
    node = graph.producer(value, "Gather")
    if node is None or node.inputs[1] is not table.inputs[1] or not graph.is_constant(node.inputs[0]):
        return None
    return node.inputs[0] if len(graph.shape(node.inputs[0]) or ()) == 1 else None


def _to_front(edit: Edit, node: ir.Node, table: ir.Value, chain: list[ir.Node]) -> None:
    import onnx_ir as ir

    graph = edit.graph.model.graph
    last, result = chain[-1].outputs[0], node.outputs[0]
    node.replace_input_with(0, table)
    ir.convenience.replace_all_uses_with(result, last, replace_graph_outputs=True)
    last.name, result.name = result.name, last.name  # the float tensor keeps its name
    for each in chain:
        each.outputs[0].type = result.type
    result.shape = table.shape
    chain[0].replace_input_with(0, result)
    graph.remove(node)
    graph.insert_before(chain[0], node)
