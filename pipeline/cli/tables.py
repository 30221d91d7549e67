"""Tables for the terminal, readable at 80 columns: names fold, figures and headers are never cut.

A table whose figures alone are wider than the terminal is printed as wide as they need it: a line that the terminal
breaks can still be read, a figure that ends in an ellipsis cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["Kind", "add_row", "new_table", "print_table"]

Kind = Literal["text", "word", "figure"]
"""``text`` folds to the width that is left; ``word`` and ``figure`` (to the right) are never broken or cut."""

_LEAST_TEXT = 12
"""Columns that a text of more keeps, however narrow the terminal is."""


def new_table(
    title: str,
    *columns: tuple[str, Kind],
    caption: str | None = None,
    header: bool = True,
    lines: bool = False,
    dense: bool = False,
) -> Table:
    """An empty table.

    Args:
        columns: header and kind of each. A header may have several lines; long ones should.
        lines: a rule between rows.
        dense: one space between columns, for tables with many of them.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title),
        caption=None if caption is None else Text(caption),
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 0 if dense else 1, 0, 0),
        show_header=header,
        show_lines=lines,
    )
    for name, kind in columns:
        table.add_column(
            name,
            justify="right" if kind == "figure" else "left",
            no_wrap=kind != "text",
            overflow="fold",
        )
    return table


def add_row(table: Table, *cells: RenderableType, style: str | None = None) -> None:
    """Add a row. Strings are shown as they are: names have brackets in them."""
    from rich.text import Text

    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def print_table(out: Console, table: Table) -> None:
    """Print ``table`` and an empty line, wider than the terminal where its figures need that."""
    needed = _least_width(table)
    if needed > out.width:
        table.width = needed
    above, below = table.title, table.caption
    table.title = table.caption = None  # rich folds them to the width of the table, however narrow that is
    if above:
        out.print(above, style="table.title")
    out.print(table, crop=False)
    if below:
        out.print(below, style="table.caption")
    out.print()
    table.title, table.caption = above, below


def _least_width(table: Table) -> int:
    """Columns that the table cannot do without."""
    total = 0
    for column in table.columns:
        shown = [str(cell) for cell in column.cells]
        lines = [line for cell in shown for line in cell.splitlines()]
        longest = max(map(_columns, lines), default=0)
        header = max(map(_columns, str(column.header).splitlines()), default=0) if table.show_header else 0
        least = longest if column.no_wrap else min(longest, _LEAST_TEXT)
        total += max(least, header)
    count = len(table.columns)
    return total + (count - 1) * (1 + table.padding[1])  # the box's dividers are one column each


def _columns(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
