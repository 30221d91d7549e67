"""The whole measurement: FP32, Q/DQ graph and engine on the same samples, local errors, clipping and rounding.

One pass over the data, a few samples at a time; kept are the figures only (about 150 bytes per layer and sample).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.activations import ActivationFigures, quantisation_energy, sweep_activation
from pipeline.errors.capture import float_and_int8
from pipeline.errors.doubtful import known_range
from pipeline.errors.engine_errors import EngineErrors
from pipeline.errors.graphs import Graph
from pipeline.errors.local import LocalLayer, cut_layer
from pipeline.errors.metrics import METRICS, PEAK, PairSums, rows_per_sample, warm_up
from pipeline.errors.neighbours import neighbours
from pipeline.errors.outputs import OutputErrors, TopOne
from pipeline.errors.scores import score_kinds
from pipeline.errors.streaming import compared, paired
from pipeline.errors.table import COLUMNS, ErrorTable, LayerInfo
from pipeline.errors.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays, EngineSource
    from pipeline.errors.figures import OutputFigures
    from pipeline.errors.layers import Layer

__all__ = ["Measurement", "measure"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class Measurement:
    """Result of :func:`measure`: the table, and the graph's outputs."""

    def __init__(self, table: ErrorTable, outputs: Mapping[str, OutputFigures], top_one: TopOne | None) -> None:
        self.table = table
        self.outputs = dict(outputs)
        self.top_one = top_one


def measure(
    fp32: Graph,
    int8: Graph,
    layers: Sequence[Layer],
    batches: Iterable[Batch],
    *,
    engine: EngineSource | None = None,
    calibrated: Mapping[str, Mapping[str, float]] | None = None,
    labels: Mapping[int, int] | None = None,
    progress: Progress = SILENT,
    total: int | None = None,
) -> Measurement:
    """Measure every layer on every sample.

    Args:
        fp32: without Q/DQ nodes, see :func:`pipeline.errors.graphs.float_graph`.
        layers: in network order.
        engine: a third reading; tensors it does not give are reported as fused.
        calibrated: calibrator name to tensor to amax, for the comparison of calibrators.
        labels: sample number to class.
        total: number of samples, for the progress bar.

    Raises:
        InputError: no samples, a layer or tensor that a graph lacks, an engine that shows none of the tensors, or
            labels that do not fit.
        CheckFailed: a NaN or infinity, or shapes that differ between readings; the tensor is named.
    """
    cuts = [cut_layer(layer, fp32, int8) for layer in layers]
    run = _Run(fp32, int8, layers, cuts, calibrated or {}, engine, labels)
    readings = float_and_int8(fp32, int8, run.tensors, fp32_only=run.feeds)
    with progress.task("measuring layers", total=total, unit="samples") as task:
        for batch in batches:
            for part, reference, other in paired(readings, batch):
                run.add(part, reference, other)
                task.advance(len(part.samples))
    return run.result(int8)


