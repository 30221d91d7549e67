"""The files an experiment leaves in its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeline.compare.page import page
from pipeline.compare.plots import layer_heatmap, scatter, shift_curves, size_curves
from pipeline.compare.table import write_csv, write_parquet
from pipeline.core.files import write_bytes, write_json, write_text

if TYPE_CHECKING:
    from pipeline.compare.records import Outcome

__all__ = ["CSV", "JSON", "PAGE", "PARQUET", "write_reports"]

CSV: Final = "compare.csv"
PARQUET: Final = "compare.parquet"
JSON: Final = "compare.json"
PAGE: Final = "compare.html"


def write_reports(outcome: Outcome) -> None:
    """``compare.csv``, ``.parquet``, ``.json`` and ``.html``, and each picture as a PNG of its own."""
    folder = outcome.folder
    write_csv(folder / CSV, outcome.table)
    write_parquet(folder / PARQUET, outcome.table)
    write_json(folder / JSON, dict(outcome.document))
    pictures = {"scatter": scatter(outcome)}
    if (heatmap := layer_heatmap(outcome)) is not None:
        pictures["layers"] = heatmap
    if (sizes := size_curves(outcome)) is not None:
        pictures["sizes"] = sizes
    pictures.update({f"shift-{kind}": picture for kind, picture in shift_curves(outcome).items()})
    for name, picture in pictures.items():
        write_bytes(folder / f"{name}.png", picture)
    write_text(folder / PAGE, page(outcome, pictures))
