"""FP16 for the part of a Q/DQ graph that stays float, written into the graph as types and Cast nodes.

TensorRT 10 with strong typing, 11 and RTX take types from the graph; there is no FP16 flag. What stays float32:

- Q and DQ nodes with their scales (before opset 19 both sides of them are float32), every operator that reads a DQ,
  and the element-wise operators between such a one and the next Q. TensorRT runs all of these in INT8 kernels
  whatever float type stands there (seen in TensorRT-RTX plans: the same kernels with float32 as with FP16 around
  them), and FP32 scales are what TensorRT 8.6 to 11 all accept;
- operators that overflow or lose what they compute in FP16: powers, exponentials, sums, norms and their like;
- operators with a constant that FP16 cannot hold (a mask of -1e9, an epsilon of 1e-12). Trained weights nearly always
  have some values that FP16 rounds to zero; they are held if all of them together change by no more than rounding does;
- operators that read or write a tensor which reaches beyond FP16, as measured on data or by what constants make of it
  (:mod:`pipeline.placement.half_reach`): such a tensor is nowhere cast to FP16;
- what the bodies of control-flow nodes read and compute;
- the graph's inputs and outputs, unless asked otherwise.

Element-wise operators on their own are not worth two casts and stay float32 too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.onnxgraph import add_initializer, drop_unused_initializers, fresh_name
from pipeline.placement.graph import GraphView
from pipeline.placement.half_reach import fits, nearly_fits, reaches
from pipeline.placement.ops import LAYOUT, POINTWISE, QUANTIZERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import onnx_ir as ir

    from pipeline.placement.plan import PlacementPlan

__all__ = ["OVERFLOWING", "HalfResult", "half_tensors", "to_half", "write_half"]

OVERFLOWING = (
    "Pow", "Exp", "Log", "Reciprocal", "Sqrt", "CumSum", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "LayerNormalization", "InstanceNormalization",
    "GroupNormalization", "MeanVarianceNormalization", "LpNormalization", "LRN", "Softplus", "LogSoftmax",
)  # fmt: skip
"""Their sums, squares or logarithms leave FP16's range of 6e-8 to 65504 on ordinary activations."""

_SUMS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Weights are one addend among many: those that FP16 rounds to zero are nothing beside the others."""
_FIXED_TYPE = ("Cast", "CastLike", "Constant", "ConstantOfShape", "Range", "EyeLike", "RandomNormal", "RandomUniform")
_CHEAP = (*POINTWISE, *LAYOUT, "Slice", "Gather", "Expand", "Where", "Concat", "Split", "Pad")


@dataclass(frozen=True)
class HalfResult:
    """What was changed."""

    converted: tuple[str, ...] = ()
    """Nodes that compute in FP16 now."""
    kept: dict[str, str] = field(default_factory=dict)
    """Nodes that stay float32 although FP16 exists for them, with the reason."""
    casts: int = 0
    inputs: tuple[str, ...] = ()
    """The graph's inputs that are float16 now."""
    outputs: tuple[str, ...] = ()
    """The graph's outputs that are float16 now."""


def to_half(
    model: ir.Model,
    *,
    nodes: bool = True,
    inputs: bool = False,
    outputs: bool = False,
    largest: Mapping[str, float] | None = None,
) -> HalfResult:
    """Change ``model`` (sorted, nodes named: :func:`pipeline.placement.graph.load_graph`) in place.

    Args:
        nodes: let nodes compute in FP16; False: only inputs and outputs change, by a Cast each.
        inputs: take the graph's float32 inputs as float16. One that is an output as well stays what it is.
        outputs: give the graph's float32 outputs as float16; constants and inputs that are outputs stay what they are.
        largest: tensor to the largest finite magnitude it has on data, for those of :func:`half_tensors`. Without it
            only the graph's constants tell where FP16 overflows.
    """
    worker = _Half(GraphView(model), largest)
    chosen = worker.choose() if nodes else set()
    taken = worker.inputs() if inputs else ()
    worker.convert(chosen, taken)
    given = worker.outputs(half=outputs)
    return HalfResult(
        tuple(node.name or "" for node in worker.graph.nodes if node in chosen),
        worker.kept,
        worker.casts,
        tuple(value.name or "" for value in taken),
        given,
    )


def half_tensors(model: Path, plan: PlacementPlan) -> tuple[str, ...]:
    """Float32 activations of the float ``model`` that nodes in FP16 may read or write, in graph order.

    Args:
        plan: what reads INT8 by it stays as it is.
    """
    from pipeline.placement.graph import load_graph

    worker = _Half(GraphView(load_graph(model)))
    integer = {node for point in plan.activations for node, _ in point.consumers}
    found: dict[str, None] = {}
    for node in worker.graph.nodes:
        typed = worker.typed_inputs(node)
        if not typed or node.name in integer or node in worker.dequantised or worker.graph.op(node) in OVERFLOWING:
            continue
        operands = [node.inputs[index] for index in typed]
        for value in (*operands, *node.outputs):
            if value is None or value.dtype is None or worker.graph.is_constant(value):
                continue
            if value.name and value.dtype.name == "FLOAT":
                found[value.name] = None
    return tuple(found)