class _Run:
    """The state of one pass."""

    def __init__(
        self,
        fp32: Graph,
        int8: Graph,
        layers: Sequence[Layer],
        cuts: Sequence[LocalLayer],
        calibrated: Mapping[str, Mapping[str, float]],
        engine: EngineSource | None,
        labels: Mapping[int, int] | None,
    ) -> None:
        self.layers = tuple(layers)
        self.cuts = tuple(cuts)
        self.engine = None if engine is None else EngineErrors(engine, [layer.tensor for layer in layers], int8)
        self.samples: list[int] = []
        self.blocks: list[dict[str, Floats]] = []
        self.workers = Workers()
        warm_up()
        sweep_activation(np.zeros((1, 1), np.float32), 1.0)
        self.scales = {point.tensor: point.scale for cut in cuts for point in cut.inputs}
        self.activations = {name: ActivationFigures(name, scale * 127.0) for name, scale in self.scales.items()}
        self.calibrated = {
            name: {tensor: amax for tensor, amax in ranges.items() if tensor in self.scales}
            for name, ranges in calibrated.items()
        }
        self.calibrator_energy = {name: dict.fromkeys(ranges, 0.0) for name, ranges in self.calibrated.items()}
        self.fp32 = fp32
        kinds = score_kinds(fp32, labelled=labels is not None)
        self.outputs = {name: OutputErrors(name, known_range(fp32, name), scores=kinds[name]) for name in kinds}
        self.top_one = TopOne(labels, kinds) if labels is not None else None
        fed = [name for cut in cuts for name in cut.feeds]
        self.layer_tensors = [layer.tensor for layer in layers]
        shown = () if self.engine is None else self.engine.tensors
        self.tensors = list(dict.fromkeys([*self.layer_tensors, *fp32.outputs, *shown]))
        self.feeds = [name for name in dict.fromkeys([*fed, *self.scales]) if name not in self.tensors]

    def add(self, part: Batch, reference: Arrays, other: Arrays) -> None:
        samples = part.samples
        block = {name: np.full((len(self.layers), len(samples)), np.nan) for name in COLUMNS}
        accumulated = self.workers.map(
            lambda name: compared(name, reference[name], other[name], samples),
            self.layer_tensors,
            values=sum(reference[name].size for name in self.layer_tensors),
        )
        for row, sums in enumerate(accumulated):
            _fill(block, row, "", sums)
            block[PEAK][row] = sums.peak
        energies = self._activations(reference, samples)
        for row, cut in enumerate(self.cuts):
            self._local(block, row, cut, reference, samples)
            self._shares(block, row, cut, energies)
        for output in self.outputs.values():
            output.add(samples, reference[output.name], other[output.name])
        if self.top_one is not None:
            self.top_one.add(samples, reference, other)
        if self.engine is not None:
            self.engine.add(block, part, reference, other)
        self.samples.extend(samples)
        self.blocks.append(block)

    def _local(
        self, block: dict[str, Floats], row: int, cut: LocalLayer, reference: Arrays, samples: Sequence[int]
    ) -> None:
        tensor = cut.layer.tensor
        values = cut.run(reference)
        found = self.workers.map(
            lambda array: compared(tensor, reference[tensor], array, samples, label="INT8 alone"),
            list(values.values()),
            values=reference[tensor].size * len(values),
        )
        sums = dict(zip(values, found, strict=True))
        _fill(block, row, "local_", sums["local"])
        if cut.quantised_weights:
            block["weights_relative_l2"][row] = sums.get("weights", sums["local"]).relative_l2
        if cut.inputs:
            block["activations_relative_l2"][row] = sums.get("activations", sums["local"]).relative_l2

    def _activations(self, reference: Arrays, samples: Sequence[int]) -> dict[str, Floats]:
        """Clipping and rounding of every quantised tensor: sums of shape (samples, 6), as of ``sweep_activation``."""

        def one(tensor: str) -> Floats:
            rows = rows_per_sample(reference[tensor], len(samples))
            values = np.ascontiguousarray(reference[tensor].reshape(1, -1), np.float32) if rows is None else rows
            sums, histogram = sweep_activation(values, self.scales[tensor])
            self.activations[tensor].add(sums, histogram)
            names = [name for name, ranges in self.calibrated.items() if tensor in ranges]
            energy = quantisation_energy(values, [self.calibrated[name][tensor] / 127.0 for name in names]).sum(axis=0)
            for name, value in zip(names, energy, strict=True):
                self.calibrator_energy[name][tensor] += float(value)
            sums = np.repeat(sums, len(samples), axis=0) if rows is None else sums
            return np.column_stack([sums, np.full(len(samples), values.shape[1])])

        size = sum(reference[tensor].size for tensor in self.scales)
        return dict(zip(self.scales, self.workers.map(one, list(self.scales), values=size), strict=True))

    def _shares(self, block: dict[str, Floats], row: int, cut: LocalLayer, energies: Mapping[str, Floats]) -> None:
        if not cut.inputs:
            return
        total = np.sum([energies[point.tensor] for point in cut.inputs], axis=0)
        error = total[:, 1] + total[:, 2]
        block["clipped_share"][row] = total[:, 0] / np.maximum(total[:, 6], 1)
        block["clipping_error_share"][row] = np.divide(total[:, 1], error, out=np.zeros_like(error), where=error > 0)

    def result(self, int8: Graph) -> Measurement:
        if not self.samples:
            raise InputError("no samples to measure on", remedy="give data with --data")
        if self.engine is not None and not self.engine.samples:
            raise InputError(
                f"{self.engine.label} has no tensor of any of these samples", remedy="record it on the same samples"
            )
        columns = {name: np.concatenate([block[name] for block in self.blocks], axis=1) for name in COLUMNS}
        if self.engine is None:
            columns = {name: values for name, values in columns.items() if not name.startswith("engine_")}
        around = neighbours(int8, self.layers)
        infos = tuple(
            LayerInfo(
                layer=layer,
                inputs=tuple(point.tensor for point in cut.inputs),
                before=around[layer.tensor].before,
                after=around[layer.tensor].after,
                engine="" if self.engine is None else self.engine.state(layer.tensor),
                known_range=known_range(self.fp32, layer.tensor),
            )
            for layer, cut in zip(self.layers, self.cuts, strict=True)
        )
        calibrators = {
            name: {tensor: (self.calibrated[name][tensor], self._calibrator_error(name, tensor)) for tensor in ranges}
            for name, ranges in self.calibrated.items()
        }
        table = ErrorTable(
            layers=infos,
            samples=tuple(self.samples),
            columns=columns,
            activations=self.activations,
            calibrators=calibrators,
            engine_label="" if self.engine is None else self.engine.label,
            engine_recorded="" if self.engine is None else self.engine.recorded,
        )
        figures = {name: output.figures() for name, output in self.outputs.items()}
        return Measurement(table.without_almost_zero(), figures, self.top_one)

    def _calibrator_error(self, name: str, tensor: str) -> float:
        energy = self.activations[tensor].energy
        return float(np.sqrt(self.calibrator_energy[name][tensor] / energy)) if energy else 0.0


def _fill(block: dict[str, Floats], row: int, prefix: str, sums: PairSums) -> None:
    for name in METRICS:
        block[f"{prefix}{name}"][row] = sums.metric(name)
