"""Stage 4, quantise: plan and statistics become the INT8 graph and its scales.

Everything written is a function of the model, the plan, the statistics and the calibrator: equal inputs give equal
bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.artifact import CALIBRATION_CACHE, INT8_MODEL, PLACEMENT, SCALES
from pipeline.core.errors import InputError
from pipeline.core.files import write_bytes, write_json
from pipeline.core.progress import SILENT, Progress
from pipeline.records import StageResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir
    from numpy.typing import NDArray

    from calibrators import Calibrator, TensorStatistics
    from pipeline.config import PlacementConfig
    from pipeline.placement.graph import GraphView
    from pipeline.placement.half import HalfResult
    from pipeline.placement.plan import ActivationPoint, PlacementPlan, WeightPoint

__all__ = ["SCHEMA", "QuantizeResult", "activation_ranges", "clipped_energy", "merge_tensors", "run"]

SCHEMA = 1
_LARGEST_FILE = 2_000_000_000
_EXTERNAL = INT8_MODEL + ".data"
_ALGORITHMS = {"minmax": "MinMaxCalibration"}
"""Name in the calibration cache's header by calibrator; all others appear as TensorRT's entropy."""
_LARGEST_CLIPPING = 0.1
"""Part of a tensor's energy that a calibrator may clip without a warning. Sound ranges lose below 0.03; the entropy
calibrator, which does not know what rare large values are for, can lose 0.4 and with it the network's answer."""
_GIVEN = "given"
"""In place of the calibrator's name, for scales that came with the model."""


class QuantizeResult(StageResult):
    """The INT8 graph. Files in :attr:`folder`: ``model.int8.onnx``, ``scales.json``, ``calibration.cache``,
    ``placement.json``."""

    tensors: tuple[str, ...]
    """Activations with a Q/DQ pair, in graph order."""
    weights: int
    """Quantised weight tensors."""
    quantized_nodes: int
    nodes: int
    fp16_io: tuple[str, ...] = ()
    """The graph's inputs and outputs that were made float16."""
    warnings: tuple[str, ...] = ()

    @property
    def model_path(self) -> Path:
        return self.folder / INT8_MODEL


def run(
    model: Path,
    plan: PlacementPlan,
    statistics: Mapping[str, TensorStatistics],
    calibrator: Calibrator,
    *,
    folder: Path,
    config: PlacementConfig,
    weights: Literal["float", "int8"] = "float",
    largest: Mapping[str, float] | None = None,
    progress: Progress = SILENT,
) -> QuantizeResult:
    """Quantise the prepared ``model`` by ``plan`` and write the stage's files into ``folder``.

    Args:
        statistics: of at least the tensors in ``plan.tensors``.
        config: its ``precision`` is the type of the part that stays float, ``fp16_io`` of inputs and outputs.
        weights: how quantised weights are stored, see :func:`pipeline.placement.insert.insert_pairs`.
        largest: tensor to the largest magnitude it has on data, for FP16: see :func:`pipeline.placement.half.to_half`.

    Raises:
        InputError: a statistic is missing, a weight is not finite, the plan belongs to another model, or the opset is
            below 13.
    """
    from calibrators.cache import write_cache
    from pipeline.calibrate import degenerate
    from pipeline.onnxgraph import drop_unused_initializers
    from pipeline.placement.existing import repair
    from pipeline.placement.graph import GraphView, load_graph
    from pipeline.placement.half import HalfResult, to_half
    from pipeline.placement.planner import plan_graph
    from pipeline.placement.registry import rules_in_force
    from pipeline.shared_scales import warnings_of

    loaded = load_graph(model)
    warnings: list[str] = []
    if plan.prequantized:
        warnings += repair(loaded)
        graph = GraphView(loaded)
        tensors, weight_records = _given_entries(graph), _given_weights(graph)
    else:
        graph = GraphView(loaded)
        ranges, warnings = activation_ranges(plan.activations, statistics, calibrator)
        warnings += warnings_of(
            plan,
            graph,
            statistics,
            ranges,
            calibrator,
            lambda nodes: plan_graph(
                graph,
                config.model_copy(update={"exclude": (*config.exclude, *nodes)}),
                rules_in_force(config.rules_off),
            ),
        )
        tensors = {point.tensor: _entry(point, ranges, statistics, calibrator) for point in plan.activations}
        weight_records = _insert(graph, plan, ranges, weights)
    half = HalfResult()
    if config.precision == "fp16" or config.fp16_io != "none":
        half = to_half(
            loaded,
            nodes=config.precision == "fp16",
            inputs=config.fp16_io in ("inputs", "both"),
            outputs=config.fp16_io in ("outputs", "both"),
            largest=largest,
        )
        progress.note(f"{len(half.converted)} float nodes compute in FP16, {half.casts} casts")
        warnings += _unmet(config, half)
    drop_unused_initializers(loaded)  # what repairs, INT8 weights and FP16 took the place of
    folder.mkdir(parents=True, exist_ok=True)
    _save(loaded, folder)
    write_json(folder / SCALES, {"schema": SCHEMA, "tensors": tensors, "weights": weight_records})
    scales = {name: entry["scale"] for name, entry in tensors.items()}
    algorithm = _ALGORITHMS.get(calibrator.name, "EntropyCalibration2")
    write_cache(folder / CALIBRATION_CACHE, scales, algorithm=algorithm)
    types = {"precision": config.precision, "fp16": list(half.converted), "not_fp16": half.kept}
    write_json(folder / PLACEMENT, {"schema": SCHEMA, **types, **plan.model_dump(mode="json")})
    quantized = len(plan.quantized_nodes)
    if not quantized:
        warnings.append("no node is quantised, so nothing gains from INT8; `quantize explain` says why for each")
    progress.note(
        f"{quantized} of {len(plan.decisions)} nodes quantised, {len(tensors)} activation scales, "
        f"{len(weight_records)} weights"
    )
    known = degenerate({name: statistics[name] for name in plan.tensors if name in statistics})
    for text in warnings:
        if text not in known:  # the calibrate stage has said it
            progress.warn(text)
    return QuantizeResult(
        tensors=tuple(tensors),
        weights=len(weight_records),
        quantized_nodes=quantized,
        nodes=len(plan.decisions),
        fp16_io=(*half.inputs, *half.outputs),
        warnings=tuple(warnings),
    ).at(folder)


