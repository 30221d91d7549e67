"""What in the placement of a graph that came with Q/DQ nodes keeps TensorRT from computing or fusing in INT8.

The placement is the author's and stays; here it is only said. Each function returns one sentence, or None. The reasons
are those of the placement rules (``quantize rules``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.onnxgraph import all_graphs
from pipeline.placement.given_edit import axis_of, listed
from pipeline.placement.ops import CONVOLUTIONS, INCLUDABLE, QUANTIZERS, UNARY, WEIGHTED

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["advice", "given_state"]

_BEHIND_CONVOLUTION = ("BatchNormalization",)
_KEEPING = tuple(op for op in INCLUDABLE if op not in (*WEIGHTED, "Add", "Mul", "AveragePool", "GlobalAveragePool"))
"""Of these the output has the type of the input, also for integers."""
_FUSED = tuple(op for op in UNARY if op != "Dropout")


def given_state(graph: GraphView, node: ir.Node) -> tuple[bool, str]:
    """Does ``node`` compute on INT8 in TensorRT, and why."""
    op = graph.op(node)
    dequantised = [index for index, value in enumerate(node.inputs) if _pair(graph, value) is not None]
    if not dequantised and (between := _integers(graph, node)) is not None:
        reads = f"reads the INT8 tensor of QuantizeLinear {between.name!r} itself"
        if op in INCLUDABLE and op not in WEIGHTED:
            return True, f"{reads}, between the nodes of a pair"
        return False, f"{reads}; TensorRT has no INT8 form of {op}"
    if not dequantised:
        return False, "no input is quantised in the model"
    shown = ", ".join(f"{index}{_scale(graph, node.inputs[index])}" for index in dequantised)
    if op in WEIGHTED:
        if not {0, 1} <= set(dequantised):
            return False, f"only input {shown} has a Q/DQ pair in the model; with one float operand it runs in float"
        wrong = _wrong_axis(graph, node)
        if wrong is not None:
            return False, wrong
    elif op not in INCLUDABLE:
        return False, f"input {shown} is rounded by pairs that came with the model; TensorRT has no INT8 form of {op}"
    return True, f"input {shown} quantised by pairs that came with the model"


def _integers(graph: GraphView, node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear whose integers ``node`` reads, as they are or moved."""
    pending, seen = [value for value in node.inputs if value is not None], set()
    while pending:
        producer = graph.producer(pending.pop())
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        if graph.op(producer) == "QuantizeLinear":
            return producer
        if graph.op(producer) in _KEEPING:
            pending += [value for value in producer.inputs if value is not None]
    return None


def _scale(graph: GraphView, value: ir.Value | None) -> str:
    pair = _pair(graph, value)
    scale = None if pair is None else graph.scalar(pair.inputs[1])
    return "" if scale is None else f" (scale {scale:.6g})"


def _wrong_axis(graph: GraphView, node: ir.Node) -> str | None:
    for index, value in enumerate(node.inputs[:2]):
        pair = _pair(graph, value)
        scale = None if pair is None else graph.array(pair.inputs[1])
        if pair is None or scale is None or scale.size == 1:
            continue
        axis = axis_of(graph, pair, scale)
        if not graph.is_constant(_source(graph, pair)):
            return f"activation {index} has {scale.size} scales; TensorRT takes one, and then runs the node in float"
        rank = len(graph.shape(pair.inputs[0]) or ())
        expected = _output_axis(graph, node, index, rank)
        if axis != expected:
            return f"its weights have scales along axis {axis}; TensorRT takes axis {expected}, else it runs in float"
    return None


def _output_axis(graph: GraphView, node: ir.Node, index: int, rank: int) -> int:
    op = graph.op(node)
    if op == "Gemm":
        transposed = node.attributes.get_int("transB" if index else "transA", 0)
        return 1 - transposed if index else transposed
    if op == "MatMul":
        return rank - 1 if index else rank - 2
    return 1 if op == "ConvTranspose" else 0


def advice(graph: GraphView) -> tuple[str, ...]:
    """One sentence for each kind of obstacle, in a graph that has been repaired."""
    found = (_bodies, _half_pairs, _unquantised, _wrong, _skips, _between, _several_scales)
    return tuple(text for check in found if (text := check(graph)) is not None)


def _told(names: list[str], text: str) -> str | None:
    return f"{len(names)} {text}: {listed(names)}" if names else None


def _weighted(graph: GraphView) -> list[ir.Node]:
    return [node for node in graph.nodes if graph.op(node) in WEIGHTED]


def _bodies(graph: GraphView) -> str | None:
    bodies = list(all_graphs(graph.model))[1:]
    names = [node.name or node.op_type for body in bodies for node in body if graph.op(node) in QUANTIZERS]
    text = "Q/DQ nodes in the body of an If, Loop or Scan are left as they are, neither checked nor repaired"
    return _told(names, text)


