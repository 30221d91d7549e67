"""The pictures of an experiment, as PNG bytes; equal figures give equal bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.compare.shifts import ACTIVATIONS, CLEAN
from pipeline.reports.heatmap import heatmap_png

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.compare.measured import Score
    from pipeline.compare.records import Outcome

    Row = Mapping[str, Any]

__all__ = ["layer_heatmap", "scatter", "shift_curves", "size_curves"]

_DPI: Final = 110
_MARKERS: Final = "osD^vPX*<>ph"
_STYLES: Final = ("-", "--", ":", "-.")
_PANELS: Final = 4
"""Panels beside each other."""


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for each in axes.flat:
        each.grid(True, color="0.9", linewidth=0.8)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each calibrator, the same in every picture."""
    import seaborn

    colours = seaborn.color_palette("colorblind", 10)
    return {
        label: {
            "color": colours[index % len(colours)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": _STYLES[index // len(colours) % len(_STYLES)],
        }
        for index, label in enumerate(labels)
    }


def layer_heatmap(outcome: Outcome) -> bytes | None:
    """Relative L2 error of every layer (rows) under every calibrator (columns); None where no layer was compared."""
    shown = [item for item in outcome.measured if item.layers is not None and item.layers.size]
    if not shown:
        return None
    matrix = outcome.layer_matrix()
    return heatmap_png(
        matrix,
        outcome.layer_nodes,
        [item.label.replace(" ", "\n") for item in shown],
        colour_label="Relative L2 error, accumulated",
        title="Error of every layer, by calibrator",
        annotate=[["-" if np.isnan(value) else f"{value:.3f}" for value in row] for row in matrix],
    )


def scatter(outcome: Outcome) -> bytes:
    """Score against SQNR at the outputs, without shift, with 95 % intervals."""
    rows = [row for row in outcome.table if row["shift"] == CLEAN.kind and row["calibration_subset"] is None]
    fp32, int8 = rows[0], [row for row in rows[1:] if row["sqnr_db"] is not None]
    looks = _looks([item.label for item in outcome.measured])
    figure, (axes,) = _figure(8.0, 5.0)
    score = outcome.score
    for row in int8:
        value, low, high = _score_of(row, score)
        axes.errorbar(
            row["sqnr_db"],
            value,
            yerr=[[value - low], [high - value]],
            capsize=3,
            elinewidth=0.8,
            label=row["calibrator"],
            **{**looks[row["calibrator"]], "linestyle": "none"},
        )
    if score.own:
        axes.axhline(_score_of(fp32, score)[0], color="0.3", linewidth=1.0, label="FP32")
    axes.set_xlabel("SQNR at the outputs, dB")
    axes.set_ylabel(_score_label(score))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _png(figure)


def _score_of(row: Row, score: Score) -> tuple[float, float, float]:
    """Value and interval as drawn: per cent where the score is a share, the plain error where it is one."""
    factor = 100.0 if score.percent else 1.0
    value, low, high = (row[f"{score.figure}{end}"] for end in ("", "_low", "_high"))
    return factor * value, factor * low, factor * high


def _score_label(score: Score) -> str:
    return {"relative_l2": "relative L2 error at the outputs", "metric": "metric"}.get(score.figure, f"{score.name}, %")


def shift_curves(outcome: Outcome) -> dict[str, bytes]:
    """Drop against the strength of each kind of shift, with bands of the 95 % intervals: kind to PNG."""
    drop = "drop_from_clean" if outcome.score.own else "drop_from_shifted"
    kinds = dict.fromkeys(row["shift"] for row in outcome.table if row["shift"] != CLEAN.kind)
    return {kind: _shift_picture(outcome, kind, drop) for kind in kinds}


def _shift_picture(outcome: Outcome, kind: str, drop: str) -> bytes:
    """One panel with every line, then one per calibrator with its band, FP32 in grey for comparison."""
    lines = {
        item.label: line
        for item in (outcome.fp32, *outcome.measured)
        if (line := _line(outcome, item.label, kind, drop)) is not None
    }
    looks = _looks([item.label for item in outcome.measured])
    grey = {"color": "0.35", "marker": "", "linestyle": "-", "linewidth": 2.0}
    rows = -(-(len(outcome.measured) + 1) // _PANELS)
    figure, axes = _figure(3.0 * _PANELS, 2.4 * rows + 0.6, _PANELS, rows)
    for label, line in lines.items():
        axes[0].plot(line.strength, line.value, markersize=3, **looks.get(label, grey))
    axes[0].set_title("all", fontsize=9)
    for panel, item in zip(axes[1:], outcome.measured, strict=False):
        line, look = lines[item.label], looks[item.label]
        if outcome.fp32.label in lines:
            reference = lines[outcome.fp32.label]
            panel.plot(reference.strength, reference.value, **grey)
        panel.plot(line.strength, line.value, markersize=4, **look)
        panel.fill_between(line.strength, line.low, line.high, color=look["color"], alpha=0.2, linewidth=0)
        panel.set_title(item.label, fontsize=9)
    for panel in axes[len(outcome.measured) + 1 :]:
        panel.set_axis_off()
    unit = ", points" if outcome.score.percent else ""
    against = "FP32 without shift" if outcome.score.own else "FP32 under the same shift"
    figure.supxlabel(_strength_label(outcome, kind), fontsize=10)
    figure.supylabel(f"drop of {outcome.score.name}{unit},\nagainst {against}", fontsize=10)
    return _png(figure)


@dataclass(frozen=True)
class _Line:
    strength: list[float]
    value: Any
    low: Any
    high: Any


def _line(outcome: Outcome, label: str, kind: str, drop: str) -> _Line | None:
    rows = [
        row
        for row in outcome.table
        if row["calibrator"] == label
        and row["shift"] in (CLEAN.kind, kind)
        and row["calibration_subset"] is None
        and row[drop] is not None
    ]
    if not rows:
        return None
    factor = 100.0 if outcome.score.percent else 1.0
    value, low, high = (factor * np.array([row[f"{drop}{end}"] for row in rows]) for end in ("", "_low", "_high"))
    return _Line([row["strength"] for row in rows], value, low, high)


def _strength_label(outcome: Outcome, kind: str) -> str:
    if kind != ACTIVATIONS:
        return f"{kind}, grade"
    absolute = outcome.document["config"]["shift_absolute"]
    unit = "absolute" if absolute else "in standard deviations of each tensor"
    return f"noise on activation outputs, {unit}"


def size_curves(outcome: Outcome) -> bytes | None:
    """Score against the number of calibration samples: mean over the subsets, and the worst and the best of them."""
    if not outcome.subsets:
        return None
    looks = _looks([item.label for item in outcome.measured])
    figure, (axes,) = _figure(8.5, 5.0)
    clean = [row for row in outcome.table if row["shift"] == CLEAN.kind]
    for item in outcome.measured:
        by_size: dict[int, list[float]] = {}
        for row in clean:
            if row["calibrator"] == item.label:
                by_size.setdefault(row["calibration_samples"], []).append(_score_of(row, outcome.score)[0])
        sizes = sorted(by_size)
        axes.plot(
            sizes, [np.mean(by_size[size]) for size in sizes], markersize=4, label=item.label, **looks[item.label]
        )
        axes.fill_between(
            sizes,
            [min(by_size[size]) for size in sizes],
            [max(by_size[size]) for size in sizes],
            color=looks[item.label]["color"],
            alpha=0.1,
            linewidth=0,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("calibration samples")
    axes.set_ylabel(_score_label(outcome.score))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _png(figure)
