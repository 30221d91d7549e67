"""A point of a search as the quantise stage's files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.artifact import SCALES
from pipeline.core.files import write_bytes, write_json
from pipeline.core.progress import SILENT, Progress
from pipeline.mixed.candidate import Network
from pipeline.mixed.repairs import Repairs, load_repairs, statistic_key
from pipeline.mixed.stage import REPAIRS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from calibrators import Calibrator, TensorStatistics
    from pipeline.config import PlacementConfig
    from pipeline.mixed.stage import MixedResult
    from pipeline.placement.plan import PlacementPlan
    from pipeline.quantize import QuantizeResult

__all__ = ["choose", "point_plan", "write_repaired"]

GIVEN_BACK = "mixed-precision"
"""In the place of a rule's name: of the nodes that the search gave back to float."""

_LARGEST_FILE = 2_000_000_000


def point_plan(
    result: MixedResult, model: Path, config: PlacementConfig, number: int | None = None
) -> PlacementPlan:
    """The placement of a point of the search; its decisions say of each node given back to float why it was.

    Args:
        model: what the point is made from, as for :func:`choose`.
        config: the placement that the search started from.

    Raises:
        InputError: there is no such point.
    """
    from pipeline.placement import make_plan

    plan = make_plan(model, result.placement(config, number))
    reasons = result.reasons(number)
    decisions = tuple(
        decision.model_copy(update={"rule": GIVEN_BACK, "reason": reasons[decision.node]})
        if decision.node in reasons
        else decision
        for decision in plan.decisions
    )
    return plan.model_copy(update={"decisions": decisions})


def choose(
    result: MixedResult,
    plan: PlacementPlan,
    model: Path,
    statistics: Mapping[str, TensorStatistics],
    calibrator: Calibrator,
    *,
    folder: Path,
    config: PlacementConfig,
    number: int | None = None,
    largest: Mapping[str, float] | None = None,
    progress: Progress = SILENT,
) -> QuantizeResult:
    """Quantise the network as a point of the search says: the quantise stage's files, in ``folder``.

    Args:
        result: of :func:`run`, with its folder.
        plan: the point's, from :func:`point_plan`.
        model, statistics: what the search was given; for an equalised point ``result.equalised_model`` and the
            statistics in ``result.equalised_statistics``.
        number: of the point; None: the one that was taken.
        largest: as for :func:`pipeline.quantize.run`.

    Raises:
        InputError: no such point, or the search's files are damaged.
    """
    from pipeline import quantize

    point = result.point(number)
    repairs = load_repairs(result.folder / REPAIRS) if point.repaired else Repairs()
    network = Network(model, config, statistics, calibrator)
    repaired = folder / "repaired.onnx"
    changed = write_repaired(network, plan, repairs, repaired)
    try:
        done = quantize.run(
            repaired if changed else model,
            plan,
            statistics,
            network.chosen(repairs),
            folder=folder,
            config=result.placement(config, number),
            largest=largest,
            progress=progress,
        )
    finally:
        for path in folder.glob("repaired.onnx*"):
            path.unlink()
    _name_calibrators(folder / SCALES, plan, repairs, statistics)
    return done


def write_repaired(network: Network, plan: PlacementPlan, repairs: Repairs, path: Path) -> bool:
    """Write the float model with the repairs of the nodes that ``plan`` quantises; False: there are none."""
    import onnx
    from onnx import numpy_helper

    places = {(point.node, point.input_index) for point in plan.weights}
    weights = {network.fp32.by_name[node].input[position] for node, position in places}
    changed = {name: values for name, values in repairs.weights.items() if name in weights}
    biased = {node: values for node, values in repairs.biases.items() if any(node == place[0] for place in places)}
    if not changed and not biased:
        return False
    model = onnx.load(network.model)
    added = []
    for node in model.graph.node:
        bias = biased.get(node.name)
        if bias is None:
            continue
        if len(node.input) > 2 and node.input[2] and _readers(model, node.input[2]) == 1:
            changed[node.input[2]] = bias
        else:
            name = f"{node.name}::bias"
            added.append(numpy_helper.from_array(bias, name))
            del node.input[2:]
            node.input.append(name)
    for tensor in model.graph.initializer:
        if tensor.name in changed:
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed[tensor.name]), tensor.name))
    model.graph.initializer.extend(added)
    path.parent.mkdir(parents=True, exist_ok=True)
    if model.ByteSize() > _LARGEST_FILE:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    else:
        write_bytes(path, model.SerializeToString())
    return True


def _readers(model: Any, name: str) -> int:
    return sum(list(node.input).count(name) for node in model.graph.node)


def _name_calibrators(
    path: Path, plan: PlacementPlan, repairs: Repairs, statistics: Mapping[str, TensorStatistics]
) -> None:
    """Let ``scales.json`` name the calibrator that a repaired range really comes from."""
    from pipeline.quantize import merge_tensors

    if not repairs.ranges:
        return
    groups: dict[str, list[Any]] = {}
    for point in plan.activations:
        groups.setdefault(point.tensor if point.group is None else f"group {point.group}", []).append(point)
    scales = json.loads(path.read_text())
    for members in groups.values():
        calibrated = [point.tensor for point in members if point.source is None]
        chosen = repairs.ranges.get(statistic_key(merge_tensors([statistics[name] for name in calibrated])))
        if chosen is not None:
            for point in members:
                scales["tensors"][point.tensor]["calibrator"] = chosen[0]
    write_json(path, scales)
