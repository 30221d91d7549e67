"""Stage 6, verify: the FP32 and the INT8 graph on held-aside samples, layer by layer, in onnxruntime.

Both graphs run on the same few samples at a time; the output of every quantised layer is compared and dropped. The INT8
graph runs without graph optimisation, as its Q/DQ nodes say and as TensorRT computes it. Its FP16 tensors are watched
for what would overflow on a card (:mod:`pipeline.overflow`).
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from pydantic import Field

from pipeline.core.errors import InputError
from pipeline.core.files import atomic_file, write_text
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.doubtful import FAR, almost_zero, known_range
from pipeline.errors.figures import LayerFigures, OutputFigures
from pipeline.errors.graphs import Graph, float_graph
from pipeline.errors.layers import layers_of_plan
from pipeline.errors.metrics import PEAK
from pipeline.errors.outputs import OutputErrors, TopOne
from pipeline.errors.scores import score_kinds
from pipeline.errors.streaming import LayerErrors, paired
from pipeline.overflow import HalfWatch
from pipeline.records import StageResult
from pipeline.reports.heatmap import error_heatmap
from pipeline.shared_scales import Drowned, Selections, describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import OrtReading
    from pipeline.errors.layers import Layer
    from pipeline.placement.plan import PlacementPlan

__all__ = ["ERRORS_CSV", "ERRORS_PNG", "SAMPLES_NPZ", "LayerFigures", "OutputFigures", "VerifyResult", "doubts", "run"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

ERRORS_CSV = "errors.csv"
ERRORS_PNG = "errors.png"
SAMPLES_NPZ = "samples.npz"
_WORST_LAYERS = 10
_SAMPLES_BYTES = 4 << 20
_SAMPLES_KEPT = 4


class VerifyResult(StageResult):
    """Figures of the verification. Files: ``errors.csv``, ``errors.png``, ``samples.npz``."""

    samples: int
    held_aside: bool
    """False: the samples were also calibrated on, so the figures flatter."""
    layers: int
    outputs: tuple[OutputFigures, ...]
    top1_fp32: float | None = None
    """Share of samples whose arg-max is their label; None without labels."""
    top1_int8: float | None = None
    worst: tuple[LayerFigures, ...] = Field(default=())
    """The layers of largest mean error, worst first; those without one last."""
    almost_zero_layers: dict[str, int] = Field(default_factory=dict)
    """Layer to the number of samples in which FP32 is almost zero there, where there are any."""

    drowned: tuple[Drowned, ...] = ()
    """Selections of INT8 tensors that mostly vanish in the scale of what they are selected from."""

    @property
    def top1_drop(self) -> float | None:
        """Top-1 lost, as a share: 0.01 is one point."""
        return None if self.top1_fp32 is None or self.top1_int8 is None else self.top1_fp32 - self.top1_int8


def run(
    fp32: Path,
    int8: Path,
    plan: PlacementPlan,
    batches: Iterable[Batch],
    *,
    folder: Path,
    labels: Mapping[int, int] | None = None,
    held_aside: bool = True,
    progress: Progress = SILENT,
    total: int | None = None,
) -> VerifyResult:
    """Compare ``int8`` with ``fp32`` on ``batches`` and write the reports into ``folder``.

    Args:
        plan: says which nodes are quantised; their first outputs are compared.
        labels: sample number to class, for top-1; every sample needs one.
        held_aside: whether the samples were kept out of the calibration (recorded).
        total: number of samples, for the progress bar.

    Raises:
        InputError: no samples, a tensor of the plan that a graph lacks, or labels that do not fit samples and classes.
        CheckFailed: a NaN or infinity in either graph, an FP16 tensor that overflows on a card, or outputs of different
            shape; the tensor is named.
    """
    graph = float_graph(fp32)
    layers = layers_of_plan(plan, graph)
    tensors = [layer.tensor for layer in layers]
    names = list(graph.outputs)
    quantized = Graph(int8)
    watch, selections = HalfWatch(graph, quantized), Selections(plan, graph, quantized)
    readings = watch.readings([*tensors, *names], fp32_only=selections.tensors)
    errors = LayerErrors(tensors)
    kinds = score_kinds(graph, labelled=labels is not None)
    outputs = {name: OutputErrors(name, known_range(graph, name), scores=kinds[name]) for name in names}
    top_one = TopOne(labels, kinds) if labels is not None else None
    kept: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    with progress.task("verifying", total=total, unit="samples") as task:
        for batch in batches:
            kept = kept or _sample_record(readings, batch, names)
            for part, reference, other in paired(readings, batch):
                watch.check(part, other)
                selections.add(reference)
                errors.add(part.samples, reference, other)
                for output in outputs.values():
                    output.add(part.samples, reference[output.name], other[output.name])
                if top_one is not None:
                    top_one.add(part.samples, reference, other)
                task.advance(len(part.samples))
    if not errors.samples:
        raise InputError("no samples to verify on", remedy="give more data, or fewer --samples to calibrate on")
    zero = almost_zero(errors.metric(PEAK), np.array([known_range(graph, name) for name in tensors]))
    values = np.where(zero, np.nan, errors.metric("relative_l2"))
    absolute = errors.metric("max_abs")
    figures = [_layer(*each) for each in zip(layers, values, absolute, strict=True)]
    _write_csv(folder / ERRORS_CSV, figures, errors.samples, values, absolute)
    error_heatmap(
        folder / ERRORS_PNG,
        values,
        [layer.node for layer in layers],
        errors.samples,
        title=f"INT8 against FP32: {len(layers)} quantised layers, {len(errors.samples)} samples",
    )
    with atomic_file(folder / SAMPLES_NPZ) as stream:
        np.savez_compressed(stream, **kept)  # type: ignore[arg-type]
    return VerifyResult(
        samples=len(errors.samples),
        held_aside=held_aside,
        layers=len(layers),
        outputs=tuple(output.figures() for output in outputs.values()),
        top1_fp32=top_one.reference if top_one else None,
        top1_int8=top_one.other if top_one else None,
        worst=tuple(sorted(figures, key=_worst_first)[:_WORST_LAYERS]),
        drowned=selections.drowned(),
        almost_zero_layers={layer.layer: layer.almost_zero for layer in figures if layer.almost_zero},
    ).at(folder)


def doubts(result: VerifyResult) -> Iterator[str]:
    """Sentences about tensors that vanish in a scale which they share, and about each output that is far from FP32 or
    almost zero there."""
    yield from describe(result.drowned)
    for output in result.outputs:
        if output.max_abs is None:
            continue
        if output.almost_zero:
            yield f"output {output.name!r}: {output.remark(result.samples)}"
        mean = output.relative_l2_mean
        said = []
        if mean is not None and mean > FAR:
            said.append(f"relative L2 {mean:.3g} in the mean, where 1 is as far as an output of zeros")
        if output.far:
            said.append(f"{output.far} of {result.samples} samples are mostly error")
        if said:
            yield (
                f"output {output.name!r} is far from FP32: {'; '.join(said)}; largest error {output.max_abs:.3g} "
                f"(sample {output.max_abs_sample}) of a range of {output.value_range:.3g}. Try another --calibrator or "
                "--min-sqnr 20dB; `quantize errors DIR` shows the layers that cause it"
            )


def _layer(layer: Layer, relative: Floats, absolute: Floats) -> LayerFigures:
    """Of the samples' relative errors, NaN where FP32 is almost zero, and absolute ones."""
    shown = relative[~np.isnan(relative)]
    return LayerFigures(
        layer=layer.tensor,
        node=layer.node,
        op=layer.op,
        relative_l2_mean=float(shown.mean()) if shown.size else None,
        relative_l2_max=float(shown.max()) if shown.size else None,
        max_abs=float(absolute.max()),
        almost_zero=relative.size - shown.size,
    )


