"""Heatmaps of layers against metrics and of layers against calibrators."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pipeline.core.files import write_bytes
from pipeline.reports.heatmap import heatmap_png
from pipeline.reports.tables import layer_summaries

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeline.errors.table import ErrorTable
    from pipeline.reports.tables import LayerSummary

__all__ = ["calibrator_heatmap", "metric_heatmap"]

Floats: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.float64]]"

# Title, the number that is printed, and the relative error it stands for, which gives the colour: 20 dB and a cosine of
# 0.995 both are 10 %. One colour scale then serves all columns.
_METRICS: tuple[tuple[str, Callable[[LayerSummary], float], Callable[[LayerSummary], float], str], ...] = (
    ("relative L2", lambda layer: layer.accumulated, lambda layer: layer.accumulated, ".4f"),
    ("worst\nsample", lambda layer: layer.accumulated_max, lambda layer: layer.accumulated_max, ".4f"),
    ("SQNR dB", lambda layer: layer.sqnr_db, lambda layer: layer.accumulated, ".1f"),
    ("cosine", lambda layer: layer.cosine, lambda layer: float(np.sqrt(np.maximum(0.0, 2 - 2 * layer.cosine))), ".5f"),
    ("local\nrelative L2", lambda layer: layer.local, lambda layer: layer.local, ".4f"),
    ("weights\nonly", lambda layer: layer.weights, lambda layer: layer.weights, ".4f"),
    ("activations\nonly", lambda layer: layer.activations, lambda layer: layer.activations, ".4f"),
    ("engine", lambda layer: layer.engine, lambda layer: layer.engine, ".4f"),
)


def metric_heatmap(path: Path, table: ErrorTable) -> None:
    """Write the layers x metrics map. Columns without any figure are left out; a missing figure is grey."""
    summaries = layer_summaries(table)
    columns = [metric for metric in _METRICS if any(np.isfinite(metric[2](layer)) for layer in summaries)]
    values = np.array([[metric[2](layer) for metric in columns] for layer in summaries]).reshape(
        len(summaries), len(columns)
    )
    texts = [[_text(metric[1](layer), metric[3]) for metric in columns] for layer in summaries]
    png = heatmap_png(
        values,
        [info.layer.node for info in table.layers],
        [metric[0] for metric in columns],
        colour_label="Relative L2 error, or the one it amounts to",
        title=f"Layers × metrics, mean over {len(table.samples)} samples",
        annotate=texts,
    )
    write_bytes(path, png)


def calibrator_heatmap(path: Path, table: ErrorTable) -> bool:
    """Write the quantised tensors x calibrators map; False (and no file) where no calibrators were compared."""
    if not table.calibrators:
        return False
    tensors = [name for name in table.activations if any(name in ranges for ranges in table.calibrators.values())]
    names = list(table.calibrators)
    values = np.array(
        [[table.calibrators[name].get(tensor, (0.0, np.nan))[1] for name in names] for tensor in tensors]
    ).reshape(len(tensors), len(names))
    png = heatmap_png(
        values,
        tensors,
        names,
        colour_label="Relative L2 error of the quantised tensor",
        title=f"Layers × calibrators, {len(table.samples)} samples",
        annotate=[[_text(value, ".4f") for value in row] for row in values],
    )
    write_bytes(path, png)
    return True


def _text(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else ""
