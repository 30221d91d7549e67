"""Ranges that the graph itself gives: Clip, Sigmoid, Softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import LAYOUT, SELECTIONS
from pipeline.placement.rule import ANY, Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES", "known_amax"]

_WALK = 6


def known_amax(draft: Draft, value: ir.Value) -> float | None:
    """The largest magnitude ``value`` can have: a Clip or a bounded activation before it, through copies and
    MaxPools."""
    graph = draft.graph
    for _ in range(_WALK):
        node = graph.producer(value)
        if node is None:
            return None
        op = graph.op(node)
        if op == "Clip":
            low, high = (_bound(draft, node, index, name) for index, name in ((1, "min"), (2, "max")))
            return max(abs(low), abs(high)) if low is not None and high is not None and low < high else None
        if op in ("Sigmoid", "HardSigmoid", "Softmax", "Tanh"):
            return 1.0
        if op not in (*LAYOUT, *SELECTIONS, "MaxPool") or node.inputs[0] is None:
            return None
        value = node.inputs[0]
    return None


def _bound(draft: Draft, node: ir.Node, index: int, name: str) -> float | None:
    if len(node.inputs) > index and node.inputs[index] is not None:
        return draft.graph.scalar(node.inputs[index])
    attribute = node.attributes.get(name)
    return None if attribute is None else attribute.as_float()


def _known_range(draft: Draft, node: ir.Node) -> None:
    for output in node.outputs:
        if draft.has_pair(output) and (amax := known_amax(draft, output)) is not None:
            draft.know(output, amax)


RULES = (
    Rule(
        name="known-range",
        stage=Stage.RANGE,
        ops=ANY,
        effect="limits the range of a tensor to what Clip (ReLU6: 6), Sigmoid, Softmax or Tanh let through",
        reason="no value lies above it, whatever the calibrator extrapolates",
        source="the operators' definition",
        visit=_known_range,
    ),
)
