"""Operators that copy values: reordering, upsampling, padding. They commute with quantisation at one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import CONVOLUTIONS, LAYOUT
from pipeline.placement.patterns import copies_values, fused_source, is_zero_pad
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]


def _layout(draft: Draft, node: ir.Node) -> None:
    value, output = node.inputs[0], node.outputs[0]
    if value is None or not draft.has_pair(output) or not draft.has_pair(value):
        return
    if draft.demand(node, 0):
        draft.derive(output, value)
        draft.decide(node, True, f"reorders the INT8 form of {value.name}; its output has the same scale")


def _resize(draft: Draft, node: ir.Node) -> None:
    value, output = node.inputs[0], node.outputs[0]
    if value is None or not draft.has_pair(output) or not draft.can_demand(node, 0):
        return
    if not draft.has_pair(value) and (not copies_values(node) or fused_source(draft, value, *CONVOLUTIONS) is None):
        return
    draft.demand(node, 0)
    if copies_values(node):
        draft.derive(output, value)
        draft.decide(node, True, f"copies the INT8 form of {value.name}; its output has the same scale")
    else:
        draft.decide(
            node,
            True,
            f"interpolates the INT8 form of {value.name}, which others read as well; its output is quantised anew",
        )


def _pad(draft: Draft, node: ir.Node) -> None:
    value, output = node.inputs[0], node.outputs[0]
    if value is None or not draft.has_pair(output) or not is_zero_pad(draft.graph, node):
        return
    if draft.demand(node, 0):
        draft.derive(output, value)
        draft.decide(node, True, f"pads the INT8 form of {value.name}; its output has the same scale")


RULES = (
    Rule(
        name="layout",
        stage=Stage.STRUCTURE,
        ops=LAYOUT,
        effect="lets a Reshape, Transpose or Flatten read INT8 where its input has a pair anyway, and gives both "
        "sides one scale",
        reason="reordering commutes with quantisation: one pair behind it is enough, TensorRT moves the Q backward",
        source="TensorRT: placement guide, commuting layers; Reshape and Transpose seen as INT8 in TensorRT-RTX plans",
        visit=_layout,
    ),
    Rule(
        name="resize",
        stage=Stage.STRUCTURE,
        ops=("Resize", "Upsample"),
        effect="quantises the input of a nearest-neighbour Resize whose output is INT8, with one scale; "
        "interpolation stays float",
        reason="copies can run in INT8; behind any Resize a new pair is needed, without it TensorRT-RTX runs the "
        "convolution in float",
        source="ModelOpt (Resize behind a convolution prefers an INT8 input); TensorRT-RTX plans",
        visit=_resize,
    ),
    Rule(
        name="pad",
        stage=Stage.STRUCTURE,
        ops=("Pad",),
        effect="quantises in front of a Pad that adds zeros or repeats values, with the scale of its output",
        reason="0 is the INT8 zero, so the Pad commutes; a pair between Pad and convolution alone leaves a float "
        "copy kernel",
        source="TensorRT 8.6 engine of an onnxruntime graph: one copy kernel per Pad with Q/DQ behind it",
        visit=_pad,
    ),
)
