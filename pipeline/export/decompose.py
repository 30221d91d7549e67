"""Operators that opset 17 does not have, written with those it has. Formulas are those of onnx's operator texts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["DECOMPOSED", "decompose"]

DECOMPOSED = frozenset({"Gelu", "GroupNormalization", "Mish", "RMSNormalization", "Swish"})


def decompose(node: ir.Node, graph: ir.Graph, version: int, target: int) -> str | None:
    """Replace ``node`` inside ``graph``; the output keeps its name. Returns why not, or None when done.

    Args:
        node: one of :data:`DECOMPOSED`.
        version: opset that the node is written in.
        target: opset of the result.
    """
    builder = _Builder(node, graph)
    x = node.inputs[0]
    if x is None or x.dtype is None:
        return "the type of its input is unknown"
    if node.op_type == "Gelu":
        builder.finish(_gelu(builder, x, node.attributes.get_string("approximate", "none")))
    elif node.op_type == "Mish":
        builder.finish(builder.op("Mul", x, builder.op("Tanh", builder.op("Softplus", x))))
    elif node.op_type == "Swish":
        alpha = node.attributes.get_float("alpha", 1.0)
        inner = x if alpha == 1.0 else builder.op("Mul", x, builder.number(alpha))
        builder.finish(builder.op("Mul", x, builder.op("Sigmoid", inner)))
    elif node.op_type == "GroupNormalization":
        return _group_normalization(builder, node, version)
    else:
        return _rms_normalization(builder, node, target)
    return None


def _gelu(builder: _Builder, x: ir.Value, approximate: str) -> ir.Value:
    """x / 2 (1 + erf(x / sqrt 2)), or x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    if approximate == "tanh":
        cube = builder.op("Mul", builder.op("Mul", x, x), x)
        inner = builder.op("Add", x, builder.op("Mul", cube, builder.number(0.044715)))
        bounded = builder.op("Tanh", builder.op("Mul", inner, builder.number(math.sqrt(2 / math.pi))))
    else:
        bounded = builder.op("Erf", builder.op("Div", x, builder.number(math.sqrt(2))))
    return builder.op("Mul", builder.op("Mul", x, builder.op("Add", bounded, builder.number(1.0))), builder.number(0.5))


def _group_normalization(builder: _Builder, node: ir.Node, version: int) -> str | None:
    """InstanceNormalization over N x G x (C/G * D1 * ...), then scale and bias: one per group (18) or channel (21)."""
    x, scale, bias = node.inputs[:3]
    if x is None or scale is None or bias is None or x.shape is None:
        return "the shape of its input is unknown"
    groups = node.attributes.get_int("num_groups")
    if groups is None:
        return "num_groups is missing"
    channels = x.shape[1]
    if not isinstance(channels, int):
        return "the number of its channels is dynamic"
    ones = builder.array(np.ones(groups))
    zeros = builder.array(np.zeros(groups))
    grouped = builder.op("Reshape", x, builder.integers([0, groups, -1]))
    normal = builder.op(
        "InstanceNormalization", grouped, ones, zeros, epsilon=node.attributes.get_float("epsilon", 1e-5)
    )
    restored = builder.op("Reshape", normal, builder.op("Shape", x))
    shape = builder.integers([channels] + [1] * (len(x.shape) - 2))

    def per_channel(value: ir.Value) -> ir.Value:
        if version < 21:
            column = builder.op("Reshape", value, builder.integers([groups, 1]))
            value = builder.op("Expand", column, builder.integers([groups, channels // groups]))
        return builder.op("Reshape", value, shape)

    builder.finish(builder.op("Add", builder.op("Mul", restored, per_channel(scale)), per_channel(bias)))
    return None


def _rms_normalization(builder: _Builder, node: ir.Node, target: int) -> str | None:
    """x / sqrt(mean(x^2) + epsilon) * scale, the mean over the dimensions from ``axis`` on."""
    import onnx_ir as ir

    x, scale = node.inputs[:2]
    if x is None or scale is None or x.shape is None:
        return "the shape of its input is unknown"
    if node.attributes.get_int("stash_type", 1) != 1 or x.dtype != ir.DataType.FLOAT:
        return "only float32 has an equal"
    rank = len(x.shape)
    axes = list(range(node.attributes.get_int("axis", -1) % rank, rank))
    square = builder.op("Mul", x, x)
    if target >= 18:
        mean = builder.op("ReduceMean", square, builder.integers(axes), keepdims=1)
    else:
        mean = builder.op("ReduceMean", square, axes=axes, keepdims=1)
    root = builder.op("Sqrt", builder.op("Add", mean, builder.number(node.attributes.get_float("epsilon", 1e-5))))
    builder.finish(builder.op("Mul", builder.op("Div", x, root), scale))
    return None


class _Builder:
    """Adds nodes before one node and lets the last of them take its place."""

    def __init__(self, node: ir.Node, graph: ir.Graph) -> None:
        self._node = node
        self._graph = graph
        self._stem = str(node.outputs[0].name)
        self._count = 0

    def _name(self, suffix: str) -> str:
        self._count += 1
        return f"{self._stem}_{suffix}_{self._count}"

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        import onnx_ir as ir

        name = self._name(op_type)
        node = ir.node(
            op_type, list(inputs), attributes, name=f"{self._node.name or self._stem}/{op_type}_{self._count}"
        )
        node.outputs[0].name = name
        self._graph.insert_before(self._node, node)
        return node.outputs[0]

    def array(self, values: np.ndarray[Any, np.dtype[Any]]) -> ir.Value:
        """A constant in the dtype of the node's first input."""
        first = self._node.inputs[0]
        dtype = np.dtype(np.float32) if first is None or first.dtype is None else first.dtype.numpy()
        return self._constant(np.asarray(values, dtype=dtype))

    def number(self, value: float) -> ir.Value:
        return self.array(np.array(value))

    def integers(self, values: list[int]) -> ir.Value:
        return self._constant(np.array(values, dtype=np.int64))

    def _constant(self, array: np.ndarray[Any, np.dtype[Any]]) -> ir.Value:
        import onnx_ir as ir

        name = self._name("constant")
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
        value.dtype = ir.DataType.from_numpy(array.dtype)
        self._graph.register_initializer(value)
        return value

    def finish(self, result: ir.Value) -> None:
        old = self._node.outputs[0]
        result.shape, result.type = old.shape, old.type
        name = old.name
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        self._graph.remove(self._node, safe=True)
        old.name = None
        result.name = name
