"""Nodes that have no INT8 form whatever stands around them: integers, constants, recurrences, control flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import RECURRENT
from pipeline.placement.rule import ANY, Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]


def _shape_arithmetic(draft: Draft, node: ir.Node) -> None:
    types = {value.dtype.name for value in node.outputs if value.dtype is not None}
    if types and not types & {"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"}:
        draft.decide(node, False, "its outputs are no floats (shapes, indices, masks)")
    elif draft.graph.op(node) in ("ConstantOfShape", "Range") or not draft.graph.computed_inputs(node):
        draft.decide(node, False, "a constant")


def _recurrent(draft: Draft, node: ir.Node) -> None:
    draft.decide(
        node, False, f"{node.op_type} keeps a float state from step to step, and TensorRT has no INT8 kernel for it"
    )


def _control_flow(draft: Draft, node: ir.Node) -> None:
    draft.decide(node, False, "control flow: its body is left as it is")


_UNDERSTOOD = "ONNX operator definitions"

RULES = (
    Rule(
        name="shape-arithmetic",
        stage=Stage.EXPLAIN,
        ops=ANY,
        effect="names nodes that compute shapes, indices or masks, and constants",
        reason="only float activations are quantised",
        source=_UNDERSTOOD,
        visit=_shape_arithmetic,
    ),
    Rule(
        name="recurrent",
        stage=Stage.EXPLAIN,
        ops=RECURRENT,
        effect="leaves LSTM, GRU and RNN float, and says so",
        reason="TensorRT has no INT8 kernel for them, and errors of the state add up over the steps",
        source="TensorRT: layers and precisions",
        visit=_recurrent,
    ),
    Rule(
        name="control-flow",
        stage=Stage.EXPLAIN,
        ops=("If", "Loop", "Scan"),
        effect="leaves the bodies of If, Loop and Scan float",
        reason="TensorRT fuses nothing across them",
        source=_UNDERSTOOD,
        visit=_control_flow,
    ),
)
