"""Attention, as it stands in a graph: the products around a Softmax, and whether a mask hides positions from it.

A mask may be added, subtracted, multiplied, or chosen by ``Where``, before the Softmax or behind it, and be computed or
constant. A constant that every position gets alike, a scale that varies by head and a learned bias of ordinary size are
no masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.placement.ops import LAYOUT, UNARY

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["Attention", "around_softmax", "find_attention", "is_nan_guard"]

_WALK = 16
"""Nodes between a product and the Softmax, on any path."""
_HIDDEN = 50.0
"""Scores that an added constant lowers by this much against others are hidden: exp(-50) is 2e-22."""
_PRODUCTS = ("MatMul", "Gemm")
_UNARY = (*LAYOUT, *UNARY, "Cast", "CastLike", "Expand", "Slice")
"""Hand scores on with the shape, type or size changed (a soft cap is Tanh between two scales)."""
_SUMS = ("Add", "Sub", "Sum", "Min", "Max")
_FACTORS = ("Mul", "Div")


@dataclass(frozen=True)
class Attention:
    """The matrix products of one attention."""

    scores: tuple[ir.Node, ...]
    """Products of two activations whose sum the Softmax gets; more than one with relative positions."""
    values: tuple[ir.Node, ...]
    """Products that read the probabilities."""
    masked: bool

    @property
    def products(self) -> tuple[ir.Node, ...]:
        return (*self.scores, *self.values)


def find_attention(graph: GraphView, softmax: ir.Node) -> Attention | None:
    """The attention around ``softmax``; None when it is none (no product of two activations on either side)."""
    before = _Before(graph)
    if not before.comes_from_product(softmax.inputs[0], _WALK):
        return None
    values, masked_behind = _behind(graph, softmax)
    if not values:
        return None
    return Attention(tuple(before.products), values, before.masked or masked_behind)


def is_nan_guard(graph: GraphView, node: ir.Node) -> bool:
    """``Where(IsNaN(x), constant, x)``: what a row without any position left becomes."""
    if graph.op(node) != "Where":
        return False
    test = graph.producer(node.inputs[0], "IsNaN")
    return test is not None and test.inputs[0] in node.inputs[1:]


def around_softmax(graph: GraphView, softmax: ir.Node) -> Iterator[ir.Node]:
    """Nodes that mask or guard the probabilities between ``softmax`` and the products that read them."""
    for node in _nodes_behind(graph, softmax):
        if graph.op(node) not in _PRODUCTS:
            yield node


class _Before:
    """The walk from a Softmax back to the products that its scores are made of."""

    def __init__(self, graph: GraphView) -> None:
        self.graph = graph
        self.products: list[ir.Node] = []
        self.masked = False
        self._known: dict[ir.Value, bool] = {}

    def comes_from_product(self, value: ir.Value | None, steps: int) -> bool:
        """Whether ``value`` holds scores. Notes products and masks on the way."""
        if value is None or steps == 0:
            return False
        if value not in self._known:
            self._known[value] = False
            self._known[value] = self._look(value, steps - 1)
        return self._known[value]

    def _look(self, value: ir.Value, steps: int) -> bool:
        graph = self.graph
        node = graph.producer(value)
        if node is None:
            return False
        op = graph.op(node)
        if op in _PRODUCTS:
            if any(graph.is_constant(operand) for operand in node.inputs[:2]):
                return False
            self.products.append(node)
            return True
        if op == "Where":
            operands: tuple[ir.Value | None, ...] = tuple(node.inputs[1:])
        elif op in (*_SUMS, *_FACTORS):
            operands = tuple(node.inputs)
        elif op in _UNARY:
            return self.comes_from_product(node.inputs[0], steps)
        else:
            return False
        scores = [operand for operand in operands if self.comes_from_product(operand, steps)]
        if not scores:
            return False
        others = [operand for operand in operands if operand is not None and operand not in scores]
        if op == "Where":
            self.masked |= not is_nan_guard(graph, node)
        elif op in _SUMS:
            self.masked |= any(_hides_by_sum(graph, other) for other in others)
        else:
            self.masked |= any(_hides_by_factor(graph, other) for other in others)
        return True


def _behind(graph: GraphView, softmax: ir.Node) -> tuple[tuple[ir.Node, ...], bool]:
    """The products that read the probabilities, and whether a mask stands between."""
    products, masked = [], False
    reached = {softmax.outputs[0]}
    for node in _nodes_behind(graph, softmax):
        op = graph.op(node)
        if op in _PRODUCTS:
            products.append(node)
            continue
        others = [value for value in node.inputs if value is not None and value not in reached]
        if op == "Where":
            masked |= not is_nan_guard(graph, node)
        elif op in _FACTORS:
            masked |= any(_hides_by_factor(graph, other) for other in others)
        reached.update(node.outputs)
    return tuple(products), masked


def _nodes_behind(graph: GraphView, softmax: ir.Node) -> list[ir.Node]:
    """What the probabilities go through up to the products that read them, in graph order."""
    found: dict[ir.Node, None] = {}
    level = [softmax.outputs[0]]
    for _ in range(_WALK):
        following = []
        for value in level:
            for node in graph.downstream(value):
                op = graph.op(node)
                if node in found or op not in (*_PRODUCTS, *_UNARY, *_FACTORS, "Where", "IsNaN"):
                    continue
                found[node] = None
                if op not in _PRODUCTS:
                    following.append(node.outputs[0])
        level = following
    leading = [node for node in found if graph.op(node) in _PRODUCTS]
    inside = _leading_to(graph, leading, set(found))
    return sorted((node for node in found if node in inside), key=graph.place)


def _leading_to(graph: GraphView, products: list[ir.Node], among: set[ir.Node]) -> set[ir.Node]:
    """``products`` and those nodes of ``among`` whose outputs they read, at once or through others of them."""
    inside = set(products)
    pending = list(products)
    while pending:
        for value in pending.pop().inputs:
            node = graph.producer(value)
            if node is not None and node in among and node not in inside and graph.op(node) not in _PRODUCTS:
                inside.add(node)
                pending.append(node)
    return inside


def _hides_by_sum(graph: GraphView, value: ir.Value) -> bool:
    """Whether adding ``value`` to scores may hide positions: anything computed, a constant with far lower entries."""
    import numpy as np

    array = graph.array(value)
    if array is None:
        return not _alike_for_all_positions(graph, value)
    if array.size < 2 or array.dtype.kind not in "fiu":
        return False
    numbers = array.astype(np.float64)
    return bool(np.isinf(numbers).any() or numbers.max() - numbers.min() >= _HIDDEN)


def _hides_by_factor(graph: GraphView, value: ir.Value) -> bool:
    """Whether multiplying by ``value`` may hide positions: computed and not alike for all, or a constant of 0 and 1."""
    import numpy as np

    array = graph.array(value)
    if array is None:
        return not _alike_for_all_positions(graph, value)
    return array.size > 1 and np.array_equal(np.unique(array), [0, 1])


def _alike_for_all_positions(graph: GraphView, value: ir.Value) -> bool:
    """One number per row or per head, not per position: a temperature, a sum to divide by."""
    shape = graph.shape(value)
    return shape is not None and (not shape or shape[-1] == 1)