def _worst_first(layer: LayerFigures) -> float:
    return 0.0 if layer.relative_l2_mean is None else -layer.relative_l2_mean


def _write_csv(
    path: Path, layers: list[LayerFigures], samples: list[int], relative: Floats, absolute: Floats
) -> None:
    """One row per layer and sample; no relative error where FP32 is almost zero."""
    import csv

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("layer", "node", "op", "sample", "relative_l2", "max_abs"))
    for layer, *rows in zip(layers, relative, absolute, strict=True):
        writer.writerows(
            (layer.layer, layer.node, layer.op, sample, "" if np.isnan(value) else f"{value:.8g}", f"{largest:.8g}")
            for sample, value, largest in zip(samples, *rows, strict=True)
        )
    write_text(path, stream.getvalue())


def _sample_record(
    readings: tuple[OrtReading, OrtReading], batch: Batch, names: list[str]
) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Inputs and both graphs' outputs for the first samples, for checks on the machine that serves.

    Keys: ``samples`` (numbers), ``inputs/NAME``, ``fp32/NAME``, ``int8/NAME``. As many samples of the first batch as
    fit the size limit, at least one; all of them where the model's batch is static.
    """
    count = len(batch.samples)
    if not readings[0].static_batch:
        per_sample = max(1, sum(values.nbytes for values in batch.feeds.values()) // count)
        count = int(min(count, _SAMPLES_KEPT, max(1, _SAMPLES_BYTES // per_sample)))
    feeds = {name: values[:count] for name, values in batch.feeds.items()}
    record: dict[str, np.ndarray[Any, np.dtype[Any]]] = {"samples": np.asarray(batch.samples[:count])}
    record.update({f"inputs/{name}": values for name, values in feeds.items()})
    for kind, reading in zip(("fp32", "int8"), readings, strict=True):
        values = reading.run(feeds)
        record.update({f"{kind}/{name}": values[name] for name in names})
    return record
