"""The table of `build --fastest`: which plan serves which profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipeline.engine.fastest import ProfileChoice

__all__ = ["choices_table"]


def choices_table(title: str, choices: Sequence[ProfileChoice]) -> Table:
    """A row for each profile: what was measured at its optimum, and which plan serves it."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("profile", "measured at"):
        table.add_column(column, overflow="fold")
    for column in ("INT8 ms", "float ms"):
        table.add_column(column, justify="right")
    for column in ("float is", "served by"):
        table.add_column(column)
    for choice in choices:
        shapes = ", ".join("x".join(map(str, shape)) for shape in choice.shapes.values())
        times = ("-" if ms is None else f"{ms:.4f}" for ms in (choice.int8_ms, choice.float_ms))
        served = "float (its answers are FP16's)" if choice.chosen == "float" else "INT8"
        table.add_row(choice.profile, shapes, *times, choice.verdict, served)
    return table
