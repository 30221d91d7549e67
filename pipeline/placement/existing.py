"""Graphs that already have Q/DQ nodes: recognised, checked for what TensorRT refuses, repaired where nothing is lost.

Quantisation-aware training, ModelOpt, pytorch-quantization, Brevitas, torchao and onnxruntime write such graphs. Their
scales are the author's; no pair is added. Every repair computes the very same numbers as before, by ONNX's definition
of the two operators; whatever cannot be repaired so is an error that lists all the nodes concerned. What the placement
costs in TensorRT is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.onnxgraph import all_graphs
from pipeline.placement.given import RULE
from pipeline.placement.given_advice import advice, given_state
from pipeline.placement.given_repair import is_integer_operator, repair_given
from pipeline.placement.given_rewrites import CONTRIB
from pipeline.placement.graph import GraphView
from pipeline.placement.ops import QUANTIZERS
from pipeline.placement.plan import NodeDecision, PlacementPlan

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.config import PlacementConfig

__all__ = ["has_quantizers", "is_quantizer", "plan_existing", "repair"]


def has_quantizers(graph: GraphView) -> bool:
    """True for a graph that another tool, or training, has quantised, be it in a control-flow body alone."""
    return any(is_quantizer(graph.op(node)) for each in all_graphs(graph.model) for node in each)


def is_quantizer(op: str) -> bool:
    """True for operators of a quantised graph alone (``op``: as GraphView.op gives it)."""
    return op in (*QUANTIZERS, *CONTRIB) or is_integer_operator(op)


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
        quantized, reason = given_state(graph, node)
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
    return PlacementPlan(decisions=tuple(decisions), prequantized=True, notes=notes)


def repair(model: ir.Model) -> tuple[str, ...]:
    """Change ``model`` so that TensorRT 8.6 to 11 and RTX take its Q/DQ nodes.

    Returns:
        One sentence per kind of repair, then one per kind of obstacle that its placement puts in TensorRT's way.

    Raises:
        InputError: listing every node that cannot be repaired without changing a number.
    """
    repairs = repair_given(model)
    return (*repairs, *advice(GraphView(model)))
