"""Where the channels of an INT8 tensor can be scaled without changing what the float graph computes, and doing it.

``1 / s`` per channel goes into constants in front of the tensor, ``s`` into the weights of everything that reads it.
With powers of two every product is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.onnxgraph import add_initializer
from pipeline.placement.ops import MATRIX_PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import onnx_ir as ir
    from numpy.typing import NDArray

    from pipeline.placement.graph import GraphView
    from pipeline.placement.plan import PlacementPlan

__all__ = ["Candidate", "Fold", "Way", "apply", "candidates", "reader_amax"]

Way = Literal["normalisation", "weights", "constant", "multiply"]

_WALK = 8


@dataclass(frozen=True)
class Fold:
    """A constant that takes the factors of a tensor's channels."""

    node: str
    input_index: int
    axis: int
    """Of the constant where ``rank`` is None, else of the tensor."""
    rank: int | None = None
    """Of the tensor that the constant is broadcast to."""
    inverse: bool = True
    """1 / s; a divisor takes s."""


@dataclass(frozen=True)
class Candidate:
    """A tensor whose channels can be scaled exactly."""

    tensor: str
    axis: int
    """Its channel axis."""
    readers: tuple[str, ...]
    """Nodes that read it as INT8: their weights take the factors."""
    way: Way
    """What takes 1 / factor: a LayerNormalization, the weights in front, a Mul by a constant, or a new Mul."""
    folds: tuple[Fold, ...]
    free: bool
    """Every reader is a depthwise convolution: its weights have a scale for each channel anyway."""


def candidates(graph: GraphView, plan: PlacementPlan) -> list[Candidate]:
    """Tensors of ``plan`` whose channels can be scaled without changing what the float graph computes."""
    weighted = {(point.node, 0) for point in plan.weights if point.axis is not None}
    found = []
    for point in plan.activations:
        if point.group is not None or not point.consumers or not set(point.consumers) <= weighted:
            continue
        nodes = [graph.by_name[name] for name, _ in point.consumers]
        value = nodes[0].inputs[0]
        products = all(graph.op(node) in MATRIX_PRODUCTS for node in nodes)
        convolutions = all(_is_depthwise(graph, node) or _is_full(graph, node) for node in nodes)
        if value is None or not (products or convolutions):
            continue
        axis = -1 if products else 1
        way, folds = _in_front(graph, value, nodes, axis)
        if way is None and products:
            way, folds = "multiply", ()
        if way is not None:
            free = all(_is_depthwise(graph, node) for node in nodes)
            found.append(Candidate(point.tensor, axis, tuple(node.name or "" for node in nodes), way, folds, free))
    return found


def reader_amax(graph: GraphView, candidate: Candidate) -> NDArray[np.float32]:
    """Greatest magnitude of the readers' weights for each input channel."""
    rows = []
    for name in candidate.readers:
        node = graph.by_name[name]
        array = graph.array(node.inputs[1])
        if array is None:
            raise ValueError(f"the weights of {name} are no constant")
        axis = _input_axis(graph, node)
        rows.append(np.abs(array).max(axis=tuple(i for i in range(array.ndim) if i != axis)))
    return np.asarray(np.maximum.reduce(rows), np.float32)


def apply(graph: GraphView, candidate: Candidate, chosen: NDArray[np.float32]) -> None:
    """Scale the weights of the readers by ``chosen`` and the tensor by its inverse."""
    nodes = [graph.by_name[name] for name in candidate.readers]
    value = nodes[0].inputs[0]
    if value is None:
        raise ValueError(f"{candidate.tensor} is not read by {candidate.readers[0]}")
    for node in nodes:
        _scale(graph, node, 1, chosen, Fold(node.name or "", 1, _input_axis(graph, node)))
    for fold in candidate.folds:
        factor = 1.0 / chosen if fold.inverse else chosen
        _scale(graph, graph.by_name[fold.node], fold.input_index, factor, fold)
    if candidate.way == "multiply":
        _multiply(graph, value, nodes, 1.0 / chosen)


