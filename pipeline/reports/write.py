"""All files of one error report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.files import write_text
from pipeline.reports.content import ReportContent, report_data
from pipeline.reports.heatmap import error_heatmap
from pipeline.reports.html import report_html
from pipeline.reports.layer_maps import calibrator_heatmap, metric_heatmap

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.errors.table import ErrorTable

__all__ = ["write_reports"]


def write_reports(folder: Path, table: ErrorTable, content: ReportContent) -> tuple[str, ...]:
    """Write the tables, heatmaps and the HTML page into ``folder``; returns the names of the files."""
    table.write(folder)
    error_heatmap(
        folder / "errors.png",
        table.columns["relative_l2"],
        [info.layer.node for info in table.layers],
        table.samples,
        title=f"INT8 against FP32: {len(table.layers)} quantised layers, {len(table.samples)} samples",
    )
    metric_heatmap(folder / "metrics.png", table)
    names = ["errors.parquet", "errors.csv", "errors.png", "metrics.png"]
    if calibrator_heatmap(folder / "calibrators.png", table):
        names.append("calibrators.png")
    write_text(folder / "report.html", report_html(report_data(table, content)))
    return (*names, "report.html")
