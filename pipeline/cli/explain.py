"""`quantize explain`: which nodes are quantised, by which rule, with which scale, and why the others are not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import console, output_options, print_json, user_errors

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.placement.explain import NodeExplanation
    from pipeline.placement.plan import PlacementPlan


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("node", required=False)
@click.option("--float", "only_float", is_flag=True, help="Only nodes that stay float.")
@click.option("--int8", "only_int8", is_flag=True, help="Only nodes that run in INT8.")
@output_options
@user_errors
def command(
    artifact: Path, node: str | None, only_float: bool, only_int8: bool, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Say for each node of ARTIFACT whether it is quantised, by which rule and with which scale.

    ARTIFACT may also be an .onnx file: then its plan is made, and nothing is written. NODE is a node name, an output
    tensor, a pattern such as '*/conv1*' or an operator such as Conv; it shows those nodes in full.
    """
    from pipeline.core.errors import InputError
    from pipeline.placement.explain import explain_nodes, select_nodes

    if only_float and only_int8:
        raise InputError("--float and --int8 leave nothing to show", remedy="give one of the two")
    plan, scales = _load(artifact)
    nodes = explain_nodes(plan, scales)
    if node is not None:
        nodes = select_nodes(nodes, node)
    if only_float or only_int8:
        nodes = [item for item in nodes if item.decision.quantized is only_int8]
    if as_json:
        print_json({"notes": list(plan.notes), "nodes": [item.model_dump(mode="json") for item in nodes]})
        return
    out = console()
    if node is not None:
        for item in nodes:
            _print_node(out, item)
        return
    _print_table(out, plan, nodes)


def _load(artifact: Path) -> tuple[PlacementPlan, dict[str, Any]]:
    from pipeline.artifact import PLACEMENT, SCALES, Artifact
    from pipeline.placement.explain import load_explained

    if artifact.is_file():
        from pipeline.config import PlacementConfig
        from pipeline.placement.plan import make_plan

        return make_plan(artifact, PlacementConfig()), {}
    opened = Artifact.open(artifact)
    return load_explained(opened.path(PLACEMENT), opened.path(SCALES))


def _print_table(out: Console, plan: PlacementPlan, nodes: list[NodeExplanation]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="placement", title_justify="left")
    for column in ("node", "operator", "", "rule", "scales", "reason"):
        table.add_column(column, overflow="fold")
    hidden = 0
    for item in nodes:
        decision = item.decision
        if decision.rule == "shape-arithmetic":
            hidden += 1
            continue
        scales = ", ".join(
            "per channel" if operand.kind == "weights" and operand.axis is not None else _number(operand.scale)
            for operand in item.operands
        )
        state = "INT8" if decision.quantized else "float"
        cells = (decision.node, decision.op, state, decision.rule, scales, decision.reason)
        table.add_row(*(escape(cell) for cell in cells))
    out.print(table)
    done = sum(item.decision.quantized for item in nodes)
    out.print(f"{done} of {len(nodes)} nodes run in INT8; {hidden} nodes of shapes and constants are not shown")
    for note in plan.notes:
        out.print(f"note: {note}", markup=False)


def _print_node(out: Console, item: NodeExplanation) -> None:
    from pipeline.placement.rule import all_rules

    decision = item.decision
    state = "INT8" if decision.quantized else "float"
    out.print(f"{decision.node} ({decision.op}): {state}, rule {decision.rule}", markup=False)
    out.print(f"  {decision.reason}", markup=False)
    for operand in item.operands:
        shown = f"scale {_number(operand.scale)}, amax {_number(operand.amax)}"
        if operand.kind == "weights" and operand.axis is not None:
            shown = f"{operand.channels or '?'} scales along axis {operand.axis}, greatest {_number(operand.scale)}"
        out.print(f"  input {operand.index}, {operand.kind} {operand.tensor}: {shown}", markup=False)
        if len(operand.group) > 1:
            out.print(f"    one scale for {', '.join(operand.group)}", markup=False)
    for rule in all_rules():
        if rule.name == decision.rule:
            out.print(f"  the rule: {rule.effect}; {rule.reason} ({rule.source})", markup=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