def _in_front(
    graph: GraphView, value: ir.Value, nodes: Collection[ir.Node], axis: int
) -> tuple[Way | None, tuple[Fold, ...]]:
    """The constants in front of ``value`` that can take the factors, through what commutes with them.

    Relu and LeakyRelu commute with positive factors; an Add of a constant takes them along. (ReLU6 does not commute:
    its bound would move.)
    """
    folds: list[Fold] = []
    allowed: Collection[ir.Node] = nodes
    for _ in range(_WALK):
        node = graph.producer(value)
        if node is None or not _read_by(graph, value, allowed):
            break
        op = graph.op(node)
        if op in ("Conv", "LayerNormalization", *MATRIX_PRODUCTS):
            last = _parameters(graph, node, axis)
            way: Way = "normalisation" if op == "LayerNormalization" else "weights"
            return (way, (*folds, *last)) if last else (None, ())
        inner = node.inputs[0]
        if op in ("Add", "Sub", "Mul", "Div"):
            computed = graph.computed_inputs(node)
            shape = graph.shape(value)
            if len(computed) != 1 or shape is None or (op == "Div" and computed[0][0] != 0):
                break
            index, inner = computed[0]
            folds.append(Fold(node.name or "", 1 - index, axis, rank=len(shape), inverse=op != "Div"))
            if op in ("Mul", "Div"):
                return "constant", tuple(folds)
        elif op not in ("Relu", "LeakyRelu"):
            break
        if inner is None:
            break
        value, allowed = inner, (node,)
    return None, ()


def _parameters(graph: GraphView, node: ir.Node, axis: int) -> tuple[Fold, ...]:
    """Weights and bias of a node that makes channels along ``axis``; empty when one is computed or of odd shape."""
    op, name = graph.op(node), node.name or ""
    present = [index for index, value in enumerate(node.inputs) if index and value is not None]
    shapes = {index: graph.shape(node.inputs[index]) for index in present}
    if not all(graph.is_constant(node.inputs[index]) for index in present):
        return ()
    if op == "Conv":
        return tuple(Fold(name, index, 0) for index in present) if axis == 1 else ()
    if axis != -1:
        return ()
    if op == "MatMul":
        return (Fold(name, 1, 1),) if len(shapes[1] or ()) == 2 else ()
    if op == "Gemm":
        columns = (Fold(name, 1, 1 - _input_axis(graph, node)),)
        return columns if 2 not in shapes else (*columns, Fold(name, 2, -1, rank=2))
    normalised = node.attributes.get("axis")
    if normalised is not None and normalised.as_int() != -1:
        return ()
    return tuple(Fold(name, index, -1) for index in present)


def _input_axis(graph: GraphView, node: ir.Node) -> int:
    """Axis of a reader's weights along the channels of what it reads; for a depthwise convolution, its filters."""
    if graph.op(node) == "Conv":
        return 0 if _is_depthwise(graph, node) else 1
    flip = node.attributes.get("transB")
    return 1 if flip is not None and flip.as_int() else 0


def _scale(graph: GraphView, node: ir.Node, index: int, by: NDArray[np.float32], fold: Fold) -> None:
    """Multiply a constant input; a constant that others read as well is copied first."""
    import onnx_ir as ir

    value = node.inputs[index]
    array = graph.array(value)
    if value is None or array is None:
        return
    shape = [1] * (array.ndim if fold.rank is None else fold.rank)
    shape[fold.axis] = by.size
    scaled = (array * by.reshape(shape).astype(array.dtype)).astype(array.dtype)
    if value.is_initializer() and len(value.uses()) == 1 and scaled.shape == array.shape:
        value.const_value = ir.tensor(scaled, name=value.name)
        return
    node.replace_input_with(index, _constant(graph, f"{value.name}_equalised", scaled))


def _multiply(graph: GraphView, value: ir.Value, nodes: Sequence[ir.Node], by: NDArray[np.float32]) -> None:
    import onnx_ir as ir

    factor = _constant(graph, f"{value.name}_equalising", by)
    result = ir.Value(name=f"{value.name}_equalised", shape=value.shape, type=value.type)
    mul = ir.Node("", "Mul", [value, factor], outputs=[result], name=f"{value.name}_equalise")
    producer = value.producer()
    if producer is not None:
        graph.model.graph.insert_after(producer, [mul])
    else:
        graph.model.graph.insert_before(graph.nodes[0], [mul])
    for node in nodes:
        node.replace_input_with(0, result)


def _constant(graph: GraphView, name: str, array: NDArray[Any]) -> ir.Value:
    target = graph.model.graph
    return add_initializer(target, name, array, target.initializers)


def _read_by(graph: GraphView, value: ir.Value, nodes: Collection[ir.Node]) -> bool:
    """True when nothing but ``nodes`` reads ``value``."""
    outside = value.is_graph_output() or graph.read_inside(value)
    return not outside and all(node in nodes for node, _ in graph.readers(value))


def _groups(node: ir.Node) -> int:
    attribute = node.attributes.get("group")
    return 1 if attribute is None else attribute.as_int()


def _is_depthwise(graph: GraphView, node: ir.Node) -> bool:
    shape = graph.shape(node.inputs[1])
    return graph.op(node) == "Conv" and shape is not None and _groups(node) == shape[0] != 1


def _is_full(graph: GraphView, node: ir.Node) -> bool:
    return graph.op(node) == "Conv" and _groups(node) == 1