def _half_pairs(graph: GraphView) -> str | None:
    names = [node.name or "" for node in _weighted(graph) if given_state(graph, node)[1].startswith("only")]
    return _told(names, "nodes have a pair on one operand only and run in float")


def _unquantised(graph: GraphView) -> str | None:
    """Layers with weights; the products of an attention are left in float on purpose by most."""
    names = [
        node.name or ""
        for node in _weighted(graph)
        if all(_pair(graph, value) is None for value in node.inputs[:2])
        and any(graph.is_constant(value) for value in node.inputs[:2])
    ]
    return _told(names, "layers with weights have no Q/DQ pair and run in float")


def _wrong(graph: GraphView) -> str | None:
    names = [node.name or "" for node in _weighted(graph) if " scales" in given_state(graph, node)[1]]
    return _told(names, "nodes have per-channel scales where TensorRT takes none, and run in float")


def _skips(graph: GraphView) -> str | None:
    """A fused Conv + Add writes the type of the other input of Add."""
    names = []
    for node in graph.nodes:
        if graph.op(node) != "Add" or any(graph.is_constant(value) for value in node.inputs):
            continue
        if any(_pair(graph, value) is not None for value in node.inputs):
            continue
        if any(_layer_before(graph, value, CONVOLUTIONS) is not None for value in node.inputs):
            names.append(node.name or "")
    text = "Adds take their skip input in float, so that the convolution fused with each writes float too (a Q/DQ "
    return _told(names, f"{text}pair on the skip input alone would make it INT8)")


def _between(graph: GraphView) -> str | None:
    """Pairs that part a layer from the operator that TensorRT would fuse into its kernel."""
    names = []
    for node in graph.nodes:
        if graph.op(node) != "QuantizeLinear" or _layer_before(graph, node.inputs[0], WEIGHTED) is None:
            continue
        behind = [
            reader
            for follower in graph.downstream(node.outputs[0])
            if graph.op(follower) == "DequantizeLinear"
            for reader in graph.downstream(follower.outputs[0])
        ]
        if any(graph.op(reader) in WEIGHTED for reader in behind):
            continue
        adds = [reader for reader in behind if graph.op(reader) == "Add"]
        if any(graph.op(reader) in _FUSED for reader in behind) or any(_parted(graph, add) is node for add in adds):
            names.append(node.name or "")
    return _told(names, "pairs stand between a layer and the activation or Add that TensorRT would fuse into it")


def _parted(graph: GraphView, add: ir.Node) -> ir.Node | None:
    """The QuantizeLinear that keeps the layer at the end of the longest way to ``add`` from being fused with it.

    None where an input of Add is a layer's own output: the pair on the other one, a projection too, is as it should be.
    """
    if any(_layer_before(graph, value, WEIGHTED) is not None for value in add.inputs):
        return None
    pairs = [graph.producer(pair.inputs[0], "QuantizeLinear") for v in add.inputs if (pair := _pair(graph, v))]
    parted = [q for q in pairs if q is not None and _layer_before(graph, q.inputs[0], WEIGHTED) is not None]
    return max(parted, key=lambda q: graph.depth(q.outputs[0]), default=None)


def _several_scales(graph: GraphView) -> str | None:
    readers: dict[str, int] = {}
    for node in graph.nodes:
        value = node.inputs[0] if graph.op(node) == "QuantizeLinear" else None
        if value is not None and not graph.is_constant(value):
            readers[value.name or ""] = readers.get(value.name or "", 0) + 1
    names = [name for name, count in readers.items() if count > 1]
    return _told(names, "tensors are quantised more than once, with different scales, each by a kernel of its own")


def _pair(graph: GraphView, value: ir.Value | None) -> ir.Node | None:
    return graph.producer(value, "DequantizeLinear")


def _source(graph: GraphView, pair: ir.Node) -> ir.Value | None:
    """What the pair quantises."""
    quantizer = graph.producer(pair.inputs[0], "QuantizeLinear")
    return pair.inputs[0] if quantizer is None else quantizer.inputs[0]


def _layer_before(graph: GraphView, value: ir.Value | None, ops: tuple[str, ...]) -> ir.Node | None:
    """The layer on INT8 that computes ``value``, alone for it, with or without a BatchNormalization behind it."""
    node = graph.producer(value, *ops, *_BEHIND_CONVOLUTION)
    if node is None or value is None or len({use.node for use in value.uses()}) != 1:
        return None
    if graph.op(node) in _BEHIND_CONVOLUTION:
        return _layer_before(graph, node.inputs[0], ops)
    return node if given_state(graph, node)[0] else None
