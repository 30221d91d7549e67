"""The table of `build --fastest`: which plan serves which profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cli.tables import add_row, new_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipeline.engine.fastest import ProfileChoice

__all__ = ["choices_table"]


def choices_table(title: str, choices: Sequence[ProfileChoice]) -> Table:
    """A row for each profile: what was measured at its optimum, and which plan serves it."""

    table = new_table(
        title,
        ("profile", "text"),
        ("measured at", "text"),
        ("INT8\nms", "figure"),
        ("float\nms", "figure"),
        ("float is", "text"),
        ("served by", "text"),
    )
    for choice in choices:
        shapes = ", ".join("x".join(map(str, shape)) for shape in choice.shapes.values())
        times = ("-" if ms is None else f"{ms:.4f}" for ms in (choice.int8_ms, choice.float_ms))
        served = "float (its answers are FP16's)" if choice.chosen == "float" else "INT8"
        add_row(table, choice.profile, shapes, *times, choice.verdict, served)
    return table