def write_half(model: Path, folder: Path, *, inputs: bool = False, outputs: bool = False) -> Path:
    """``model`` with FP16 written into it, as ``model.onnx`` in ``folder``; arguments as of :func:`to_half`.

    Without data, its constants alone tell where FP16 overflows.

    Raises:
        InputError: nothing in it has an FP16 form worth its casts.
    """
    from pipeline.onnxfile import save_model
    from pipeline.placement.graph import load_graph

    loaded = load_graph(model)
    if not to_half(loaded, inputs=inputs, outputs=outputs).converted:
        raise InputError(f"{model}: no node can be computed in FP16", remedy="measure it in float32 alone")
    drop_unused_initializers(loaded)  # the float32 weights
    return save_model(loaded, folder)


class _Half:
    def __init__(self, graph: GraphView, largest: Mapping[str, float] | None = None) -> None:
        self.graph = graph
        self.largest = largest
        self.target = graph.model.graph
        self.kept: dict[str, str] = {}
        self.casts = 0
        self.halves: dict[ir.Value, None] = {}
        """Tensors that are float16 now and were float32, in the graph's order, which is that of their casts."""
        self.opset = graph.model.opset_imports.get("", 0)
        self.names = {
            value.name for node in graph.nodes for value in (*node.inputs, *node.outputs) if value is not None
        }
        self.names |= {node.name for node in graph.nodes} | set(self.target.initializers)
        self.casted: dict[tuple[ir.Value, str], ir.Value] = {}

    # --- which nodes

    def choose(self) -> set[ir.Node]:
        """Nodes that shall compute in FP16."""
        core = self.integer_core()
        self.reach = reaches(self.graph, self.largest)
        chosen = set()
        for node in self.graph.nodes:
            if node in core or not self.typed_inputs(node):
                continue
            reason = self.reason_to_keep(node)
            if reason is None:
                chosen.add(node)
            else:
                self.kept[node.name or ""] = reason
        for island in self.islands(chosen):
            if all(self.graph.op(node) in _CHEAP for node in island):
                chosen -= island
                self.kept.update(
                    dict.fromkeys((node.name or "" for node in island), "element-wise, not worth two casts")
                )
        return chosen

    @cached_property
    def dequantised(self) -> frozenset[ir.Node]:
        """Q, DQ and the readers of a DQ."""
        graph = self.graph
        return frozenset(
            node
            for node in graph.nodes
            if graph.op(node) in QUANTIZERS or any(graph.producer(value, "DequantizeLinear") for value in node.inputs)
        )

    def integer_core(self) -> frozenset[ir.Node]:
        """Q, DQ, the readers of a DQ, and the operators that fuse between those and the next Q."""
        graph, core = self.graph, self.dequantised
        between = {
            node for node in graph.nodes if node not in core and graph.op(node) in (*POINTWISE, *LAYOUT, "MaxPool")
        }

        def stays(node: ir.Node) -> bool:
            before = [graph.producer(value) for _, value in graph.computed_inputs(node) if graph.is_float(value)]
            after = list(graph.downstream(node.outputs[0]))
            inside = core | between
            return bool(after) and all(other in inside for other in after) and all(other in inside for other in before)

        while outside := [node for node in between if not stays(node)]:
            between -= set(outside)
        return core | between

    def reason_to_keep(self, node: ir.Node) -> str | None:
        op = self.graph.op(node)
        if op in OVERFLOWING:
            return "overflows or underflows in FP16"
        for index in self.typed_inputs(node):
            array = self.graph.array(node.inputs[index])
            if array is not None and not fits(array) and not (op in _SUMS and nearly_fits(array)):
                return f"its constant {node.inputs[index].name} is outside FP16's range"  # type: ignore[union-attr]
        if op == "Div" and self.graph.producer(node.inputs[1], *OVERFLOWING) is not None:
            return "divides by a norm"
        operands = [node.inputs[index] for index in self.typed_inputs(node)]
        for value in (*operands, *node.outputs):
            reach = self.reach.get(value) if value is not None else None
            if value is not None and reach is not None and reach.beyond and self.graph.is_float(value):
                return reach.reason(value.name or "")
        return None

    def typed_inputs(self, node: ir.Node) -> list[int]:
        """Inputs that take FP16 when the first output does, by the operator's ONNX definition; [] when it has no FP16
        form."""
        import onnx

        if node.domain not in ("", "ai.onnx") or self.graph.op(node) in _FIXED_TYPE or not node.outputs:
            return []
        if any(value.dtype is None or value.dtype.name != "FLOAT" for value in node.outputs[:1]):
            return []
        if any(attribute.type.name in ("GRAPH", "GRAPHS") for attribute in node.attributes.values()):
            return []
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset, "")
        except onnx.defs.SchemaError:
            return []
        kind = schema.outputs[0].type_str
        allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
        if "tensor(float16)" not in allowed.get(kind, ()):
            return []
        found = []
        for index, value in enumerate(node.inputs):
            formal = schema.inputs[min(index, len(schema.inputs) - 1)]
            if value is not None and formal.type_str == kind:
                found.append(index)
        return found

    def islands(self, chosen: set[ir.Node]) -> list[set[ir.Node]]:
        """Connected sets of chosen nodes."""
        left, found = set(chosen), []
        for start in self.graph.nodes:
            if start not in left:
                continue
            island, pending = set(), [start]
            while pending:
                node = pending.pop()
                if node not in left:
                    continue
                left.remove(node)
                island.add(node)
                pending += [other for value in node.outputs for other in self.graph.downstream(value)]
                pending += [other for value in node.inputs if (other := self.graph.producer(value)) is not None]
            found.append(island)
        return found

    # --- the change

    def inputs(self) -> list[ir.Value]:
        """The graph's inputs that can be float16."""
        return [
            value
            for value in self.target.inputs
            if value.dtype is not None
            and value.dtype.name == "FLOAT"
            and not (value.is_graph_output() or value.is_initializer())
        ]

    def convert(self, chosen: set[ir.Node], inputs: Sequence[ir.Value]) -> None:
        """Make the outputs of ``chosen`` and the graph's ``inputs`` float16, with a Cast for each other reader."""
        import onnx_ir as ir

        half = ir.TensorType(ir.DataType.FLOAT16)
        typed = {node: self.typed_inputs(node) for node in self.graph.nodes if node in chosen}
        halves = self.halves
        for node in typed:
            for value in node.outputs:
                if value.dtype is not None and value.dtype.name == "FLOAT":
                    value.type = half
                    halves[value] = None
        for value in inputs:
            value.type = half
            halves[value] = None
        for value in halves:
            for reader, index in self.graph.readers_inside(value):
                reader.replace_input_with(index, self.cast(value, "FLOAT"))
        for node in self.graph.nodes:
            wanted = typed.get(node, [])
            for index, operand in enumerate(node.inputs):
                if operand is None:
                    continue
                if index in wanted and operand not in halves:
                    array = self.graph.array(operand)
                    narrow = self.constant(operand, array) if array is not None else self.cast(operand, "FLOAT16")
                    node.replace_input_with(index, narrow)
                elif index not in wanted and operand in halves and self.graph.op(node) != "Cast":
                    node.replace_input_with(index, self.cast(operand, "FLOAT"))

    def outputs(self, *, half: bool) -> tuple[str, ...]:
        """Give the graph's outputs the type they shall have, under their own names.

        Returns:
            The graph's outputs that are float16 now.
        """
        import onnx_ir as ir

        given = []
        for index, value in enumerate(self.target.outputs):
            name, producer, is_half = value.name or "", value.producer(), value in self.halves
            if producer is None or not (is_half or (value.dtype is not None and value.dtype.name == "FLOAT")):
                continue  # float16 before, or no float
            if half:
                given.append(name)
            if is_half == half:
                continue
            value.name = self.fresh(f"{name}_fp16" if is_half else f"{name}_fp32")
            dtype = ir.DataType.FLOAT if is_half else ir.DataType.FLOAT16
            result = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
            cast = ir.Node(
                "", "Cast", [value], [ir.AttrInt64("to", int(dtype))], outputs=[result], name=self.fresh(f"{name}_Cast")
            )
            self.target.insert_after(producer, [cast])
            self.target.outputs[index] = result
            self.casts += 1
        return tuple(given)

    def cast(self, value: ir.Value, dtype: str) -> ir.Value:
        """``value`` in another float type; one Cast per tensor and type, right behind the tensor."""
        import onnx_ir as ir

        key = (value, dtype)
        if key not in self.casted:
            kind = ir.DataType[dtype]
            suffix = "fp16" if dtype == "FLOAT16" else "fp32"
            result = ir.Value(name=self.fresh(f"{value.name}_{suffix}"), shape=value.shape, type=ir.TensorType(kind))
            name = self.fresh(f"{value.name}_Cast_{suffix}")
            cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(kind))], outputs=[result], name=name)
            producer = value.producer()
            if producer is not None:
                self.target.insert_after(producer, [cast])
            else:
                self.target.insert_before(self.graph.nodes[0], [cast])
            self.casts += 1
            self.casted[key] = result
        return self.casted[key]

    def constant(self, value: ir.Value, array: np.ndarray[Any, Any]) -> ir.Value:
        key = (value, "FLOAT16")
        if key not in self.casted:
            result = add_initializer(self.target, f"{value.name}_fp16", array.astype(np.float16), self.names)
            self.names.add(result.name)
            self.casted[key] = result
        return self.casted[key]

    def fresh(self, name: str) -> str:
        result = fresh_name(name, self.names)
        self.names.add(result)
        return result
