"""Figures for people: by operator type, worst layers first, and what a layer's own error comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pipeline.errors.table import ErrorTable

__all__ = ["LayerSummary", "OperatorRow", "layer_summaries", "operator_rows", "worst_first"]


@dataclass(frozen=True)
class OperatorRow:
    """Relative L2 error in per cent, over all layers of one operator type and the samples that have one."""

    op: str
    layers: int
    accumulated_mean: float
    accumulated_std: float
    accumulated_max: float
    local_mean: float
    local_std: float
    local_max: float


@dataclass(frozen=True)
class LayerSummary:
    """One layer over all samples. NaN: not measured, or does not apply: relative figures where FP32 is almost zero."""

    order: int
    """Position in the network."""
    accumulated: float
    accumulated_max: float
    sqnr_db: float
    """From the mean relative L2, so that one exact sample does not make it infinite."""
    cosine: float
    max_abs: float
    local: float
    local_max: float
    weights: float
    activations: float
    clipped_share: float
    clipping_error_share: float
    own_share: float
    """Share of the accumulated error energy that the layer alone would make: near 1 it causes, near 0 it inherits."""
    cause: str
    """Largest part of the layer's own error: ``weights``, ``clipping``, ``rounding``, or ``none``."""
    engine: float
    engine_int8: float
    almost_zero: int = 0
    """Samples in which FP32 is almost zero: the relative figures are without them."""


def operator_rows(table: ErrorTable) -> list[OperatorRow]:
    """One row per operator type, the largest mean local error first."""
    ops = np.array([info.layer.op for info in table.layers])
    rows = []
    for op in dict.fromkeys(ops.tolist()):
        chosen = ops == op
        accumulated = _per_cent(table, "relative_l2", chosen)
        local = _per_cent(table, "local_relative_l2", chosen)
        rows.append(OperatorRow(op, int(chosen.sum()), *accumulated, *local))
    return sorted(rows, key=lambda row: (-np.nan_to_num(row.local_mean), -row.accumulated_mean))


def _per_cent(
    table: ErrorTable, column: str, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> tuple[float, float, float]:
    values = table.columns.get(column)
    if values is None:
        return float("nan"), float("nan"), float("nan")
    values = values[chosen]
    values = values[np.isfinite(values)] * 100.0
    if not values.size:
        return float("nan"), float("nan"), float("nan")
    return float(values.mean()), float(values.std()), float(values.max())


def layer_summaries(table: ErrorTable) -> list[LayerSummary]:
    """One summary per layer, in network order."""
    means = {name: table.mean(name) for name in table.columns}
    nothing = np.full(len(table.layers), np.nan)

    def mean(name: str, row: int) -> float:
        return float(means.get(name, nothing)[row])

    accumulated_max, local_max = table.maximum("relative_l2"), table.maximum("local_relative_l2")
    largest = table.maximum("max_abs")
    energies = _energy(table, "relative_l2"), _energy(table, "local_relative_l2")
    zeros = table.almost_zero().sum(axis=1)
    summaries = []
    for row in range(len(table.layers)):
        accumulated = mean("relative_l2", row)
        weights, activations = mean("weights_relative_l2", row), mean("activations_relative_l2", row)
        clipping = mean("clipping_error_share", row)
        summaries.append(
            LayerSummary(
                order=row,
                accumulated=accumulated,
                accumulated_max=float(accumulated_max[row]),
                sqnr_db=float("inf") if accumulated == 0 else -20.0 * float(np.log10(accumulated)),
                cosine=mean("cosine", row),
                max_abs=float(largest[row]),
                local=mean("local_relative_l2", row),
                local_max=float(local_max[row]),
                weights=weights,
                activations=activations,
                clipped_share=mean("clipped_share", row),
                clipping_error_share=clipping,
                own_share=float(min(energies[1][row] / energies[0][row], 1.0))
                if energies[0][row] > 0
                else float("nan"),
                cause=_cause(weights, activations, clipping),
                engine=mean("engine_relative_l2", row),
                engine_int8=mean("engine_int8_relative_l2", row),
                almost_zero=int(zeros[row]),
            )
        )
    return summaries


def _energy(table: ErrorTable, column: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = table.columns.get(column)
    if values is None:
        return np.zeros(len(table.layers))
    return np.asarray(np.square(np.nan_to_num(values)).mean(axis=1) if values.shape[1] else np.zeros(len(values)))


def _cause(weights: float, activations: float, clipping_share: float) -> str:
    """Errors of weights and activations are independent, so their squares add up to the layer's own error."""
    weight_energy = np.nan_to_num(weights) ** 2
    activation_energy = np.nan_to_num(activations) ** 2
    clipping = activation_energy * np.nan_to_num(clipping_share)
    parts = {"weights": weight_energy, "clipping": clipping, "rounding": activation_energy - clipping}
    name = max(parts, key=lambda key: float(parts[key]))
    return name if parts[name] > 0 else "none"


def worst_first(summaries: list[LayerSummary], count: int) -> list[LayerSummary]:
    """The ``count`` layers that make the largest error themselves; by accumulated error where none was measured."""

    def key(summary: LayerSummary) -> float:
        return summary.local if np.isfinite(summary.local) else summary.accumulated

    return sorted(summaries, key=lambda summary: -np.nan_to_num(key(summary)))[:count]
