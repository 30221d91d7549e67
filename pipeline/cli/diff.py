"""`quantize diff`: two artifacts of one network, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import console, output_options, print_json, user_errors

if TYPE_CHECKING:
    from pipeline.errors.diff import ArtifactDifference


@click.command()
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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from pipeline.reports.heatmap import shortened

    out = console()
    if found.settings:
        settings = Table(
            title="what the artifacts were made with", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0
        )
        for column in ("", "A", "B"):
            settings.add_column(column)
        for name, (first, second) in found.settings.items():
            settings.add_row(name, first, second)
        out.print(settings)
    shown = [layer for layer in found.layers if every or not layer.same]
    if shown:
        table = Table(title="layers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
        table.add_column("layer", no_wrap=True)
        table.add_column("placed", no_wrap=True, min_width=7)
        for column in ("range\nB/A", "weights\nchange", "error\nA", "\nB", "\nB−A"):
            table.add_column(column, justify="right", no_wrap=True, min_width=7)
        for name, layer in zip(shortened([layer.node for layer in shown], lengths=(32, 48, 96)), shown, strict=True):
            change = layer.error_change if found.same_samples else None
            table.add_row(
                name,
                layer.placement,
                "-" if layer.range_ratio is None else f"{layer.range_ratio:.4f}",
                "-" if layer.weights_change is None else f"{layer.weights_change:.4f}",
                "-" if layer.error_a is None else f"{layer.error_a:.4f}",
                "-" if layer.error_b is None else f"{layer.error_b:.4f}",
                "-" if change is None else f"{change:+.4f}",
            )
        out.print(table)
    same = sum(layer.same for layer in found.layers)
    out.print(f"{len(found.layers)} layers, {same} with the same placement, ranges and weights")
    if not found.same_samples:
        out.print("the two reports were measured on different samples, so their errors are not subtracted")
