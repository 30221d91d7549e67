"""Pooling: a maximum commutes with quantisation, a mean does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import CONVOLUTIONS
from pipeline.placement.patterns import fused_source, pair_behind, spatial_mean
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]


def _max_pool(draft: Draft, node: ir.Node) -> None:
    value, output = node.inputs[0], node.outputs[0]
    if value is None or not draft.has_pair(output) or not draft.has_pair(value):
        return
    if len(node.outputs) > 1 and node.outputs[1].uses():
        return
    if draft.demand(node, 0):
        draft.derive(output, value)
        draft.decide(node, True, f"reads the INT8 form of {value.name}; its output has the same scale")


def _mean(draft: Draft, node: ir.Node) -> None:
    if draft.graph.op(node) == "ReduceMean" and not spatial_mean(draft.graph, node):
        return
    value = node.inputs[0]
    if (
        value is None
        or not draft.can_demand(node, 0)
        or (fused_source(draft, value, *CONVOLUTIONS) is None and not draft.has_pair(value))
    ):
        return
    if draft.has_pair(value) and draft.graph.producer(value) is not None:
        draft.demand(node, 0)
        draft.decide(node, True, f"reads the INT8 form of {value.name}, which a convolution reads as well")
    elif pair_behind(draft, node.outputs[0]) is not None:
        draft.demand(node, 0)
        draft.decide(node, True, "INT8 on both sides: the convolution before it writes INT8")


RULES = (
    Rule(
        name="max-pool",
        stage=Stage.STRUCTURE,
        ops=("MaxPool",),
        effect="lets a MaxPool read INT8 where its input has a pair anyway, and gives both sides one scale",
        reason="a maximum commutes with quantisation: behind a convolution one pair after the MaxPool is enough, "
        "TensorRT moves the Q "
        "backward; two scales around it would keep it float",
        source="TensorRT: placement guide, commuting layers",
        visit=_max_pool,
    ),
    Rule(
        name="average-pool",
        stage=Stage.STRUCTURE,
        ops=("AveragePool", "GlobalAveragePool", "ReduceMean"),
        effect="quantises the input of a spatial mean behind an INT8 convolution when its output, or another reader "
        "of its input, is INT8",
        reason="a layer without weights and with an INT8 input needs an INT8 output; the convolution in front then "
        "writes INT8",
        source="TensorRT: placement guide, recommendation 5 and quantizable layers; ModelOpt find_quantizable_nodes",
        visit=_mean,
    ),
)
