"""Normalisations that are spelt out: a mean that is taken off, a root of a mean square that is divided by."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["normalisation_around"]

_STEPS = 6
_SCALED = ("Add", "Mul", "Div", "Max", "Clip", "Expand", "Cast")
_ROOTS = ("Sqrt", "Pow")
_NORMS = ("ReduceL1", "ReduceL2")
"""Reductions that divide as they are, without a root."""


def normalisation_around(graph: GraphView, reduction: ir.Node) -> frozenset[ir.Node] | None:
    """The nodes of the normalisation that ``reduction`` belongs to; None for a reduction with another purpose.

    LayerNorm's two means are two calls: the mean and the Sub; the mean square, its square, root and division.
    """
    if graph.op(reduction) in ("ReduceMean", "ReduceSum"):
        centred = [reader for reader in graph.downstream(reduction.outputs[0]) if graph.op(reader) == "Sub"]
        if centred:
            return frozenset({reduction, *centred})
    path = _to_division(graph, reduction)
    if path is None:
        return None
    square = graph.producer(reduction.inputs[0], "Pow", "Mul")
    if square is not None and graph.op(square) == "Mul" and square.inputs[0] is not square.inputs[1]:
        square = None
    return frozenset({reduction, *path, *(() if square is None else (square,))})


def _to_division(graph: GraphView, reduction: ir.Node) -> list[ir.Node] | None:
    """What follows ``reduction`` up to where a tensor is divided by its root, or multiplied by the inverse."""
    path: list[ir.Node] = []
    rooted = graph.op(reduction) in _NORMS
    inverse = False
    value = reduction.outputs[0]
    for _ in range(_STEPS):
        readers = list(graph.downstream(value))
        applied = [node for node in readers if _applies(graph, node, value, inverse)] if rooted else []
        if applied:
            return [*path, *applied]
        if len(readers) != 1:
            return None
        (node,) = readers
        op = graph.op(node)
        exponent = graph.scalar(node.inputs[1]) if op == "Pow" else None
        if op in _ROOTS and (exponent is None or abs(exponent) == 0.5):
            rooted, inverse = True, exponent is not None and exponent < 0
        elif op == "Reciprocal" or (op == "Div" and node.inputs[1] is value and graph.is_constant(node.inputs[0])):
            inverse = not inverse
        elif op not in _SCALED or (op != "Expand" and len(graph.computed_inputs(node)) > 1):
            return None
        path.append(node)
        value = node.outputs[0]
    return None


def _applies(graph: GraphView, node: ir.Node, value: ir.Value, inverse: bool) -> bool:
    if len(graph.computed_inputs(node)) != 2:
        return False
    return graph.op(node) == "Mul" if inverse else graph.op(node) == "Div" and node.inputs[1] is value
