"""Concat and its opposites: one scale on all branches, so that the copy runs in INT8 or vanishes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import CONVOLUTIONS
from pipeline.placement.patterns import fused_source, pair_behind
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]


def _concat(draft: Draft, node: ir.Node) -> None:
    target = pair_behind(draft, node.outputs[0])
    if target is None:
        return
    indices = range(len(node.inputs))
    if not all(draft.can_demand(node, index) for index in indices):
        return
    for index in indices:
        draft.demand(node, index)
    inputs = [value for value in node.inputs if value is not None]
    draft.share((*inputs, target))
    draft.derive(target, inputs[0])
    draft.decide(node, True, f"its {len(inputs)} inputs and its output share one scale")


def _selection(draft: Draft, node: ir.Node) -> None:
    outputs = [value for value in node.outputs if draft.has_pair(value)]
    value = node.inputs[0]
    if not outputs or value is None or not draft.can_demand(node, 0):
        return
    if not draft.has_pair(value) and fused_source(draft, value, *CONVOLUTIONS) is None:
        return
    draft.demand(node, 0)
    for output in outputs:
        draft.derive(output, value)
    draft.decide(node, True, f"selects from {value.name}, whose scale its outputs share")


RULES = (
    Rule(
        name="concat",
        stage=Stage.STRUCTURE,
        ops=("Concat",),
        effect="quantises every input of a Concat that ends up as INT8, all with the output's scale",
        reason="TensorRT moves Q and DQ across a Concat only when all scales are equal; otherwise every branch is "
        "rescaled",
        source="TensorRT: Q/DQ limitations; ModelOpt concat elimination; TensorRT-RTX falls back to float for "
        "unequal scales",
        visit=_concat,
    ),
    Rule(
        name="selection",
        stage=Stage.STRUCTURE,
        ops=("Split", "Slice", "Gather"),
        effect="quantises what a Split, Slice or Gather selects from, with the scale of its outputs, when a "
        "convolution writes it",
        reason="the convolution then writes INT8 once and the selection copies INT8",
        source="TensorRT: Q moves backward and DQ forward across copies of equal scale",
        visit=_selection,
    ),
)
