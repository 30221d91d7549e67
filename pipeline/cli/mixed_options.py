"""Options of automatic mixed precision, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"mixed precision, {entry['text']}: points to --choose from"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    rows = [(point, point["figures"]) for point in entry["points"]]
    columns = {
        "point": [f"{p['number']} built" if p["number"] == entry["point"] else str(p["number"]) for p, _ in rows],
        "INT8 MACs": [f"{100 * point['int8_share']:.1f} %" for point, _ in rows],
        f"lost {entry['unit']}": [f"{point['lost']:.4g}" for point, _ in rows],
        "float": [str(point["restored"]) for point, _ in rows],
        "SQNR": [f"{figures['sqnr_db']:.2f} dB" for _, figures in rows],
        "agree": [_percent(figures["agreement"]) for _, figures in rows],
        "top-1": [_percent(figures["top1"]) for _, figures in rows],
        "meets": [("yes" if point["meets"] else "no") + (" *" if point["best"] else "") for point, _ in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells, style="bold" if cells[0].endswith("built") else None)
    table.caption = (
        f"judged on {entry['check_samples']} held-aside samples; * nothing measured is faster and as accurate"
    )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
