"""GELU as exporters spell it out: with Erf, with Tanh of a cubic, or with a Sigmoid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import POINTWISE

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["gelu_around"]

_BEHIND = 3
"""Nodes between the inner function and the product with x: ``+ 1`` and a factor."""
_MOST_INNER = 8
"""Nodes between x and the inner function; the cubic takes five."""
_SIGMOID_FACTOR = 1.702
_NEAR = 0.01
_HALF = {"Mul": 0.5, "Div": 2.0}


def gelu_around(graph: GraphView, core: ir.Node) -> frozenset[ir.Node] | None:
    """The nodes of the GELU whose inner function is ``core`` (Erf, Tanh or Sigmoid); None when it is no GELU.

    The forms: ``x * (1 + erf(x / sqrt 2)) / 2``, ``x * (1 + tanh(a * (x + b * x**3))) / 2`` and their kin with the
    factors in other places; ``x * sigmoid(1.702 * x)``.
    """
    inside = [core]
    value = core.outputs[0]
    for _ in range(_BEHIND):
        node = graph.only_reader(value)
        if node is None or graph.op(node) not in ("Add", "Mul", "Div"):
            return None
        if len(graph.computed_inputs(node)) == 2:
            break
        inside.append(node)
        value = node.outputs[0]
    else:
        return None
    if graph.op(node) != "Mul" or node.inputs[0] is node.inputs[1]:
        return None
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    for factor in (None, graph.producer(other, "Mul", "Div")):
        x = other if factor is None else _only_computed(graph, factor)
        inner = None if x is None else _between(graph, core.inputs[0], x)
        if inner is None:
            continue
        if not _is_gelu(graph, core, inner):
            return None
        nodes = {*inside, *inner, node, *(() if factor is None else (factor,))}
        last = graph.only_reader(node.outputs[0])
        if last is not None and _halves(graph, last):
            nodes.add(last)
        return frozenset(nodes)
    return None


def _only_computed(graph: GraphView, node: ir.Node) -> ir.Value | None:
    computed = graph.computed_inputs(node)
    return computed[0][1] if len(computed) == 1 else None


def _between(graph: GraphView, value: ir.Value | None, x: ir.Value) -> frozenset[ir.Node] | None:
    """The element-wise nodes that make ``value`` from ``x`` alone; None when it is made from anything else."""
    found: dict[ir.Node, None] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        if current is x:
            continue
        node = graph.producer(current, *POINTWISE)
        if node is None or len(found) >= _MOST_INNER:
            return None
        if node not in found:
            found[node] = None
            pending += [tensor for _, tensor in graph.computed_inputs(node)]
    return frozenset(found)


def _is_gelu(graph: GraphView, core: ir.Node, inner: frozenset[ir.Node]) -> bool:
    if graph.op(core) == "Erf":
        return True
    cubic = any(
        (graph.op(node) == "Pow" and graph.scalar(node.inputs[1]) == 3.0)
        or (graph.op(node) == "Mul" and len(graph.computed_inputs(node)) == 2)
        for node in inner
    )
    if cubic or graph.op(core) == "Tanh":
        return cubic
    factors = [graph.scalar(value) for node in inner if graph.op(node) == "Mul" for value in node.inputs]
    return len(inner) == 1 and any(f is not None and abs(f - _SIGMOID_FACTOR) < _NEAR for f in factors)


def _halves(graph: GraphView, node: ir.Node) -> bool:
    half = _HALF.get(graph.op(node))
    return half is not None and any(graph.scalar(value) == half for value in node.inputs)
