"""One network with weights, ranges and placement taken from different Q/DQ graphs of it.

A Q/DQ graph is read into what it does to each input of each node; from that and the float graph any mixture can be
written down again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.errors.graphs import QDQ, Graph

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Quantisation", "hybrid", "quantisation_of"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Place: TypeAlias = "tuple[str, int]"
"""Node name and input index."""


@dataclass(frozen=True)
class Quantisation:
    """What a Q/DQ graph does, by place."""

    scales: Mapping[Place, float] = field(default_factory=dict)
    """Activation inputs that go through a pair, with the pair's scale."""
    weights: Mapping[Place, Array] = field(default_factory=dict)
    """Constant inputs that go through a quantiser, as the floats they come out as."""
    constants: Mapping[Place, Array] = field(default_factory=dict)
    """Every other constant float input (biases), and the float value of quantised ones where the graph has it."""


def quantisation_of(graph: Graph, names: Mapping[str, str] | None = None) -> Quantisation:
    """Read a Q/DQ graph.

    Args:
        names: node name in ``graph`` to the name to file it under; None: its own.

    Raises:
        InputError: a scale or a quantised weight that is not a constant, or an activation quantised per channel.
    """
    scales: dict[Place, float] = {}
    weights: dict[Place, Array] = {}
    constants: dict[Place, Array] = {}
    for node in graph.nodes:
        if node.op_type in QDQ or (names is not None and node.name not in names):
            continue
        label = node.name if names is None else names[node.name]
        for position, name in enumerate(node.input):
            place = (label, position)
            plain = graph.constant(name) if name else None
            if plain is not None:
                if plain.dtype.kind == "f":
                    constants[place] = plain
                continue
            producer, orders = _behind_transposes(graph, name)
            if producer is None or producer.op_type != "DequantizeLinear":
                continue
            quantiser = graph.producers.get(producer.input[0])
            codes = graph.constant(producer.input[0])
            original = graph.constant(quantiser.input[0]) if quantiser is not None else None
            if codes is not None:
                weights[place] = _transposed(_dequantised(graph, producer, codes), orders)
            elif quantiser is not None and original is not None:
                weights[place] = _transposed(_fake_quantised(graph, producer, original), orders)
                constants[place] = _transposed(original, orders)
            elif not orders:
                scales[place] = _activation_scale(graph, producer)
    return Quantisation(scales, weights, constants)


def _behind_transposes(graph: Graph, name: str) -> tuple[Any | None, list[tuple[int, ...] | None]]:
    """The node that makes ``name``, seen through transposes of it (exporters put them behind a weight's DQ)."""
    orders: list[tuple[int, ...] | None] = []
    node = graph.producers.get(name)
    while node is not None and node.op_type == "Transpose":
        order = next((tuple(a.ints) for a in node.attribute if a.name == "perm"), None)
        orders.insert(0, order)
        node = graph.producers.get(node.input[0])
    return node, orders


def _transposed(values: Array, orders: list[tuple[int, ...] | None]) -> Array:
    for order in orders:
        values = values.transpose(order)
    return values


def _parameters(graph: Graph, node: Any, rank: int) -> tuple[Array, Array, Array]:
    """Scale and zero point of a Q or DQ, shaped to broadcast over a tensor of ``rank``, and the scale as it is."""
    scale = graph.constant(node.input[1])
    if scale is None:
        raise InputError(f"the scale {node.input[1]!r} of {node.name!r} is computed at run time, expected a constant")
    zero = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    zero = np.zeros(scale.shape, np.int8) if zero is None else zero
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    shape = [1] * rank
    if scale.size > 1:
        shape[axis] = -1
    return scale.reshape(shape if rank else ()), zero.astype(np.int64).reshape(shape if rank else ()), zero


def _dequantised(graph: Graph, node: Any, codes: Array) -> Array:
    scale, zero, _ = _parameters(graph, node, codes.ndim)
    result: Array = ((codes.astype(np.int64) - zero).astype(scale.dtype) * scale).astype(scale.dtype)
    return result


def _fake_quantised(graph: Graph, node: Any, values: Array) -> Array:
    scale, zero, kind = _parameters(graph, node, values.ndim)
    limits = np.iinfo(kind.dtype)
    codes = np.clip(np.rint(values / scale) + zero, limits.min, limits.max)
    result: Array = ((codes - zero) * scale).astype(scale.dtype)
    return result


def _activation_scale(graph: Graph, node: Any) -> float:
    scale = graph.constant(node.input[1])
    if scale is None or scale.size != 1:
        raise InputError(
            f"the scale {node.input[1]!r} of {node.name!r} must be one constant",
            remedy="quantise activations per tensor, as TensorRT needs it",
        )
    return float(scale.reshape(-1)[0])


def hybrid(fp32: Graph, *, placement: Quantisation, ranges: Quantisation, weights: Quantisation) -> Any:
    """The float graph quantised where ``placement`` says, with scales of ``ranges`` and weights of ``weights``.

    Where ``placement`` quantises something that ``ranges`` or ``weights`` does not, it brings its own number. Weights
    are written as the floats they are dequantised to. Returns a ``ModelProto``.
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.ModelProto()
    model.CopyFrom(fp32.proto)
    del model.graph.node[:]
    zero = numpy_helper.from_array(np.int8(0), "quantize::zero")
    added: dict[str, Any] = {zero.name: zero}
    pairs: dict[tuple[str, float], str] = {}
    for node in fp32.nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for position, name in enumerate(node.input):
            place = (node.name, position)
            if place in placement.scales:
                scale = ranges.scales.get(place, placement.scales[place])
                key = (name, scale)
                if key not in pairs:
                    pairs[key] = f"{name}::dequantised::{len(pairs)}"
                    added[f"{pairs[key]}::scale"] = numpy_helper.from_array(np.float32(scale), f"{pairs[key]}::scale")
                    arguments = [f"{pairs[key]}::scale", zero.name]
                    codes = f"{pairs[key]}::codes"
                    model.graph.node.extend(
                        [
                            onnx.helper.make_node("QuantizeLinear", [name, *arguments], [codes], f"{codes}::q"),
                            onnx.helper.make_node(
                                "DequantizeLinear", [codes, *arguments], [pairs[key]], f"{codes}::dq"
                            ),
                        ]
                    )
                copy.input[position] = pairs[key]
                continue
            values = _constant(place, placement, weights)
            if values is not None:
                label = f"{node.name}::{position}"
                added[label] = numpy_helper.from_array(np.ascontiguousarray(values), label)
                copy.input[position] = label
        extra = weights.constants.get((node.name, len(node.input)))
        if extra is not None:  # a bias where the network has none
            label = f"{node.name}::{len(node.input)}"
            added[label] = numpy_helper.from_array(np.ascontiguousarray(extra), label)
            copy.input.append(label)
        model.graph.node.append(copy)
    used = {name for node in model.graph.node for name in node.input} | set(fp32.outputs)
    kept = [fp32.initializer(tensor.name) for tensor in fp32.proto.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *added.values()])
    return model


def _constant(place: Place, placement: Quantisation, weights: Quantisation) -> Array | None:
    """The value of a constant input; None: as the float graph has it."""
    if place in placement.weights:
        return weights.weights.get(place, placement.weights[place])
    if place in weights.constants:
        return weights.constants[place]
    return weights.weights.get(place)
