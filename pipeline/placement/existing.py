"""Graphs that already have Q/DQ nodes: recognised, checked for what TensorRT refuses, repaired where nothing is lost.

Quantisation-aware training, ModelOpt, pytorch-quantization, Brevitas and onnxruntime write such graphs. Their scales
are the author's; no pair is added. Every repair computes the very same numbers as before, by ONNX's definition of the
two operators; whatever cannot be repaired so is an error that lists all the nodes concerned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.placement.given import RULE
from pipeline.placement.graph import GraphView
from pipeline.placement.ops import QUANTIZERS, WEIGHTED
from pipeline.placement.plan import NodeDecision, PlacementPlan

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.config import PlacementConfig

__all__ = ["has_quantizers", "plan_existing", "repair"]

_INTEGER_OPERATORS = (
    "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear",
    "com.microsoft::QLinearAdd",
    "com.microsoft::QLinearMul", "com.microsoft::QLinearSigmoid", "com.microsoft::QLinearConcat",
    "com.microsoft::QLinearConv",
    "com.microsoft::QLinearGlobalAveragePool", "com.microsoft::QLinearAveragePool", "com.microsoft::QLinearLeakyRelu",
    "com.microsoft::QLinearSoftmax", "com.microsoft::QGemm", "com.microsoft::DynamicQuantizeMatMul",
)  # fmt: skip
_MIDDLE = 128
_SHOWN = 8


def has_quantizers(graph: GraphView) -> bool:
    """True for a graph that another tool, or training, has quantised."""
    return any(graph.op(node) in (*QUANTIZERS, *_INTEGER_OPERATORS) for node in graph.nodes)


def plan_existing(graph: GraphView, config: PlacementConfig) -> PlacementPlan:
    """A plan that adds nothing: what is quantised by the pairs that are there, and what will be repaired.

    Raises:
        InputError: something TensorRT refuses and that cannot be repaired; or ``include`` or ``exclude`` is given.
    """
    for option, entries in (("include", config.include), ("exclude", config.exclude)):
        if entries:
            raise InputError(
                f"{option} {entries[0]!r}: the model already has Q/DQ nodes, and their placement is left as it is",
                remedy=f"start from the float model, or leave --{option} out",
            )
    notes = repair(graph.model)
    graph = GraphView(graph.model)
    decisions = []
    for node in graph.nodes:
        if graph.op(node) in QUANTIZERS:
            continue  # how others are quantised, not a node to decide about
        quantized, reason = _state(graph, node)
        decisions.append(
            NodeDecision(
                node=node.name or "",
                op=graph.op(node),
                outputs=tuple(value.name or "" for value in node.outputs),
                quantized=quantized,
                rule=RULE,
                reason=reason,
            )
        )
    halves = [decision for decision in decisions if decision.reason.startswith("only")]
    if halves:
        names = ", ".join(decision.node for decision in halves[:_SHOWN])
        notes = (*notes, f"{len(halves)} nodes have a pair on one operand only and run in float: {names}")
    return PlacementPlan(decisions=tuple(decisions), prequantized=True, notes=notes)


def _state(graph: GraphView, node: ir.Node) -> tuple[bool, str]:
    op = graph.op(node)
    dequantised = [
        index for index, value in enumerate(node.inputs) if graph.producer(value, "DequantizeLinear") is not None
    ]
    if not dequantised:
        return False, "no input is quantised in the model"
    if op in WEIGHTED and not {0, 1} <= set(dequantised):
        return (
            False,
            f"only input {dequantised[0]} has a Q/DQ pair in the model; with one float operand it runs in float",
        )
    return True, f"input {', '.join(map(str, dequantised))} quantised by pairs that came with the model"


def repair(model: ir.Model) -> tuple[str, ...]:
    """Change ``model`` so that TensorRT 8.6 to 11 and RTX take its Q/DQ nodes; one sentence per kind of repair.

    Raises:
        InputError: listing every node that cannot be repaired without changing a number.
    """
    worker = _Repair(GraphView(model))
    worker.run()
    if worker.problems:
        shown = "\n".join(f"  {line}" for line in worker.problems[:_SHOWN])
        more = f"\n  and {len(worker.problems) - _SHOWN} more" if len(worker.problems) > _SHOWN else ""
        raise InputError(
            f"the model's Q/DQ nodes hold {len(worker.problems)} things TensorRT refuses and that cannot be repaired "
            f"without loss:\n{shown}{more}",
            remedy="quantise it again symmetrically (int8, zero point 0), or start from the float model",
        )
    return tuple(f"{text}: {_listed(names)}" for text, names in worker.repairs.items())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


@dataclass(frozen=True)
class _Parameters:
    """Scale and zero point of a Q or DQ node."""

    scale: np.ndarray[Any, Any]
    zero: np.ndarray[Any, Any]
    """Of the quantised type; uint8 0 where the node gives none and its type does not follow from the input."""


class _Repair:
    def __init__(self, graph: GraphView) -> None:
        self.graph = graph
        self.problems: list[str] = []
        self.repairs: dict[str, list[str]] = {}
        self.taken = {
            value.name for node in graph.nodes for value in (*node.inputs, *node.outputs) if value is not None
        }

    def run(self) -> None:
        for node in self.graph.nodes:
            op = self.graph.op(node)
            if op in _INTEGER_OPERATORS:
                self.problem(node, "is in the QOperator format, which TensorRT does not import; it takes Q/DQ pairs")
            elif op == "QuantizeLinear":
                self.quantizer(node)
            elif op == "DequantizeLinear" and self.graph.producer(node.inputs[0], "QuantizeLinear") is None:
                self.dequantizer(node)

    def problem(self, node: ir.Node, text: str) -> None:
        self.problems.append(f"{self.graph.op(node)} {node.name!r} {text}")

    def note(self, text: str, node: ir.Node) -> None:
        self.repairs.setdefault(text, []).append(node.name or "")

    # --- a Q and the DQs behind it

    def quantizer(self, node: ir.Node) -> None:
        import onnx_ir as ir

        found = self.parameters(node, None)
        if found is None:
            return
        readers = list(self.graph.downstream(node.outputs[0]))
        followers = [reader for reader in readers if self.graph.op(reader) == "DequantizeLinear"]
        pairs = [(node, found)]
        for follower in followers:
            behind = self.parameters(follower, found.zero.dtype)
            if behind is None:
                return
            pairs.append((follower, behind))
        if found.zero.dtype == np.uint8:
            if len(followers) != len(readers):
                self.problem(node, "writes uint8 that other operators than DequantizeLinear read")
                return
            if any((parameters.zero != _MIDDLE).any() for _, parameters in pairs):
                value = int(found.zero.reshape(-1)[0])
                self.problem(node, f"has uint8 zero point {value}; only 128 has an int8 equal")
                return
            node.outputs[0].type = ir.TensorType(ir.DataType.INT8)
            for each, parameters in pairs:
                self.set_zero(each, parameters.scale)
                self.note("uint8 with zero point 128 became int8 with zero point 0 (the same steps)", each)
        elif found.zero.dtype == np.int8:
            for each, parameters in pairs:
                if parameters.zero.any():
                    self.problem(
                        each, f"has int8 zero point {int(parameters.zero.reshape(-1)[0])}; TensorRT takes 0 only"
                    )
                else:
                    self.explicit_zero(each, parameters)
        else:
            self.problem(node, f"quantises to {found.zero.dtype}; this pipeline builds INT8")
        for each, parameters in pairs:
            self.explicit_axis(each, parameters)

    # --- a DQ of a constant

    def dequantizer(self, node: ir.Node) -> None:
        values = self.graph.array(node.inputs[0])
        name = node.inputs[0].name if node.inputs[0] is not None else None
        if values is None:
            dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
            if dtype is not None and dtype.name == "INT8":
                found = self.parameters(node, np.dtype(np.int8))
                if found is not None and found.zero.any():
                    self.problem(node, f"has int8 zero point {int(found.zero.reshape(-1)[0])}; TensorRT takes 0 only")
                elif found is not None:
                    self.explicit_zero(node, found)
            else:
                self.problem(
                    node, f"dequantises {name}, which is {'unknown' if dtype is None else dtype.name.lower()}, not int8"
                )
            return
        found = self.parameters(node, values.dtype)
        if found is None:
            return
        axis = self.explicit_axis(node, found)
        if axis is None:
            return
        if values.dtype == np.int32:
            self.fold_bias(node, values, found, axis)
            return
        if values.dtype not in (np.int8, np.uint8):
            self.problem(node, f"dequantises {values.dtype} constants; this pipeline builds INT8")
            return
        shifted = values.astype(np.int32) - _along(found.zero.astype(np.int32), axis, values.ndim)
        if values.dtype == np.int8 and not found.zero.any():
            self.explicit_zero(node, found)
        elif shifted.min(initial=0) >= -128 and shifted.max(initial=0) <= 127:
            self.set_input(node, 0, self.constant(f"{name}_int8", shifted.astype(np.int8)))
            self.set_zero(node, found.scale)
            self.note("constants with a zero point became int8 with zero point 0 (the same values)", node)
        else:
            self.problem(
                node, f"constants {name} minus their zero point do not fit int8 ({shifted.min()}..{shifted.max()})"
            )

    def fold_bias(self, node: ir.Node, values: np.ndarray[Any, Any], found: _Parameters, axis: int) -> None:
        exact = values.astype(np.int64) - _along(found.zero.astype(np.int64), axis, values.ndim)
        scale = found.scale if found.scale.size > 1 else found.scale.reshape(())
        folded = exact.astype(np.float32) * _along(scale.astype(np.float32), axis, values.ndim)
        name = node.inputs[0].name if node.inputs[0] is not None else "bias"
        constant = self.constant(f"{name}_float", folded.astype(np.float32))
        for reader, index in self.graph.readers(node.outputs[0]):
            reader.replace_input_with(index, constant)
        if not node.outputs[0].is_graph_output():
            self.graph.model.graph.remove(node, safe=True)
        self.note("int32 constants behind a DequantizeLinear (biases) became float constants", node)

    # --- pieces

    def parameters(self, node: ir.Node, dtype: np.dtype[Any] | None) -> _Parameters | None:
        scale = self.graph.array(node.inputs[1])
        if scale is None:
            self.problem(node, f"computes its scale {node.inputs[1].name if node.inputs[1] else ''} at run time")
            return None
        if node.attributes.get("block_size") is not None and node.attributes["block_size"].as_int():
            self.problem(node, "quantises in blocks")
            return None
        if not np.isfinite(scale.astype(np.float64)).all() or (scale <= 0).any():
            repaired = self.positive_scale(node, scale)
            if repaired is None:
                bad = scale.reshape(-1)[~(np.isfinite(scale.reshape(-1).astype(np.float64)) & (scale.reshape(-1) > 0))][
                    0
                ]
                self.problem(node, f"has scale {float(bad):g}; TensorRT takes positive finite ones")
                return None
            scale = repaired
        value = node.inputs[2] if len(node.inputs) > 2 else None
        if value is None:
            zero = np.zeros(scale.shape, dtype if dtype is not None else np.uint8)
        else:
            found = self.graph.array(value)
            if found is None:
                self.problem(node, f"computes its zero point {value.name} at run time")
                return None
            zero = found
        return _Parameters(scale, zero)

    def positive_scale(self, node: ir.Node, scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """Scale 1 in place of 0 where a channel's constants are all zero."""
        values = self.graph.array(node.inputs[0])
        axis = self.axis(node, scale)
        if values is None or axis is None or scale.ndim != 1 or not np.isfinite(scale).all() or (scale < 0).any():
            return None
        dead = scale == 0
        if np.take(values, np.flatnonzero(dead), axis=axis).any():
            return None
        repaired = np.where(dead, np.ones_like(scale), scale)
        self.set_input(node, 1, self.constant(f"{node.inputs[1].name}_positive", repaired))  # type: ignore[union-attr]
        self.note("scale 0 of channels whose weights are all zero became 1", node)
        return repaired

    def axis(self, node: ir.Node, scale: np.ndarray[Any, Any]) -> int | None:
        """Axis of a vector of scales by ONNX's definition, or where it was lost, the only one whose length fits."""
        attribute = node.attributes.get("axis")
        shape = self.graph.shape(node.inputs[0])
        if attribute is not None:
            axis = attribute.as_int()
            return axis + len(shape) if axis < 0 and shape is not None else axis
        if scale.size == 1 or shape is None:
            return 1
        fits = [index for index, dim in enumerate(shape) if dim == scale.size]
        return 1 if 1 in fits else fits[0] if len(fits) == 1 else None

    def explicit_axis(self, node: ir.Node, found: _Parameters) -> int | None:
        axis = self.axis(node, found.scale)
        if axis is None:
            self.problem(node, f"has {found.scale.size} scales, no axis, and no single axis of that length")
        elif found.scale.size > 1 and node.attributes.get("axis") is None:
            import onnx_ir as ir

            node.attributes["axis"] = ir.AttrInt64("axis", axis)
            self.note("the axis of per-channel scales was written out (TensorRT's default is 0, ONNX's is 1)", node)
        return axis

    def explicit_zero(self, node: ir.Node, found: _Parameters) -> None:
        if len(node.inputs) < 3 or node.inputs[2] is None or found.zero.shape != found.scale.shape:
            self.set_zero(node, found.scale)
            self.note("an int8 zero point of 0 was written out, of the scale's shape (TensorRT 8.6 needs it)", node)

    def set_zero(self, node: ir.Node, scale: np.ndarray[Any, Any]) -> None:
        zero = self.constant(f"{node.outputs[0].name}_zero_point", np.zeros(scale.shape, np.int8))
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        self.set_input(node, 2, zero)

    @staticmethod
    def set_input(node: ir.Node, index: int, value: ir.Value) -> None:
        node.replace_input_with(index, value)

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """A new initializer."""
        import onnx_ir as ir

        fresh, number = name, 1
        while fresh in self.taken:
            fresh, number = f"{name}_{number}", number + 1
        self.taken.add(fresh)
        tensor = ir.tensor(array, name=fresh)
        value = ir.Value(name=fresh, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.model.graph.register_initializer(value)
        return value


def _along(vector: np.ndarray[Any, Any], axis: int, ndim: int) -> np.ndarray[Any, Any]:
    """``vector`` shaped to broadcast along ``axis`` of a tensor with ``ndim`` axes; one number stays one."""
    if vector.size == 1:
        return vector.reshape(())
    shape = [1] * ndim
    shape[axis] = vector.size
    return vector.reshape(shape)
