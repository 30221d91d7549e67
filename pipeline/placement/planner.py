"""Runs the rules over a graph and returns the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.placement.draft import Draft
from pipeline.placement.graph import GraphView, load_graph
from pipeline.placement.ops import WEIGHTED
from pipeline.placement.registry import rules_in_force
from pipeline.placement.rule import ANY, Rule, Stage
from pipeline.placement.rules.weighted import why_float
from pipeline.placement.select import select

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import onnx_ir as ir

    from pipeline.config import PlacementConfig
    from pipeline.placement.plan import PlacementPlan

__all__ = ["make_plan", "plan_graph"]

_MOST_ROUNDS = 1000


def make_plan(model: Path, config: PlacementConfig) -> PlacementPlan:
    """Decide where Q/DQ pairs go in the ONNX file ``model``.

    The file is expected as the prepare stage leaves it (unique node names, BatchNorm folded, weights un-shared, shapes
    inferred); without those the plan is poorer, never wrong.

    Raises:
        InputError: an ``include``, ``exclude`` or ``rules_off`` entry that matches nothing, or asks for an operator
            with no INT8 form; a graph in the QOperator format; Q/DQ nodes that TensorRT refuses and that cannot be
            repaired.
    """
    from pipeline.placement.existing import has_quantizers, plan_existing

    graph = GraphView(load_graph(model))
    rules = rules_in_force(config.rules_off)
    if has_quantizers(graph):
        return plan_existing(graph, config)
    return plan_graph(graph, config, rules)


def plan_graph(graph: GraphView, config: PlacementConfig, rules: Sequence[Rule]) -> PlacementPlan:
    """The plan for a float graph under ``rules``."""
    forced, banned = select(graph, config.include, config.exclude)
    draft = Draft(graph, forced=forced, banned=banned)
    for node in graph.nodes:
        if node in banned:
            draft.decide(node, False, "excluded by the user")
    _run(draft, [rule for rule in rules if rule.stage is Stage.KEEP])
    _run(draft, [rule for rule in rules if rule.stage is Stage.WEIGHTED])
    for node in graph.nodes:
        if node in forced:
            _include(draft, node)
    structure = [rule for rule in rules if rule.stage is Stage.STRUCTURE]
    for _ in range(_MOST_ROUNDS):
        before = draft.revision
        _run(draft, structure)
        if draft.revision == before:
            break
    else:
        raise InputError(
            f"the placement rules {', '.join(rule.name for rule in structure)} do not come to an end",
            remedy="a rule of another distribution asks for something new in every round: switch it off with rules_off",
        )
    _run(draft, [rule for rule in rules if rule.stage is Stage.RANGE])
    _run(draft, [rule for rule in rules if rule.stage is Stage.EXPLAIN])
    return draft.plan()


def _include(draft: Draft, node: ir.Node) -> None:
    """Quantise a node that the user asks for and that no rule has quantised."""
    if draft.graph.op(node) not in WEIGHTED:
        asked = [draft.demand(node, index) for index, _ in draft.graph.computed_inputs(node)]
        if any(asked):
            draft.decide(node, True, "included by the user")
            return
        why = "it has no computed float32 input"
    elif draft.is_weighted(node):
        return
    else:
        why = why_float(draft.graph, node)
    raise InputError(
        f"{draft.graph.op(node)} node {node.name!r} is included but cannot be INT8: {why}",
        remedy="leave it out of --include" + (", or the rule out of --rule-off" if "switched off" in why else ""),
    )


def _run(draft: Draft, rules: Sequence[Rule]) -> None:
    for rule in rules:
        draft.rule = rule.name
        for node in draft.graph.nodes:
            if rule.ops != ANY and draft.graph.op(node) not in rule.ops:
                continue
            if rule.stage is Stage.KEEP and node in draft.forced:
                continue
            if rule.stage in (Stage.KEEP, Stage.EXPLAIN) and draft.settled(node):
                continue
            rule.visit(draft, node)
    draft.rule = None
