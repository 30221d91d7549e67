"""`quantize diff`: two artifacts of one network, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import JsonCommand, console, output_options, print_json, user_errors
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from pipeline.errors.diff import ArtifactDifference


@click.command(cls=JsonCommand)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Also list the layers in which nothing differs.")
@output_options
@user_errors
def command(a: Path, b: Path, every: bool, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Compare the artifacts A and B: settings, placement, ranges, weights, and the errors of their reports."""
    from pipeline.errors.diff import diff_artifacts

    found = diff_artifacts(a, b)
    if as_json:
        print_json(found.model_dump(mode="json"))
    elif not quiet:
        print_difference(found, every=every)


def print_difference(found: ArtifactDifference, *, every: bool) -> None:
    """Settings first, then the layers in network order."""

    out = console()
    if found.settings:
        settings = new_table(
            "what the artifacts were made with", ("", "word"), ("A", "text"), ("B", "text"), dense=True
        )
        for name, (first, second) in found.settings.items():
            add_row(settings, name, first, second)
        print_table(out, settings)
    shown = [layer for layer in found.layers if every or not layer.same]
    if shown:
        headers = ("range\nB/A", "weights\nchange", "error\nA", "\nB", "\nB−A")
        table = new_table(
            "layers", ("layer", "text"), ("placed", "word"), *((name, "figure") for name in headers), dense=True
        )
        for layer in shown:
            change = layer.error_change if found.same_samples else None
            add_row(
                table,
                layer.node,
                layer.placement,
                "-" if layer.range_ratio is None else f"{layer.range_ratio:.4f}",
                "-" if layer.weights_change is None else f"{layer.weights_change:.4f}",
                "-" if layer.error_a is None else f"{layer.error_a:.4f}",
                "-" if layer.error_b is None else f"{layer.error_b:.4f}",
                "-" if change is None else f"{change:+.4f}",
            )
        print_table(out, table)
    same = sum(layer.same for layer in found.layers)
    out.print(f"{len(found.layers)} layers, {same} with the same placement, ranges and weights")
    if not found.same_samples:
        out.print("the two reports were measured on different samples, so their errors are not subtracted")
