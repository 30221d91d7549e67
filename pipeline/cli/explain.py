"""`quantize explain`: which nodes are quantised, by which rule, with which scale, and why the others are not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import JsonCommand, console, output_options, print_json, user_errors

if TYPE_CHECKING:
    from pipeline.placement.explain import FloatTypes
    from pipeline.placement.plan import PlacementPlan


@click.command(cls=JsonCommand)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("nodes", nargs=-1)
@click.option("--float", "only", flag_value="float", default=None, help="Only nodes that stay float.")
@click.option("--int8", "only", flag_value="int8", help="Only nodes that run in INT8.")
@output_options
@user_errors
def command(
    artifact: Path, nodes: tuple[str, ...], only: str | None, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Say of each node of ARTIFACT whether it is quantised, by which rule, why, and with which scale.

    ARTIFACT may also be an .onnx file: it is prepared and planned as in a build, and nothing is kept. NODES are node
    names, output tensors, shell patterns such as '*/conv1*' or operators such as Conv.
    """
    from pipeline.placement.explain import explain_nodes, select_nodes

    plan, scales, types = _load(artifact)
    explained = every = explain_nodes(plan, scales, types)
    if nodes:
        wanted = {item.decision.node for pattern in nodes for item in select_nodes(explained, pattern)}
        explained = [item for item in explained if item.decision.node in wanted]
    if only is not None:
        explained = [item for item in explained if item.decision.quantized == (only == "int8")]
    if as_json:
        operands = [[o.model_dump(mode="json") for o in item.operands] for item in explained]
        print_json(
            [
                {
                    **item.decision.model_dump(mode="json"),
                    "fp16": item.fp16,
                    "not_fp16": item.not_fp16,
                    "operands": found,
                }
                for item, found in zip(explained, operands, strict=True)
            ]
        )
        return
    out = console()
    shown = "" if len(explained) == len(every) else f"; {len(explained)} shown"
    out.print(f"{sum(item.decision.quantized for item in every)} of {len(every)} nodes quantised{shown}", style="bold")
    for note in plan.notes:
        out.print(f"note: {note}", markup=False)
    for item in explained:
        decision = item.decision
        style, state = ("green", "INT8") if decision.quantized else ("dim", "FP16" if item.fp16 else "float")
        out.print(f"{decision.node}  {decision.op}, {state}, rule {decision.rule}", style=style, markup=False)
        out.print(f"    {decision.reason}", markup=False)
        if item.not_fp16:
            out.print(f"    not FP16: {item.not_fp16}", markup=False)
        for operand in item.operands:
            out.print(f"    {operand}", markup=False)


def _load(artifact: Path) -> tuple[PlacementPlan, dict[str, Any], FloatTypes]:
    from pipeline.artifact import PLACEMENT, SCALES, Artifact
    from pipeline.placement.explain import FloatTypes, load_explained

    if artifact.is_file():
        import tempfile

        from pipeline.config import PlacementConfig
        from pipeline.export.widen import widen
        from pipeline.onnxfile import check_file, load_model, save_model
        from pipeline.placement.planner import make_plan
        from pipeline.prepare import rewrite

        model = load_model(artifact)  # which says better what is no model at all
        check_file(artifact)
        widen(model)  # as the export stage does with what computes in float16
        rewrite(model)  # its Pads, BatchNorms and computed constants are not what a build plans for
        with tempfile.TemporaryDirectory() as folder:
            return make_plan(save_model(model, Path(folder)), PlacementConfig()), {}, FloatTypes()
    opened = Artifact.open(artifact)
    return load_explained(opened.path(PLACEMENT), opened.path(SCALES))
