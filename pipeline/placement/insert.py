"""Writes a plan into a graph: Q/DQ pairs on activations and weights.

No node and no tensor of the graph loses its name or its producer; only the inputs that the plan names read something
else afterwards. New names derive from the tensor: ``T_q``, ``T_dq``, ``T_scale``, ``T_zero_point``, with a number
where that is taken. The result is the form that onnxruntime and TensorRT 8.6 to 11 and RTX all take: FP32 scales,
explicit int8 zero points of 0 in the scales' shape, explicit axes, FP32 biases, float weights behind their own Q/DQ
pair (TensorRT 8.6 imports INT8 constants in front of a DQ less reliably; it quantises the float ones when it builds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.core.errors import InputError
from pipeline.onnxgraph import add_initializer, fresh_name
from pipeline.placement.weights import dequantize_weights, quantize_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir
    from numpy.typing import NDArray

    from pipeline.placement.graph import GraphView
    from pipeline.placement.plan import ActivationPoint, PlacementPlan, WeightPoint

__all__ = ["MAX_IR_VERSION", "MIN_OPSET", "Inserted", "insert_pairs"]

MIN_OPSET = 13
"""The first with per-channel Q/DQ."""
MAX_IR_VERSION = 9


@dataclass(frozen=True)
class Inserted:
    """Names of one new pair."""

    quantized: str
    dequantized: str


def insert_pairs(
    graph: GraphView,
    plan: PlacementPlan,
    scales: Mapping[str, np.float32],
    weight_scales: Mapping[tuple[str, int], NDArray[np.float32]],
    *,
    weights: Literal["float", "int8"] = "float",
) -> dict[str, Inserted]:
    """Change ``graph``'s model in place.

    Args:
        scales: per activation tensor of the plan.
        weight_scales: per (node, input index) of the plan's weights: shape () or (channels,).
        weights: ``float`` keeps the constant and puts a whole pair behind it; ``int8`` stores it quantised, in front
        of a
            DequantizeLinear (a quarter of the size).

    Returns:
        The new names by activation tensor.

    Raises:
        InputError: opset below 13; or the plan does not belong to the graph.
    """
    writer = _Writer(graph)
    opset = graph.model.opset_imports.get("", 0)
    if opset < MIN_OPSET:
        raise InputError(
            f"the model has opset {opset}; per-channel Q/DQ nodes exist from opset {MIN_OPSET} on",
            remedy="convert it (onnx.version_converter) or export it again with --opset 17",
        )
    names = {}
    for point in plan.activations:
        names[point.tensor] = writer.activation(point, scales[point.tensor])
    for weight in plan.weights:
        writer.weight(weight, weight_scales[weight.node, weight.input_index], stored=weights == "int8")
    graph.model.ir_version = min(graph.model.ir_version, MAX_IR_VERSION)
    return names


class _Writer:
    def __init__(self, graph: GraphView) -> None:
        self.graph = graph
        self.target = graph.model.graph
        self.values: dict[str, ir.Value] = {}
        for value in (*self.target.inputs, *self.target.initializers.values()):
            self.values[value.name or ""] = value
        for node in self.target.all_nodes():
            for value in node.outputs:
                self.values.setdefault(value.name or "", value)
        self.names = set(self.values) | {node.name or "" for node in self.target.all_nodes()}
        self.first = graph.nodes[0] if graph.nodes else None

    def activation(self, point: ActivationPoint, scale: np.float32) -> Inserted:
        value = self.value(point.tensor)
        quantize, dequantize = self.pair(value, np.asarray(scale, np.float32), None)
        producer = value.producer()
        if producer is None and self.first is not None:
            self.target.insert_before(self.first, [quantize, dequantize])
        elif producer is not None:
            self.target.insert_after(producer, [quantize, dequantize])
        for name, index in point.consumers:
            self.reader(name, index, point.tensor).replace_input_with(index, dequantize.outputs[0])
        return Inserted(quantize.outputs[0].name or "", dequantize.outputs[0].name or "")

    def weight(self, point: WeightPoint, scales: NDArray[np.float32], *, stored: bool) -> None:
        value = self.value(point.tensor)
        node = self.reader(point.node, point.input_index, point.tensor)
        array = self.graph.array(value)
        if array is None:
            raise InputError(f"weight {point.tensor!r} of node {point.node!r} is no constant")
        steps = quantize_weights(array, scales, point.axis)
        new: list[ir.Node]
        if stored:
            constant = self.constant(f"{point.tensor}_q", steps)
            new = [self.linear("DequantizeLinear", value, constant, scales, point.axis, f"{point.tensor}_dq")]
        else:
            source = self.on_grid(value, dequantize_weights(steps, scales, point.axis))
            new = list(self.pair(source, scales, point.axis))
        self.target.insert_before(node, new)
        node.replace_input_with(point.input_index, new[-1].outputs[0])
        if value.is_initializer() and not value.uses() and not value.is_graph_output():
            del self.target.initializers[value.name or ""]

    def on_grid(self, value: ir.Value, array: NDArray[np.float32]) -> ir.Value:
        """``value`` with its numbers on the INT8 grid: under its own name where nothing else reads it, else a copy."""
        import onnx_ir as ir

        if value.is_initializer() and len(value.uses()) == 1 and not value.is_graph_output():
            value.const_value = ir.tensor(array, name=value.name)
            return value
        return self.constant(f"{value.name}_grid", array)

    def pair(self, value: ir.Value, scales: NDArray[np.float32], axis: int | None) -> tuple[ir.Node, ir.Node]:
        name = value.name or ""
        quantize = self.linear("QuantizeLinear", value, value, scales, axis, f"{name}_q")
        scale, zero = quantize.inputs[1:]
        dequantize = self.node("DequantizeLinear", value, [quantize.outputs[0], scale, zero], axis, f"{name}_dq")
        return quantize, dequantize

    def linear(
        self, op: str, value: ir.Value, source: ir.Value, scales: NDArray[np.float32], axis: int | None, output: str
    ) -> ir.Node:
        scale = self.constant(f"{value.name}_scale", scales)
        zero = self.constant(f"{value.name}_zero_point", np.zeros(scales.shape, np.int8))
        return self.node(op, value, [source, scale, zero], axis, output)

    def node(self, op: str, value: ir.Value, inputs: list[ir.Value | None], axis: int | None, output: str) -> ir.Node:
        import onnx_ir as ir

        dtype = ir.DataType.INT8 if op == "QuantizeLinear" else ir.DataType.FLOAT
        result = ir.Value(name=self.fresh(output), shape=value.shape, type=ir.TensorType(dtype))
        attributes = [] if axis is None else [ir.AttrInt64("axis", axis)]
        return ir.Node("", op, inputs, attributes, outputs=[result], name=self.fresh(f"{value.name}_{op}"))

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        value = add_initializer(self.target, name, array, self.names)
        self.names.add(str(value.name))
        return value

    def fresh(self, name: str) -> str:
        result = fresh_name(name, self.names)
        self.names.add(result)
        return result

    def value(self, name: str) -> ir.Value:
        if name not in self.values:
            raise InputError(
                f"the placement plan names the tensor {name!r}, which the graph lacks",
                remedy="make the plan from this model",
            )
        return self.values[name]

    def reader(self, name: str, index: int, tensor: str) -> ir.Node:
        node = self.graph.by_name.get(name)
        value = node.inputs[index] if node is not None and index < len(node.inputs) else None
        if node is None or value is None or value.name != tensor:
            found = "does not exist" if node is None else f"reads {value.name if value is not None else None!r}"
            raise InputError(
                f"the placement plan lets input {index} of node {name!r} read {tensor!r}, but it {found}",
                remedy="make the plan from this model",
            )
        return node
