"""Walks over the graph that several rules share: which kernel writes a tensor, and whether it ends up as INT8.

TensorRT fuses element-wise operators into the kernel in front of them. A *cone* is such a set of operators: everything
element-wise between a tensor and the computed tensors it is made from (its leaves). ``x * sigmoid(x)`` has one leaf, x.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.placement.ops import LAYOUT, POINTWISE, UNARY

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft
    from pipeline.placement.graph import GraphView

__all__ = [
    "Cone",
    "cone",
    "copies_values",
    "fused_source",
    "gate_of",
        "is_zero_pad",
    "kernel_of",
    "pair_behind",
    "reaches_pair",
    "spatial_mean",
]

_CONE_LIMIT = 16
_WALK = 5
_WALK = 5


@dataclass(frozen=True)
class Cone:
    """Element-wise operators in front of a tensor, and the tensors they start from.

    Nothing outside reads what the operators hand to each other; a leaf may have other readers.
    """

    nodes: frozenset[ir.Node]
    leaves: tuple[ir.Value, ...]

    def closed(self, graph: GraphView, leaf: ir.Value) -> bool:
        """True when nothing outside the cone reads ``leaf``, so that its producer need not write it."""
        return not self.nodes or self._inside(graph, leaf)

    def _inside(self, graph: GraphView, value: ir.Value) -> bool:
        outside = value.is_graph_output() or graph.read_inside(value)
        return not outside and all(node in self.nodes for node, _ in graph.readers(value))


def cone(graph: GraphView, value: ir.Value) -> Cone:
    """The element-wise operators that ``value`` comes out of; at most a handful, then the walk ends where it is."""
    found = Cone(frozenset(), ())
    leaves: dict[ir.Value, None] = {}
    queue = [(-graph.depth(value), value.name or "", value)]
    seen = {value}
    while queue:
        _, _, current = heapq.heappop(queue)  # the deepest first, so that all its readers in the cone are known
        node = graph.producer(current, *POINTWISE)
        if (
            node is None
            or len(found.nodes) >= _CONE_LIMIT
            or (current is not value and not found._inside(graph, current))
        ):
            leaves[current] = None
            continue
        found = Cone(found.nodes | {node}, ())
        for _, tensor in graph.computed_inputs(node):
            if tensor not in seen:
                seen.add(tensor)
                heapq.heappush(queue, (-graph.depth(tensor), tensor.name or "", tensor))
    return Cone(found.nodes, tuple(leaves))


def fused_source(draft: Draft, value: ir.Value, *ops: str) -> ir.Node | None:
    """The INT8 node (of the operators ``ops``, if given) whose kernel can write ``value``, through fused operators.

    With a residual Add in between either side counts, first the one that is not handed over as INT8.
    """
    graph = draft.graph
    found = cone(graph, value)
    for leaf in sorted(found.leaves, key=draft.has_pair):
        node = graph.producer(leaf, *ops)
        if draft.is_weighted(node) and found.closed(graph, leaf):
            return node
    return None


def kernel_of(draft: Draft, node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The INT8 node in whose kernel the element-wise ``node`` runs, and a tensor that this kernel writes.

    Inner nodes of an activation such as SiLU are found as well.
    """
    graph = draft.graph
    tips = [node.outputs[0]]
    for _ in range(_WALK):
        for tip in tips:
            source = fused_source(draft, tip)
            if source is not None and node in cone(graph, tip).nodes:
                return source, tip
        tips = [reader.outputs[0] for tip in tips for reader in graph.downstream(tip) if graph.op(reader) in POINTWISE]
    return None


