"""The products of an attention, left float where TensorRT's fused kernel is a float one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.attention import find_attention
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.attention import Attention
    from pipeline.placement.draft import Draft

__all__ = ["RULES"]

_LONGEST = 512


def _masked_attention(draft: Draft, node: ir.Node) -> None:
    found = find_attention(draft.graph, node)
    if found is not None and found.masked:
        _leave(draft, found, "part of an attention with a mask: its fused kernel is a float one")


def _long_attention(draft: Draft, node: ir.Node) -> None:
    length = draft.graph.dim(node.inputs[0], -1)
    if length is None or length <= _LONGEST:
        return
    found = find_attention(draft.graph, node)
    if found is not None:
        _leave(
            draft, found, f"part of an attention over {length} positions, more than the {_LONGEST} of INT8 kernels"
        )


def _leave(draft: Draft, found: Attention, reason: str) -> None:
    for product in found.products:
        if product not in draft.forced:
            draft.decide(product, False, reason)


RULES = (
    Rule(
        name="masked-attention",
        stage=Stage.KEEP,
        ops=("Softmax",),
        effect="leaves both products of an attention with a mask alone: added, multiplied or chosen by Where, computed "
        "or constant (causal), in front of the Softmax or behind it",
        reason="Q/DQ inside break TensorRT's fused float kernel up; only TensorRT-RTX 1.7 was seen to fuse the INT8 "
        "form too, and gets it with this rule off",
        source="ModelOpt partitioning (MatMul, Add, Softmax, MatMul); _gemm_mha_v2 with INT8 operands in RTX plans",
        visit=_masked_attention,
    ),
    Rule(
        name="long-attention",
        stage=Stage.KEEP,
        ops=("Softmax",),
        effect="leaves both products of an attention over more than 512 positions alone",
        reason="there is no fused INT8 attention kernel of that length",
        source="ModelOpt graph_utils",
        visit=_long_attention,
    ),
)
