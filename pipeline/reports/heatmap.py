"""Heatmaps of per-layer figures as PNG, readable from a handful of layers to several hundred."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["CENTRE", "error_heatmap", "heatmap_png", "shortened"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

CENTRE = 0.005
"""Relative L2 error in the middle of the colours: half a per cent, about the best that 8 bits can do."""

_DPI = 110
_ROW_INCHES = (0.115, 0.24)
_MAX_ROWS_INCHES = 38.0
_COLUMN_INCHES = 0.17
_COLUMNS_INCHES = (6.0, 11.0)
_MARGIN_INCHES = 1.5
_LABEL_LENGTHS = (48, 64, 96, 160)


def shortened(names: Sequence[str], *, lengths: Sequence[int] = _LABEL_LENGTHS) -> list[str]:
    """``names`` with the middle of long ones left out, only as far as they stay different from each other."""
    different = len(set(names))
    for length in lengths:
        labels = [_cut(name, length) for name in names]
        if len(set(labels)) == different:
            return labels
    return list(names)


def _cut(name: str, length: int) -> str:
    head = (length - 1) // 2
    return name if len(name) <= length else f"{name[:head]}…{name[head + 1 - length :]}"


def error_heatmap(
    path: Path, values: Floats, layers: Sequence[str], samples: Sequence[int], *, title: str = ""
) -> None:
    """Write the relative L2 error of every layer (rows, in network order) and sample (columns) as a PNG.

    Args:
        values: shape (layers, samples), not negative.
    """
    write_bytes(
        path,
        heatmap_png(
            values,
            layers,
            [str(sample) for sample in samples],
            colour_label="Relative L2 error",
            column_label="Sample",
            title=title,
            centre=CENTRE,
        ),
    )


def heatmap_png(
    values: Floats,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    colour_label: str,
    column_label: str = "",
    title: str = "",
    centre: float = CENTRE,
    colours: str = "RdYlBu_r",
    annotate: Sequence[Sequence[str]] | None = None,
) -> bytes:
    """A heatmap as PNG bytes, the same bytes for the same values.

    Colours run evenly from 0 to ``centre`` and from there to the 99th percentile of the values; what is above takes the
    last colour, and the colour bar shows it by its pointed end.

    Args:
        values: shape (rows, columns); NaN cells stay grey.
        annotate: a text for every cell, for maps of few columns.
    """
    import matplotlib as mpl
    import seaborn
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    count, width = values.shape
    if not values.size:
        return _empty_png(title)
    finite = values[np.isfinite(values)]
    top = max(2 * centre, float(np.percentile(finite, 99))) if finite.size else 2 * centre
    clipped = bool(finite.size and finite.max() > top)

    low, high = _ROW_INCHES
    row_inches = min(max(9.0 / max(count, 1), low), high)
    rows_inches = min(max(count * row_inches, 1.2), _MAX_ROWS_INCHES)
    cell_inches = _COLUMN_INCHES if annotate is None else 0.95
    columns_inches = (
        max(width * cell_inches, 2.0)
        if annotate
        else min(max(width * cell_inches, _COLUMNS_INCHES[0]), _COLUMNS_INCHES[1])
    )
    font_points = float(np.clip(rows_inches / max(count, 1) * 72 * 0.72, 5.5, 9.0))
    every_row = max(1, int(np.ceil(count * font_points * 1.15 / 72 / rows_inches)))
    every_column = max(1, int(np.ceil(width * 0.34 / columns_inches)))
    labels = shortened(rows)
    label_inches = max((len(label) for label in labels), default=0) * font_points * 0.6 / 72 + 0.2

    with mpl.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "quantize"}):
        figure = Figure(
            figsize=(label_inches + columns_inches + _MARGIN_INCHES, rows_inches + _MARGIN_INCHES), dpi=_DPI
        )
        FigureCanvasAgg(figure)
        whole_width, whole_height = figure.get_size_inches()
        box = (
            label_inches / whole_width,
            0.75 / whole_height,
            columns_inches / whole_width,
            rows_inches / whole_height,
        )
        axes = figure.add_axes(box)
        bar_height = min(rows_inches, 6.0)
        bar_box = (
            (label_inches + columns_inches + 0.25) / whole_width,
            (0.75 + rows_inches - bar_height) / whole_height,
            0.22 / whole_width,
            bar_height / whole_height,
        )
        bar_axes = figure.add_axes(bar_box)
        seaborn.heatmap(
            values,
            ax=axes,
            cbar_ax=bar_axes,
            cmap=colours,
            norm=TwoSlopeNorm(centre, 0.0, top),
            xticklabels=False,
            yticklabels=False,
            cbar_kws={
                "label": colour_label,
                "extend": "max" if clipped else "neither",
                "ticks": _ticks(centre, top),
                "format": "%.4g",
            },
            annot=np.asarray(annotate) if annotate is not None else None,
            fmt="",
            annot_kws={"fontsize": font_points},
            linewidths=0.3 if count * width <= 3000 else 0.0,
            linecolor="white",
        )
        axes.set_facecolor("0.75")
        axes.set_yticks(np.arange(0, count, every_row) + 0.5, labels[::every_row], fontsize=font_points, rotation=0)
        axes.set_xticks(
            np.arange(0, width, every_column) + 0.5,
            columns[::every_column],
            fontsize=7.5,
            rotation=90 if annotate is None else 0,
        )
        axes.tick_params(length=0, pad=2)
        axes.set_xlabel(column_label, fontsize=9)
        bar_axes.tick_params(labelsize=8)
        bar_axes.yaxis.label.set_fontsize(9)
        if title:
            figure.text(0.1 / whole_width, 1 - 0.3 / whole_height, title, fontsize=10.5, va="center", ha="left")
        stream = io.BytesIO()
        with warnings.catch_warnings():
            # Names may have characters that the font lacks: they appear as boxes.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _empty_png(title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 1.2), dpi=_DPI)
    FigureCanvasAgg(figure)
    figure.text(0.03, 0.65, title, fontsize=10.5)
    figure.text(0.03, 0.3, "nothing to show: no layer is quantised", fontsize=9)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _ticks(centre: float, top: float) -> list[float]:
    """0, half the centre, the centre, and about four round values up to ``top``."""
    step = (top - centre) / 4
    magnitude = 10.0 ** np.floor(np.log10(step))
    nice = next(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= step * 0.99) * magnitude
    above = [float(value) for value in np.arange(nice, top * 1.0001, nice) if value > centre + 0.3 * nice]
    return [0.0, centre / 2, centre, *above]