def reaches_pair(draft: Draft, value: ir.Value, through: tuple[str, ...] = (*UNARY, *LAYOUT, "MaxPool")) -> bool:
    """True when ``value`` is read as INT8, at once or after operators that fuse with, or commute with, the Q.

    Element-wise operators of two computed operands count when both come from ``value`` alone (SiLU).
    """
    graph = draft.graph
    reached = {value}
    queue = [(graph.place(node), node.name or "", node) for node in graph.downstream(value)]
    if draft.has_pair(value):
        return True
    heapq.heapify(queue)
    seen: set[ir.Node] = set()
    while queue:
        _, _, node = heapq.heappop(queue)
        if node in seen:
            continue
        seen.add(node)
        op = graph.op(node)
        if op not in through and op not in POINTWISE:
            continue
        if not all(tensor in reached for _, tensor in graph.computed_inputs(node)):
            continue
        output = node.outputs[0]
        if draft.has_pair(output):
            return True
        if output not in reached:
            reached.add(output)
            for reader in graph.downstream(output):
                heapq.heappush(queue, (graph.place(reader), reader.name or "", reader))
    return False


def pair_behind(draft: Draft, value: ir.Value) -> ir.Value | None:
    """The tensor with a pair that ``value`` becomes by reordering alone (itself included)."""
    graph = draft.graph
    for _ in range(_CONE_LIMIT):
        if draft.has_pair(value):
            return value
        node = graph.only_reader(value)
        if node is None or graph.op(node) not in LAYOUT:
            return None
        value = node.outputs[0]
    return None


def gate_of(graph: GraphView, node: ir.Node) -> ir.Value | None:
    """For ``Mul(x, gate)`` with a gate in 0..1 that is not made from x alone (squeeze-and-excitation): the gate."""
    if graph.op(node) != "Mul" or len(graph.computed_inputs(node)) != 2:
        return None
    for index in (0, 1):
        gate, other = node.inputs[index], node.inputs[1 - index]
        if graph.producer(gate, "Sigmoid", "HardSigmoid", "Clip") is not None and not _made_from(graph, gate, other):
            return gate
    return None


def _made_from(graph: GraphView, value: ir.Value | None, other: ir.Value | None) -> bool:
    """True when ``value`` comes out of ``other`` element by element (SiLU, a HardSwish that is spelt out)."""
    for _ in range(_WALK):
        if value is other:
            return True
        node = graph.producer(value, *POINTWISE)
        if node is None or len(graph.computed_inputs(node)) != 1:
            return False
        value = graph.computed_inputs(node)[0][1]
    return False


def copies_values(node: ir.Node) -> bool:
    """A Resize or Upsample that copies values: nearest neighbour, and nothing but 0 outside of the image."""
    attributes = node.attributes
    if attributes.get_string("mode", "nearest") != "nearest":
        return False
    crops = attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    return not crops or attributes.get_float("extrapolation_value", 0.0) == 0.0


def is_zero_pad(graph: GraphView, node: ir.Node) -> bool:
    """A Pad that adds zeros, or repeats values: everything in its output is INT8 where its input is."""
    mode = node.attributes.get("mode")
    if mode is not None and mode.as_string() != "constant":
        return True
    value = node.inputs[2] if len(node.inputs) > 2 else None
    return value is None or graph.scalar(value) == 0.0


def spatial_mean(graph: GraphView, node: ir.Node) -> bool:
    """A mean over the spatial axes of an (N, C, ...) tensor, and no part of a normalisation."""
    if graph.op(node) == "GlobalAveragePool":
        return True
    if graph.op(node) != "ReduceMean" or graph.producer(node.inputs[0], "Pow", "Mul") is not None:
        return False
    if any(graph.op(reader) == "Sub" for reader in graph.downstream(node.outputs[0])):
        return False
    shape = graph.shape(node.inputs[0])
    attribute = node.attributes.get("axes")
    if attribute is not None:
        axes = [int(axis) for axis in attribute.as_ints()]
    else:
        array = graph.array(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = [] if array is None else [int(axis) for axis in array.reshape(-1)]
    if shape is None or not axes:
        return False
    return sorted(axis % len(shape) for axis in axes) == list(range(2, len(shape))) and len(shape) > 2
