"""Q/DQ nodes checked for what TensorRT refuses, and repaired where nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.onnxgraph import all_graphs
from pipeline.placement.given_edit import SHOWN, Edit, along, axis_of, listed
from pipeline.placement.given_rewrites import rewrite_given
from pipeline.placement.given_tables import constant_behind
from pipeline.placement.ops import WEIGHTED

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["is_dynamic", "is_integer_operator", "repair_given"]

_INTEGER_OPERATORS = (
    "ConvInteger", "MatMulInteger", "com.microsoft::MatMulIntegerToFloat", "com.microsoft::MatMulInteger16",
    "com.microsoft::QGemm", "com.microsoft::QAttention", "com.microsoft::QEmbedLayerNormalization",
    "com.microsoft::QOrderedMatMul", "com.microsoft::MatMulNBits",
)  # fmt: skip
_MIDDLE = 128

_SYMMETRIC = (
    "quantise it again, symmetrically to int8 with zero point 0 (onnxruntime: QuantType.QInt8 for activations and "
    "weights, ActivationSymmetric and WeightSymmetric; Brevitas: Int8ActPerTensorFloat, also as the act_quant of "
    "QuantReLU; pytorch-quantization: unsigned=False; torchao: int8 with per_tensor_symmetric), or start from the "
    "float model"
)
_QDQ_FORMAT = (
    "export it with QuantizeLinear and DequantizeLinear (onnxruntime: quantize_static with QuantFormat.QDQ, "
    "QuantType.QInt8, ActivationSymmetric and WeightSymmetric), or give the float model, which is quantised here"
)


def is_integer_operator(op: str) -> bool:
    """True for operators that compute on integers themselves (``op``: as GraphView.op gives it)."""
    name = op.rpartition("::")[2]
    return op in _INTEGER_OPERATORS or name.startswith(("QLinear", "DynamicQuantize"))


def is_dynamic(op: str) -> bool:
    """True where the scale comes out of each input, at run time."""
    return op.rpartition("::")[2].startswith("DynamicQuantize")


def repair_given(model: ir.Model) -> tuple[str, ...]:
    """Change ``model`` so that TensorRT 8.6 to 11 and RTX take its Q/DQ nodes; one sentence per kind of repair.

    Raises:
        InputError: listing every node that cannot be repaired without changing a number.
    """
    edit = Edit(model)
    _refuse_integer_operators(edit)
    rewrite_given(edit)
    checks = _Checks(edit)
    checks.run()
    if checks.problems:
        more = f"\n  and {len(checks.problems) - SHOWN} more" if len(checks.problems) > SHOWN else ""
        raise InputError(
            f"the model's Q/DQ nodes hold {len(checks.problems)} things TensorRT refuses and that cannot be repaired "
            "without loss:\n" + "\n".join(f"  {line}" for line in checks.problems[:SHOWN]) + more,
            remedy=_SYMMETRIC,
        )
    return tuple(f"{text}: {listed(names)}" for text, names in edit.repairs.items())


def _refuse_integer_operators(edit: Edit) -> None:
    nodes = (node for graph in all_graphs(edit.graph.model) for node in graph)
    found = [node for node in nodes if is_integer_operator(edit.graph.op(node))]
    if not found:
        return
    ops = list(dict.fromkeys(edit.graph.op(node) for node in found))
    names = listed([f"{edit.graph.op(node)} {node.name!r}" for node in found])
    if any(is_dynamic(op) for op in ops):
        raise InputError(
            f"the model is quantised dynamically: {names} take their scales from each input at run time, and TensorRT "
            "has constant scales only",
            remedy=_QDQ_FORMAT.replace("export it", "quantise it statically,"),
        )
    raise InputError(
        f"the model is in the QOperator format, which TensorRT does not import: {names}", remedy=_QDQ_FORMAT
    )


@dataclass(frozen=True)
class _Parameters:
    """Scale and zero point of a Q or DQ node."""

    scale: np.ndarray[Any, Any]
    zero: np.ndarray[Any, Any]
    """Of the quantised type; uint8 0 where the node gives none and its type does not follow from the input."""


class _Checks:
    def __init__(self, edit: Edit) -> None:
        self.edit = edit
        self.graph = edit.graph
        self.problems: list[str] = []

    def run(self) -> None:
        for node in self.graph.nodes:
            op = self.graph.op(node)
            if op == "QuantizeLinear":
                self.quantizer(node)
            elif op == "DequantizeLinear" and self.graph.producer(node.inputs[0], "QuantizeLinear") is None:
                self.dequantizer(node)

    def problem(self, node: ir.Node, text: str) -> None:
        tensor = node.inputs[0].name if node.inputs[0] is not None else None
        self.problems.append(f"{self.graph.op(node)} {node.name!r} of {tensor!r} {text}")

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
        zeros = [int(zero) for _, parameters in pairs for zero in parameters.zero.reshape(-1)]
        if found.zero.dtype == np.uint8:
            if len(followers) != len(readers) or self.graph.read_inside(node.outputs[0]):
                self.problem(node, "writes uint8 that other operators than DequantizeLinear read")
                return
            if node.outputs[0].is_graph_output():
                self.problem(node, f"writes the model's output {node.outputs[0].name!r} as uint8; in int8 its numbers "
                             "would be others (leave it out of the outputs)")  # fmt: skip
                return
            wrong = [zero for zero in zeros if zero != _MIDDLE]
            if wrong:
                self.problem(node, f"has uint8 zero point {wrong[0]}; only 128 has an int8 equal")
                return
            node.outputs[0].type = ir.TensorType(ir.DataType.INT8)
            for each, parameters in pairs:
                self.edit.set_zero(each, parameters.scale)
                self.edit.note("uint8 with zero point 128 became int8 with zero point 0 (the same steps)", each)
        elif found.zero.dtype == np.int8:
            wrong = [zero for zero in zeros if zero]
            if wrong:
                self.problem(node, f"has int8 zero point {wrong[0]}; TensorRT takes 0 only")
                return
            for each, parameters in pairs:
                self.explicit_zero(each, parameters)
        else:
            self.problem(node, f"quantises to {found.zero.dtype}; this pipeline builds INT8")
        for each, parameters in pairs:
            self.explicit_axis(each, parameters)

    # --- a DQ of a constant, or of an input

    def dequantizer(self, node: ir.Node) -> None:
        values = self.graph.array(node.inputs[0])
        if values is None:
            self.integers_from_outside(node)
            return
        found = self.parameters(node, values.dtype)
        axis = None if found is None else self.explicit_axis(node, found)
        if found is None or axis is None:
            return
        shifted = values.astype(np.int64) - along(found.zero.astype(np.int64), axis, values.ndim)
        fits = values.dtype in (np.int8, np.uint8) and shifted.min(initial=0) >= -128 and shifted.max(initial=0) <= 127
        if values.dtype == np.int32 or (not self.is_operand(node) and (values.ndim <= 1 or not fits)):
            self.fold(node, values, shifted, found, axis)
        elif values.dtype not in (np.int8, np.uint8):
            self.problem(node, f"dequantises {values.dtype} constants; this pipeline builds INT8")
        elif not fits:
            self.problem(node, f"holds constants that do not fit int8 without their zero point "
                         f"({shifted.min()}..{shifted.max()})")  # fmt: skip
        elif values.dtype == np.int8 and not found.zero.any():
            self.explicit_zero(node, found)
        else:
            name = node.inputs[0].name if node.inputs[0] is not None else None
            node.replace_input_with(0, self.edit.constant(f"{name}_int8", shifted.astype(np.int8)))
            self.edit.set_zero(node, found.scale)
            self.edit.note("constants with a zero point became int8 with zero point 0 (the same values)", node)

    def integers_from_outside(self, node: ir.Node) -> None:
        dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
        if dtype is None or dtype.name != "INT8":
            self.problem(node, f"dequantises {'an unknown type' if dtype is None else dtype.name.lower()}, not int8")
            return
        if constant_behind(self.graph, node.inputs[0]) is not None:
            self.problem(node, "reads what is looked up in int8 constants and cannot come in front of that: TensorRT "
                         "takes quantised constants there only")  # fmt: skip
            return
        found = self.parameters(node, np.dtype(np.int8))
        if found is not None and found.zero.any():
            self.problem(node, f"has int8 zero point {int(found.zero.reshape(-1)[0])}; TensorRT takes 0 only")
        elif found is not None:
            self.explicit_zero(node, found)

    def is_operand(self, node: ir.Node) -> bool:
        """True where a convolution or a product multiplies with it, or nothing is known of who reads it."""
        readers = self.graph.readers(node.outputs[0])
        return not readers or any(index < 2 and self.graph.op(reader) in WEIGHTED for reader, index in readers)

    def fold(
        self,
        node: ir.Node,
        values: np.ndarray[Any, Any],
        shifted: np.ndarray[Any, Any],
        found: _Parameters,
        axis: int,
    ) -> None:
        """Biases and other constants that are no operand of a product gain nothing from INT8."""
        scale = along(found.scale.astype(np.float32), axis, values.ndim)
        name = node.inputs[0].name if node.inputs[0] is not None else "constant"
        array = np.asarray(shifted.astype(np.float32) * scale, np.float32)
        constant = self.edit.constant(f"{name}_float", array.astype(found.scale.dtype))
        self.edit.replace(node.outputs[0], constant)
        self.edit.remove_unread(node)
        kind = "int32 constants" if values.dtype == np.int32 else "constants of no product"
        self.edit.note(f"{kind} behind a DequantizeLinear (biases) became float constants", node)

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
                flat = scale.reshape(-1).astype(np.float64)
                bad = flat[~(np.isfinite(flat) & (flat > 0))][0]
                self.problem(node, f"has scale {float(bad):g}; TensorRT takes positive finite ones")
                return None
            scale = repaired
        value = node.inputs[2] if len(node.inputs) > 2 else None
        if value is None:
            return _Parameters(scale, np.zeros(scale.shape, dtype if dtype is not None else np.uint8))
        zero = self.graph.array(value)
        if zero is None:
            self.problem(node, f"computes its zero point {value.name} at run time")
            return None
        return _Parameters(scale, zero)

    def positive_scale(self, node: ir.Node, scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """Scale 1 in place of 0 where a channel's constants are all zero."""
        values = self.graph.array(node.inputs[0])
        axis = axis_of(self.graph, node, scale)
        if values is None or axis is None or scale.ndim != 1 or not np.isfinite(scale).all() or (scale < 0).any():
            return None
        dead = scale == 0
        if np.take(values, np.flatnonzero(dead), axis=axis).any():
            return None
        repaired = np.where(dead, np.ones_like(scale), scale)
        name = node.inputs[1].name if node.inputs[1] is not None else "scale"
        node.replace_input_with(1, self.edit.constant(f"{name}_positive", repaired))
        self.edit.note("scale 0 of channels whose weights are all zero became 1", node)
        return repaired

    def explicit_axis(self, node: ir.Node, found: _Parameters) -> int | None:
        axis = axis_of(self.graph, node, found.scale)
        if axis is None:
            self.problem(node, f"has {found.scale.size} scales, no axis, and no single axis of that length")
        elif found.scale.size > 1 and node.attributes.get("axis") is None:
            import onnx_ir as ir

            node.attributes["axis"] = ir.AttrInt64("axis", axis)
            text = "the axis of per-channel scales was written out (TensorRT's default is 0, ONNX's is 1)"
            self.edit.note(text, node)
        return axis

    def explicit_zero(self, node: ir.Node, found: _Parameters) -> None:
        if len(node.inputs) < 3 or node.inputs[2] is None or found.zero.shape != found.scale.shape:
            self.edit.set_zero(node, found.scale)
            text = "an int8 zero point of 0 was written out, of the scale's shape (TensorRT 8.6 needs it)"
            self.edit.note(text, node)
