"""QAT against PTQ: what of the difference comes from the weights, the ranges and the placement.

Two Q/DQ graphs of one network differ in three ways: the weights (training moved them), the activation ranges, and which
inputs are quantised. All eight mixtures are built and measured against the FP32 network; the difference of a figure
between the two graphs is shared out by Shapley's rule: a factor's part is the change it makes when it is switched over,
averaged over all orders of switching. The three parts add up to the whole difference exactly.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.capture import OrtReading
from pipeline.errors.doubtful import known_range
from pipeline.errors.hybrid import Quantisation, hybrid, quantisation_of
from pipeline.errors.matching import match_nodes
from pipeline.errors.outputs import OutputErrors, TopOne
from pipeline.errors.scores import score_kinds
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeline.data.batching import Batch
    from pipeline.errors.graphs import Graph

__all__ = ["FACTORS", "Attribution", "LayerComparison", "attribute", "compare_layers", "shapley"]

FACTORS = ("weights", "ranges", "placement")
ABSOLUTE = "largest absolute error"
"""Stands in for relative L2 where FP32 is almost zero in all samples."""


class LayerComparison(Record):
    """One node in both graphs."""

    node: str
    op: str
    weights_change: float | None
    """‖w_QAT − w_PTQ‖ / ‖w_PTQ‖ of the dequantised weights; None without weights in INT8 on both sides."""
    range_ratio: float | None
    """QAT scale over PTQ scale of the first activation input quantised in both; None where there is none."""
    placement: str
    """``both``, ``QAT only``, ``PTQ only`` (or ``differs``: other inputs of the node are quantised)."""


class Attribution(Record):
    """Figures of both graphs against the FP32 network, and the parts of their difference."""

    figures: dict[str, tuple[float, float]]
    """Figure to its value for PTQ and for QAT: ``relative L2`` (mean at the first output), ``agreement``, ``top-1``."""
    parts: dict[str, dict[str, float]]
    """Figure to factor to its part of the difference QAT − PTQ."""
    layers: tuple[LayerComparison, ...]

    def sentences(self) -> list[str]:
        """One line per figure."""
        lines = []
        for name, (ptq, qat) in self.figures.items():
            form = ".3g" if name == ABSOLUTE else ".4f"
            parts = ", ".join(f"{factor} {self.parts[name][factor]:+{form}}" for factor in FACTORS)
            lines.append(f"{name}: PTQ {ptq:{form}}, QAT {qat:{form}}, difference {qat - ptq:+{form}} = {parts}")
        return lines


def shapley(values: Mapping[frozenset[str], float]) -> dict[str, float]:
    """Each factor's part of ``values[all] - values[none]``; ``values`` has every subset of :data:`FACTORS`."""
    parts = dict.fromkeys(FACTORS, 0.0)
    orders = list(permutations(FACTORS))
    for order in orders:
        switched: frozenset[str] = frozenset()
        for factor in order:
            after = switched | {factor}
            parts[factor] += (values[after] - values[switched]) / len(orders)
            switched = after
    return parts


def attribute(
    fp32: Graph,
    ptq: Graph,
    qat: Graph,
    batches: Iterable[Batch],
    *,
    labels: Mapping[int, int] | None = None,
    progress: Progress = SILENT,
    total: int | None = None,
) -> Attribution:
    """Compare two Q/DQ graphs of the network ``fp32``.

    Raises:
        InputError: ``qat`` has no Q/DQ nodes or is another network; no samples; labels that do not fit.
        CheckFailed: a NaN or infinity in an output.
    """
    if not qat.has_qdq:
        raise InputError("the QAT graph has no Q/DQ nodes", remedy="export it with its fake quantisers as Q/DQ")
    sides = (quantisation_of(ptq), quantisation_of(qat, match_nodes(fp32, qat)))
    subsets = [frozenset(f for bit, f in enumerate(FACTORS) if number >> bit & 1) for number in range(8)]
    names = list(fp32.outputs)

    def mixture(switched: frozenset[str]) -> Any:
        pick = {factor: sides[int(factor in switched)] for factor in FACTORS}
        return hybrid(fp32, placement=pick["placement"], ranges=pick["ranges"], weights=pick["weights"])

    reference = OrtReading(fp32.proto, names, label="the FP32 graph", optimise=True, external_data_dir=fp32.folder)
    readings = {
        switched: OrtReading(mixture(switched), names, label="a mixture of both graphs", optimise=False)
        for switched in subsets
    }
    kinds = score_kinds(fp32, labelled=labels is not None)
    first, at_least = names[0], known_range(fp32, names[0])
    errors = {switched: OutputErrors(first, at_least, scores=kinds[first]) for switched in subsets}
    top = {switched: TopOne(labels, kinds) for switched in subsets} if labels is not None else {}
    seen = 0
    with progress.task("comparing QAT with PTQ", total=total, unit="samples") as task:
        for batch in batches:
            wanted = reference(batch)
            for switched in subsets:
                found = readings[switched](batch)
                errors[switched].add(batch.samples, wanted[first], found[first])
                if top:
                    top[switched].add(batch.samples, wanted, found)
            seen += len(batch.samples)
            task.advance(len(batch.samples))
    if not seen:
        raise InputError("no samples to compare on", remedy="give data with --data")
    figures: dict[str, dict[frozenset[str], float]] = {}
    results = {switched: errors[switched].figures() for switched in subsets}
    for title, key in (("relative L2", "relative_l2_mean"), (ABSOLUTE, "max_abs"), ("agreement", "agreement")):
        values = {switched: getattr(results[switched], key) for switched in subsets}
        if all(value is not None for value in values.values()):
            figures[title] = values
    if "relative L2" in figures:
        del figures[ABSOLUTE]
    if top:
        figures["top-1"] = {switched: top[switched].other for switched in subsets}
    nothing, everything = frozenset[str](), frozenset(FACTORS)
    return Attribution(
        figures={name: (values[nothing], values[everything]) for name, values in figures.items()},
        parts={name: shapley(values) for name, values in figures.items()},
        layers=compare_layers(fp32, *sides),
    )


def compare_layers(fp32: Graph, ptq: Quantisation, qat: Quantisation) -> tuple[LayerComparison, ...]:
    """Every node that either side quantises, in graph order."""
    rows = []
    for node in fp32.nodes:
        places = [(node.name, position) for position in range(len(node.input))]
        ours = {place for place in places if place in ptq.scales or place in ptq.weights}
        theirs = {place for place in places if place in qat.scales or place in qat.weights}
        if not ours and not theirs:
            continue
        weights = next((place for place in places if place in ptq.weights and place in qat.weights), None)
        scale = next((place for place in places if place in ptq.scales and place in qat.scales), None)
        rows.append(
            LayerComparison(
                node=node.name,
                op=node.op_type,
                weights_change=None if weights is None else _change(ptq.weights[weights], qat.weights[weights]),
                range_ratio=None if scale is None else qat.scales[scale] / ptq.scales[scale],
                placement="both"
                if ours == theirs
                else "QAT only"
                if not ours
                else "PTQ only"
                if not theirs
                else "differs",
            )
        )
    return tuple(rows)


def _change(before: np.ndarray[Any, np.dtype[Any]], after: np.ndarray[Any, np.dtype[Any]]) -> float:
    norm = float(np.linalg.norm(before.astype(np.float64)))
    change = float(np.linalg.norm(after.astype(np.float64) - before.astype(np.float64)))
    return change / norm if norm else float(change > 0)
