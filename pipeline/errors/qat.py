"""A graph from quantisation-aware training beside a PTQ artifact of the same network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.attribution import FACTORS, Attribution, attribute
from pipeline.errors.graphs import Graph, float_graph
from pipeline.errors.layers import layers_of_graph
from pipeline.errors.matching import match_nodes
from pipeline.errors.measure import measure

if TYPE_CHECKING:
    from pipeline.errors.opening import ChosenData, Opened
    from pipeline.errors.table import ErrorTable

__all__ = ["QatComparison", "compare_with_qat"]


@dataclass(frozen=True)
class QatComparison:
    """Both sides, layer by layer, and what the difference comes from."""

    attribution: Attribution
    ptq: dict[str, tuple[float, float]]
    """Node of the PTQ graph to its mean local and accumulated relative L2 error; NaN: not quantised."""
    qat: dict[str, tuple[float, float]]
    """The same of the QAT graph against its own float form, filed under the PTQ graph's node names."""

    def sections(self) -> list[dict[str, Any]]:
        """Two tables for the report page."""
        figures = self.attribution.figures
        parts = self.attribution.parts
        whole = {
            "title": "QAT against PTQ",
            "text": "Both graphs against the FP32 network; the difference is shared out among what the two do"
            " differently (Shapley's rule over the eight mixtures of both graphs).",
            "columns": ["figure", "PTQ", "QAT", "difference", *(f"by {factor}" for factor in FACTORS)],
            "rows": [
                [name, ptq, qat, qat - ptq, *(parts[name][factor] for factor in FACTORS)]
                for name, (ptq, qat) in figures.items()
            ],
        }
        rows = []
        for layer in self.attribution.layers:
            ptq, qat = self.ptq.get(layer.node, _NOTHING), self.qat.get(layer.node, _NOTHING)
            values = [_shown(value) for value in (ptq[0], qat[0], ptq[1], qat[1])]
            rows.append([layer.node, layer.op, *values, layer.weights_change, layer.range_ratio, layer.placement])
        layers = {
            "title": "QAT against PTQ, layer by layer",
            "text": "Relative L2 errors, each graph against its own float form; change of the dequantised weights;"
            " QAT range over PTQ range; which graph quantises the layer.",
            "columns": [
                "layer", "operator", "PTQ local", "QAT local", "PTQ accumulated", "QAT accumulated", "weights change",
                "range ratio", "placement",
            ],
            "rows": rows,
        }  # fmt: skip
        return [whole, layers]


_NOTHING = (float("nan"), float("nan"))


def _shown(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def compare_with_qat(
    opened: Opened, ptq: ErrorTable, qat: Path, chosen: ChosenData, *, progress: Progress = SILENT
) -> QatComparison:
    """Measure ``qat`` like the artifact and attribute the difference.

    Args:
        ptq: the artifact's own measurement.

    Raises:
        InputError: ``qat`` is unreadable, has no Q/DQ nodes, takes other inputs, or is another network.
    """
    graph = Graph(qat)
    if set(graph.inputs) != set(opened.fp32.inputs):
        raise InputError(
            f"{qat} has the inputs {sorted(graph.inputs)}, the artifact's model {sorted(opened.fp32.inputs)}",
            remedy="export both with the same input names",
        )
    attribution = attribute(
        opened.fp32,
        opened.int8,
        graph,
        chosen.read(),
        labels=chosen.labels,
        progress=progress,
        total=chosen.total,
    )
    names = match_nodes(opened.fp32, graph)
    own = measure(
        float_graph(graph.proto), graph, layers_of_graph(graph), chosen.read(), progress=progress, total=chosen.total
    )
    return QatComparison(
        attribution=attribution,
        ptq=_by_node(ptq, None),
        qat=_by_node(own.table, names),
    )


def _by_node(table: ErrorTable, names: dict[str, str] | None) -> dict[str, tuple[float, float]]:
    local, accumulated = table.mean("local_relative_l2"), table.mean("relative_l2")
    found = {}
    for row, info in enumerate(table.layers):
        name = info.layer.node if names is None else names.get(info.layer.node)
        if name is not None:
            found[name] = (float(local[row]), float(accumulated[row]))
    return found
