"""Options of automatic mixed precision, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.cli.tables import add_row, new_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

__all__ = ["MIXED", "mixed_options", "mixed_table"]

F = TypeVar("F", bound="Callable[..., Any]")

MIXED = {
    "max_drop": "max_drop",
    "min_sqnr": "min_sqnr",
    "min_agreement": "min_agreement",
    "choose": "choose",
    "search_samples": "samples",
    "layer_times": "layer_times",
}
"""Flag to field of :class:`pipeline.config.MixedConfig`."""

_OPTIONS = (
    click.option("--max-drop", metavar="0.5%", help="Mixed precision: lose no more top-1 than this (points; labels)."),
    click.option("--min-sqnr", metavar="20dB", help="Mixed precision: signal to quantisation noise at the outputs."),
    click.option("--min-agreement", metavar="99%", help="Mixed precision: share of samples with FP32's arg-max."),
    click.option("--choose", type=int, metavar="K", help="Build point K of the finished search, without another."),
    click.option("--search-samples", type=int, help="Calibration samples that the search measures on [32]."),
    click.option(
        "--layer-times",
        nargs=2,
        type=click.Path(path_type=Path),
        metavar="INT8 FLOAT",
        help="Cost by measured time: `inspect --engine --batch --json` of an all-INT8 and of a float engine.",
    ),
)


def mixed_options(function: F) -> F:
    """``--max-drop``, ``--min-sqnr``, ``--min-agreement``, ``--choose`` and what belongs to them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def mixed_table(entry: dict[str, Any]) -> Table:
    """Every point of a search: accuracy on the samples it is judged by, against speed.

    Args:
        entry: ``mixed`` of a manifest.
    """
    from pipeline.reports.points import search_table

    found = search_table(entry)
    table = new_table(
        f"mixed precision, {entry['text']}: points to --choose from",
        *((name.replace(" ", "\n"), "figure") for name in found.header),
        caption=f"judged on {entry['check_samples']} held-aside samples; * nothing measured is faster and as accurate",
    )
    for row, (number, *cells) in enumerate(found.rows):
        built = row == found.built
        add_row(table, f"{number} built" if built else number, *cells, style="bold" if built else None)
    return table
