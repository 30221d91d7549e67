"""What the HTML report shows, as plain JSON values: numbers cut to what a reader or a colour can tell apart."""

from __future__ import annotations

import base64
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors.activations import BINS, SPAN
from pipeline.reports.heatmap import CENTRE
from pipeline.reports.tables import layer_summaries, operator_rows, worst_first

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.errors.table import ErrorTable

__all__ = ["ReportContent", "report_data"]

WORST_LAYERS = 10


@dataclass(frozen=True)
class ReportContent:
    """What goes into a report beside the table."""

    title: str
    subtitle: str = ""
    facts: Sequence[tuple[str, str]] = ()
    """Name and value of each figure at the top of the page."""
    notes: Sequence[str] = ()
    sections: Sequence[Mapping[str, Any]] = field(default=())
    """Further tables: ``title``, ``text``, ``columns`` (names) and ``rows`` (lists of cells)."""


def report_data(table: ErrorTable, content: ReportContent) -> dict[str, Any]:
    """The JSON value that the page reads."""
    summaries = layer_summaries(table)
    numbers = {info.layer.tensor: row for row, info in enumerate(table.layers)}
    layers = []
    for info, summary in zip(table.layers, summaries, strict=True):
        layers.append(
            {
                "tensor": info.layer.tensor,
                "node": info.layer.node,
                "op": info.layer.op,
                "inputs": list(info.inputs),
                "before": [numbers[name] for name in info.before if name in numbers],
                "after": [numbers[name] for name in info.after if name in numbers],
                "engineState": info.engine,
                **{key: _cut(value) for key, value in asdict(summary).items() if key != "order"},
            }
        )
    errors = table.columns["relative_l2"]
    return {
        "title": content.title,
        "subtitle": content.subtitle,
        "facts": [list(fact) for fact in content.facts],
        "notes": list(content.notes),
        "sections": [dict(section) for section in content.sections],
        "centre": CENTRE,
        "bins": BINS,
        "span": SPAN,
        "engine": table.engine_label,
        "samples": [int(sample) for sample in table.samples],
        "layers": layers,
        "worst": [summary.order for summary in worst_first(summaries, WORST_LAYERS)],
        "operators": [{key: _cut(value) for key, value in asdict(row).items()} for row in operator_rows(table)],
        "activations": {
            name: {
                "amax": _cut(figures.amax),
                "values": figures.values,
                "zeros": figures.zeros,
                "largest": _cut(figures.largest),
                "clippedShare": _cut(figures.clipped_share),
                "clippingErrorShare": _cut(figures.clipping_error_share),
                "relativeL2": _cut(figures.relative_l2),
                "histogram": figures.histogram.tolist(),
            }
            for name, figures in table.activations.items()
        },
        "calibrators": {
            name: {tensor: [_cut(amax), _cut(error)] for tensor, (amax, error) in ranges.items()}
            for name, ranges in table.calibrators.items()
        },
        "errors": base64.b64encode(np.ascontiguousarray(errors, "<f4").tobytes()).decode(),
    }


def _cut(value: Any) -> Any:
    """Floats to five significant digits, NaN and infinity to null."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
