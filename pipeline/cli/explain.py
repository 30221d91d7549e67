"""`quantize explain`: why each node is quantised or not, and with which scale."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import console, output_options, print_json, user_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.artifact import Artifact


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("nodes", nargs=-1)
@output_options
@user_errors
def command(artifact: Path, nodes: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool) -> None:
    """Say of each node of ARTIFACT (or of NODES: names, shell patterns or operators) how it was placed."""
    from pipeline.artifact import Artifact
    from pipeline.core.errors import InputError, did_you_mean

    explained = explain(Artifact.open(artifact))
    for pattern in nodes:
        if not any(_matches(entry, pattern) for entry in explained):
            near = did_you_mean(pattern, [entry["node"] for entry in explained])
            raise InputError(f"no node of {artifact} is called or matched by {pattern!r}; {near.partition('?')[0]}")
    chosen = [entry for entry in explained if not nodes or any(_matches(entry, pattern) for pattern in nodes)]
    if as_json:
        print_json(chosen)
        return
    out = console()
    out.print(f"{sum(entry['quantized'] for entry in chosen)} of {len(chosen)} nodes quantised", style="bold")
    for entry in chosen:
        style = "green" if entry["quantized"] else "dim"
        head = f"{entry['node']}  {entry['op']}, {'INT8' if entry['quantized'] else 'float'}, rule {entry['rule']}"
        out.print(head, style=style, markup=False)
        out.print(f"    {entry['reason']}", markup=False)
        for scale in entry["scales"]:
            out.print(f"    {scale['tensor']}: scale {scale['scale']}", markup=False)


def explain(artifact: Artifact) -> list[dict[str, Any]]:
    """Per node, in graph order: the decision of the placement and the scales of its quantised inputs."""
    import json

    from pipeline.artifact import PLACEMENT, SCALES

    placement = json.loads(artifact.path(PLACEMENT).read_text())
    scales = json.loads(artifact.path(SCALES).read_text())
    used: dict[str, list[dict[str, str]]] = {}
    for point in placement["activations"]:
        scale = scales["tensors"].get(point["tensor"])
        for node, _ in point["consumers"]:
            used.setdefault(node, []).append({"tensor": point["tensor"], "scale": _one(scale)})
    for point in placement["weights"]:
        scale = scales["weights"].get(point["tensor"])
        used.setdefault(point["node"], []).append({"tensor": point["tensor"], "scale": _many(scale, point["axis"])})
    return [{**decision, "scales": used.get(decision["node"], [])} for decision in placement["decisions"]]


def _matches(entry: Mapping[str, Any], pattern: str) -> bool:
    return entry["node"] == pattern or entry["op"] == pattern or fnmatchcase(entry["node"], pattern)


def _one(record: Mapping[str, Any] | None) -> str:
    return "-" if record is None else f"{record['scale']:.6g} ({record['calibrator']})"


def _many(record: Mapping[str, Any] | None, axis: int | None) -> str:
    if record is None:
        return "-"
    found = record["scale"]
    values = found if isinstance(found, list) else [found]
    if len(values) == 1:
        return f"{values[0]:.6g}"
    return f"{min(values):.6g} to {max(values):.6g} ({len(values)} channels, axis {axis})"
