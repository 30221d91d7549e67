"""Operands of convolutions and matrix products: the activation per tensor, the weights per output channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import CONVOLUTIONS
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft
    from pipeline.placement.graph import GraphView

__all__ = ["RULES", "why_float"]


def _weighted(draft: Draft, node: ir.Node, axis: int | None, where: str) -> None:
    """Quantise input 0 per tensor and the constant input 1 along ``axis``."""
    if draft.settled(node) or node in draft.banned:
        return
    weights = node.inputs[1]
    if weights is None or not draft.graph.is_constant(weights) or not draft.graph.is_float(weights):
        return
    if draft.demand(node, 0):
        draft.weight(node, 1, axis)
        draft.decide(node, True, f"INT8 activation, INT8 weights {where}")


def _conv(draft: Draft, node: ir.Node) -> None:
    _weighted(draft, node, 0, "with a scale per output channel (axis 0)")


def _conv_transpose(draft: Draft, node: ir.Node) -> None:
    group = node.attributes.get("group")
    if group is not None and group.as_int() != 1:
        _weighted(draft, node, None, "with one scale (a grouped transposed convolution has no axis of output channels)")
    else:
        _weighted(draft, node, 1, "with a scale per output channel (axis 1)")


def _gemm(draft: Draft, node: ir.Node) -> None:
    transposed = node.attributes.get("transB")
    axis = 0 if transposed is not None and transposed.as_int() else 1
    _weighted(draft, node, axis, f"with a scale per output channel (axis {axis})")


def _matmul(draft: Draft, node: ir.Node) -> None:
    shape = draft.graph.shape(node.inputs[1])
    if shape is not None and len(shape) == 2:
        _weighted(draft, node, 1, "with a scale per output channel (axis 1)")
    else:
        _weighted(draft, node, None, "with one scale (the constant is not a matrix)")


def _product_of_activations(draft: Draft, node: ir.Node) -> None:
    if draft.settled(node) or any(draft.graph.is_constant(value) for value in node.inputs[:2]):
        return
    if draft.can_demand(node, 0) and draft.can_demand(node, 1):
        draft.demand(node, 0)
        draft.demand(node, 1)
        draft.decide(node, True, "both operands are activations, both INT8")


_RULE_OF = {"Conv": "conv", "ConvTranspose": "conv-transpose", "Gemm": "gemm", "MatMul": "matmul"}


def why_float(graph: GraphView, node: ir.Node) -> str:
    """Why a convolution or product is not INT8 that no rule leaves float: its operands, else a rule switched off."""
    data, weights = node.inputs[:2]
    constant = graph.is_constant(weights)
    for what, value in (("data input", data), ("weights" if constant else "right operand", weights)):
        if value is not None and value.dtype is not None and not graph.is_float(value):
            return f"its {what} {value.name} is {value.dtype.name.lower()}: only float32 tensors are quantised"
    if graph.is_constant(data):
        return f"its data input {data.name} is a constant"  # type: ignore[union-attr]
    if not constant and graph.op(node) in CONVOLUTIONS:
        return f"its weights {weights.name} are computed, not constant"  # type: ignore[union-attr]
    rule = _RULE_OF[graph.op(node)] if constant else "matmul-activations"
    return f"its rule {rule} is switched off"


RULES = (
    Rule(
        name="conv",
        stage=Stage.WEIGHTED,
        ops=("Conv",),
        effect="quantises the input and the weights of a convolution, weights along axis 0",
        reason="a convolution runs in INT8 only when all its inputs do; its output stays float so that what follows "
        "fuses",
        source="TensorRT: placement guide, recommendations 1, 2 and 7",
        visit=_conv,
    ),
    Rule(
        name="conv-transpose",
        stage=Stage.WEIGHTED,
        ops=("ConvTranspose",),
        effect="quantises the input and the weights of a transposed convolution, weights along axis 1",
        reason="as for a convolution; ONNX keeps the output channels of these weights on axis 1",
        source="TensorRT: placement guide; ModelOpt",
        visit=_conv_transpose,
    ),
    Rule(
        name="gemm",
        stage=Stage.WEIGHTED,
        ops=("Gemm",),
        effect="quantises the input and the weights of a fully connected layer, along axis 0 with transB, else axis 1",
        reason="as for a convolution",
        source="TensorRT: placement guide, recommendations 1, 2 and 7",
        visit=_gemm,
    ),
    Rule(
        name="matmul",
        stage=Stage.WEIGHTED,
        ops=("MatMul",),
        effect="quantises the input and the constant right operand of a matrix product, along axis 1",
        reason="as for a convolution",
        source="TensorRT: placement guide, recommendations 1, 2 and 7",
        visit=_matmul,
    ),
    Rule(
        name="matmul-activations",
        stage=Stage.WEIGHTED,
        ops=("MatMul", "Gemm"),
        effect="quantises both operands of a product of two activations (attention)",
        reason="the product runs in INT8 only when both operands do",
        source="TensorRT: placement guide, recommendation 1; seen as INT8 x INT8 in TensorRT-RTX plans",
        visit=_product_of_activations,
    ),
)