def _unmet(config: PlacementConfig, half: HalfResult) -> list[str]:
    """A warning for what was asked to be float16 and is not there."""
    return [
        f"--fp16-io {config.fp16_io}: no float32 {kind[:-1]} of this model can be float16, its {kind} stay as they are"
        for kind, names in (("inputs", half.inputs), ("outputs", half.outputs))
        if config.fp16_io in (kind, "both") and not names
    ]


def activation_ranges(
    points: Sequence[ActivationPoint], statistics: Mapping[str, TensorStatistics], calibrator: Calibrator
) -> tuple[dict[str, float], list[str]]:
    """The amax of every point, and a warning for each degenerate tensor.

    Points of one group get one amax, from their statistics merged. A known range of the whole group limits it.

    Raises:
        InputError: a tensor to calibrate has no statistic.
    """
    from calibrators import resolve_amax

    groups: dict[str, list[ActivationPoint]] = {}
    for point in points:
        groups.setdefault(point.tensor if point.group is None else f"group {point.group}", []).append(point)
    ranges: dict[str, float] = {}
    warnings = []
    for members in groups.values():
        calibrated = [point.tensor for point in members if point.source is None]
        if missing := [name for name in calibrated if name not in statistics]:
            raise InputError(
                f"no calibration statistics of the tensor {missing[0]!r} ({len(missing)} missing)",
                remedy="calibrate again with this placement",
            )
        merged = merge_tensors([statistics[name] for name in calibrated])
        amax, warning = resolve_amax(merged, calibrator)
        known = [point.known_amax for point in members]
        if all(value is not None for value in known):
            amax = min(amax, max(value for value in known if value is not None))
        if warning is not None:
            warnings.append(f"{' + '.join(calibrated)}: {warning}")
        if (lost := clipped_energy(merged, amax)) > _LARGEST_CLIPPING:
            warnings.append(
                f"{' + '.join(calibrated)}: {calibrator.name} clips at {amax:.4g}, the values reach {merged.amax:.4g}: "
                f"{100.0 * lost:.0f} % of the signal is lost; another calibrator (percentile, mse) keeps it"
            )
        ranges.update({point.tensor: amax for point in members})
    return {point.tensor: ranges[point.tensor] for point in points}, warnings


def clipped_energy(stats: TensorStatistics, amax: float) -> float:
    """Squared error of clipping to [-amax, amax], relative to the sum of squares (0..1), from the histogram."""
    used = np.flatnonzero(stats.bins)
    if not used.size:
        return 0.0
    counts = stats.bins[used].astype(np.float64)
    magnitude = (used + 0.5) * stats.width
    return float((counts * np.maximum(magnitude - amax, 0.0) ** 2).sum() / (counts * magnitude**2).sum())


