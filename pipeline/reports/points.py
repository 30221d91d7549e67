"""The points of a mixed-precision search as rows, for the terminal and for `reports/summary.md`."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["SearchTable", "search_table"]


class SearchTable(NamedTuple):
    """Header and cells, without the figures that no point has."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    built: int
    """Index of the row of the point that was built."""


def search_table(entry: dict[str, Any]) -> SearchTable:
    """Every point of a search: accuracy on the samples it is judged by, against speed.

    Args:
        entry: ``mixed`` of a manifest.
    """
    rows = [(point, point["figures"]) for point in entry["points"]]
    columns = {
        "point": [str(point["number"]) for point, _ in rows],
        "INT8 MACs": [f"{100 * point['int8_share']:.1f} %" for point, _ in rows],
        f"lost {entry['unit']}": [f"{point['lost']:.4g}" for point, _ in rows],
        "float nodes": [str(point["restored"]) for point, _ in rows],
        "SQNR": [f"{figures['sqnr_db']:.2f} dB" for _, figures in rows],
        "agreement": [_percent(figures["agreement"]) for _, figures in rows],
        "top-1": [_percent(figures["top1"]) for _, figures in rows],
        "drop, points": [_drop(figures) for _, figures in rows],
        "meets": [("yes" if point["meets"] else "no") + (" *" if point["best"] else "") for point, _ in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    built = next(number for number, (point, _) in enumerate(rows) if point["number"] == entry["point"])
    return SearchTable(tuple(shown), tuple(zip(*shown.values(), strict=True)), built)


def _drop(figures: dict[str, Any]) -> str:
    """Of top-1 against FP32 on the same samples."""
    top1 = figures["top1"]
    return "-" if top1 is None else f"{100 * (figures['top1_fp32'] - top1):.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