def merge_tensors(parts: Sequence[TensorStatistics]) -> TensorStatistics:
    """The statistic of several tensors' values together, as if they were one tensor in every batch.

    Histogram, extremes and counts are exact. A batch's amax is the greatest of the parts'; so are its percentiles,
    which bound the percentile of the union from above.
    """
    from dataclasses import replace

    from calibrators import TensorStatistics

    if len(parts) == 1:
        return parts[0]
    empty = TensorStatistics()
    merged = empty
    amax: dict[int, np.float32] = {}
    percentiles: dict[int, NDArray[np.float64]] = {}
    for part in parts:
        whole = replace(
            part, batch_index=empty.batch_index, batch_amax=empty.batch_amax, batch_percentiles=empty.batch_percentiles
        )
        merged = merged.merge(whole)
        for index, value, row in zip(part.batch_index.tolist(), part.batch_amax, part.batch_percentiles, strict=True):
            amax[index] = max(amax.get(index, np.float32(0.0)), value)
            percentiles[index] = np.maximum(percentiles[index], row) if index in percentiles else row
    order = sorted(amax)
    return replace(
        merged,
        batch_index=np.array(order, np.int64),
        batch_amax=np.array([amax[index] for index in order], np.float32),
        batch_percentiles=np.array([percentiles[index] for index in order], np.float64).reshape(len(order), -1),
    )


def _entry(
    point: ActivationPoint,
    ranges: Mapping[str, float],
    statistics: Mapping[str, TensorStatistics],
    calibrator: Calibrator,
) -> dict[str, Any]:
    from calibrators import scale_of

    found = statistics[point.source or point.tensor]
    low, high = (found.minimum, found.maximum) if found.finite else (0.0, 0.0)
    amax = ranges[point.tensor]
    return {
        "amax": float(amax),
        "scale": float(scale_of(amax)),
        "calibrator": calibrator.name,
        "samples": int(found.elements),
        "min": float(low),
        "max": float(high),
        "zeros": int(found.zeros),
    }


def _given_entries(graph: GraphView) -> dict[str, dict[str, Any]]:
    from pipeline.placement.given import given_scales

    return {
        name: {
            "amax": scale * 127.0, "scale": scale, "calibrator": _GIVEN, "samples": 0,
            "min": -scale * 127.0, "max": scale * 127.0, "zeros": 0,
        }
        for name, scale in given_scales(graph).items()
    }  # fmt: skip


def _given_weights(graph: GraphView) -> dict[str, dict[str, Any]]:
    from pipeline.placement.given import given_weights

    records: dict[str, dict[str, Any]] = {}
    for weight in given_weights(graph):
        scale = weight.scale.astype(np.float64)
        records[_free_name(weight.point, records)] = {
            "node": weight.point.node,
            "input": weight.point.input_index,
            "axis": weight.point.axis,
            "amax": (scale * 127.0).tolist(),
            "scale": scale.tolist(),
        }
    return records


def _free_name(point: WeightPoint, records: Mapping[str, object]) -> str:
    """Of a weight that several nodes read, each but the first one with its node."""
    return point.tensor if point.tensor not in records else f"{point.tensor} ({point.node})"


def _insert(
    graph: GraphView, plan: PlacementPlan, ranges: Mapping[str, float], weights: Literal["float", "int8"]
) -> dict[str, dict[str, Any]]:
    from calibrators import scale_of
    from pipeline.placement.insert import insert_pairs
    from pipeline.placement.weights import weight_amax, weight_scales

    scales = {}
    records: dict[str, dict[str, Any]] = {}
    for point in plan.weights:
        node = graph.by_name.get(point.node)
        array = (
            graph.array(node.inputs[point.input_index])
            if node is not None and point.input_index < len(node.inputs)
            else None
        )
        if array is None:
            raise InputError(
                f"the placement plan quantises input {point.input_index} of node {point.node!r}, which is no "
                f"constant of this graph",
                remedy="make the plan from this model",
            )
        amax = weight_amax(array, point.axis, point.tensor)
        scale = weight_scales(amax)
        scales[point.node, point.input_index] = scale
        records[_free_name(point, records)] = {
            "node": point.node,
            "input": point.input_index,
            "axis": point.axis,
            "amax": amax.reshape(-1).tolist(),
            "scale": scale.reshape(-1).tolist(),
        }
    insert_pairs(graph, plan, {name: scale_of(amax) for name, amax in ranges.items()}, scales, weights=weights)
    return records


def _save(model: ir.Model, folder: Path) -> None:
    import onnx_ir as ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if size > _LARGEST_FILE:
        ir.save(model, folder / INT8_MODEL, external_data=_EXTERNAL)
    else:
        write_bytes(folder / INT8_MODEL, ir.to_proto(model).SerializeToString(deterministic=True))
