"""The mixed-precision stage: search once, build any of the points that were measured.

:func:`run` searches and writes ``pareto.json``, ``pareto.png``, ``repairs.npz``; :func:`pipeline.mixed.choose`
quantises the network as one of its points says. ``evaluations.json`` holds every measurement, so that a killed search
goes on from there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.accuracy import Target
from pipeline.artifact import CALIBRATION
from pipeline.core.errors import InputError
from pipeline.core.files import write_json
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.graphs import MOVEMENT
from pipeline.mixed.candidate import Candidate, Network
from pipeline.mixed.cost import node_costs
from pipeline.mixed.equalising import equalised_network
from pipeline.mixed.evaluate import Evaluator, Memory
from pipeline.mixed.pareto import Point, pareto_plot, pareto_points
from pipeline.mixed.repairing import RepairRecord, find_repairs
from pipeline.mixed.repairs import Repairs, save_repairs
from pipeline.mixed.search import Checked, Sensitivity, make_units, search, sensitivities
from pipeline.records import StageResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from calibrators import Calibrator, TensorStatistics
    from pipeline.config import PlacementConfig
    from pipeline.data.batching import Batch
    from pipeline.mixed.borders import Passes
    from pipeline.placement.plan import PlacementPlan

__all__ = ["EQUALISED", "EVALUATIONS", "PARETO_JSON", "PARETO_PNG", "REPAIRS", "MixedResult", "run"]

PARETO_JSON = "pareto.json"
PARETO_PNG = "pareto.png"
REPAIRS = "repairs.npz"
EQUALISED = "equalised"
"""Folder of the equalised float model and its statistics, where a point is made from them."""
EVALUATIONS = "evaluations.json"


class MixedResult(StageResult):
    """What the search found. Files: ``pareto.json``, ``pareto.png``, ``repairs.npz``, ``evaluations.json``."""

    target: Target
    reached: bool
    """False: no mix meets the target; the point taken comes nearest."""
    taken: int
    """Number of the point to build unless another is asked for."""
    unit: str
    """Of the points' costs: ``MACs`` or ``ms``."""
    points: tuple[Point, ...]
    repairs: tuple[RepairRecord, ...]
    sensitivities: tuple[Sensitivity, ...]
    search_samples: int
    check_samples: int
    """Held-aside samples on which points are judged."""
    unseen_samples: int
    """Held-aside samples that the search never used; 0: there were too few to spare any."""

    @property
    def equalised_model(self) -> Path:
        return self.folder / EQUALISED / "model.onnx"

    @property
    def equalised_statistics(self) -> Path:
        return self.folder / EQUALISED / CALIBRATION

    def point(self, number: int | None = None) -> Point:
        """Point ``number`` of the table; None: the one taken.

        Raises:
            InputError: there is no such point.
        """
        number = self.taken if number is None else number
        if not 0 <= number < len(self.points):
            raise InputError(
                f"--choose {number}: the table has the points 0 to {len(self.points) - 1}",
                remedy=f"look them up in {PARETO_JSON}",
            )
        return self.points[number]

    def placement(self, config: PlacementConfig, number: int | None = None) -> PlacementConfig:
        """The placement configuration that builds a point."""
        restored = self.point(number).restored
        return config.model_copy(update={"exclude": (*config.exclude, *restored)})

    def given_back(self, number: int | None = None) -> tuple[Sensitivity, ...]:
        """The measured units that a point has in float: what each one does alone, in the order of the network."""
        restored = set(self.point(number).restored)
        return tuple(unit for unit in self.sensitivities if restored.issuperset(unit.nodes))

    def reasons(self, number: int | None = None) -> dict[str, str]:
        """Of each node that a point has back in float, why the search gave it back."""
        texts = {}
        for unit in self.given_back(number):
            alone = "alone" if len(unit.nodes) == 1 else f"together with {len(unit.nodes) - 1} neighbours"
            cost = f"{unit.cost:.4g} ms" if self.unit == "ms" else f"{unit.cost:,.0f} {self.unit} in float"
            text = (
                f"given back to float by the search for {self.target}: {alone} it takes the SQNR on "
                f"{self.search_samples} search samples from {unit.sqnr_before_db:.2f} to {unit.sqnr_after_db:.2f} dB, "
                f"at a cost of {cost}"
            )
            texts.update(dict.fromkeys(unit.nodes, text))
        return texts

    def sentence(self) -> str:
        """What came out, in one line."""
        point = self.point()
        figure = self.target.describe(point.figures)
        share = f"{100 * point.int8_share:.1f} % of the multiply-accumulates in INT8"
        kept = sum(record.kept for record in self.repairs) if point.repaired else 0
        nodes = len(point.restored)
        how = f"{nodes} node{'s' * (nodes != 1)} back in float, {kept} repair{'s' * (kept != 1)}"
        if self.reached:
            return f"{figure} ({self.target}): {how}, {share}"
        return f"{self.target} is not reached by any mix; the nearest has {figure}: {how}, {share}"


def run(
    model: Path,
    statistics: Mapping[str, TensorStatistics],
    calibrator: Calibrator,
    *,
    folder: Path,
    config: PlacementConfig,
    target: Target,
    searched: Callable[[], Iterable[Batch]],
    checked: Callable[[], Iterable[Batch]],
    unseen: Callable[[], Iterable[Batch]] | None = None,
    calibration: Callable[[], Iterable[Batch]] | None = None,
    labels: Mapping[int, int] | None = None,
    times: Mapping[str, tuple[float, float]] | None = None,
    passes: Passes | None = None,
    identity: str = "",
    others: Iterable[Path] = (),
    progress: Progress = SILENT,
) -> MixedResult:
    """Search for the fastest network that meets ``target``.

    Args:
        model: the prepared float model.
        config: placement to start from; its ``exclude`` stays in float in every point.
        searched: a new pass over the small search set (calibration samples will do).
        checked: a new pass over the samples on which points are judged.
        unseen: a new pass over samples that nothing is chosen by: the first and the taken point are measured on them.
        calibration: a new pass over all calibration samples, for equalised channels; None: those are not tried.
        labels: sample number to class, of the two sets before; needed for a target in top-1.
        times: node to its measured time in INT8 and in float, in ms; None: multiply-accumulates stand for time.
        passes: what passes over tensors took there; None: borders between INT8 and float are not counted.
        identity, others: see :class:`pipeline.mixed.evaluate.Memory`.

    Raises:
        InputError: a model that came with Q/DQ nodes, nothing to quantise, no samples, labels that do not fit, or a
            target about a figure that the network does not have.
        CheckFailed: a NaN or infinity in an output.
    """
    network = Network(model, config, statistics, calibrator)
    base = Candidate()
    plan = network.plan(base)
    if plan.prequantized:
        raise InputError(
            "the model came with Q/DQ nodes, whose placement is left as it is", remedy="search on the float model"
        )
    if not plan.quantized_nodes:
        raise InputError("nothing in this model is quantised, so there is nothing to search")
    memory = Memory(folder / EVALUATIONS, identity, others)
    if len(memory):
        progress.note(f"the search starts from {len(memory)} measurements of an earlier one")
    with progress.task("running the float model", total=None, unit="sets") as task:
        checking = Evaluator("check", network, checked, memory, labels)
        task.advance()
        searching = Evaluator("search", network, searched, memory)
        task.advance()
    first = next(iter(searching.pairs()))[0]
    costs = node_costs(network.fp32, first, times, passes=passes, quantized=plan.quantized_nodes)
    every = [Checked(base, checking.measure(base))]
    best, reached = every[0], target.met(every[0].figures)
    progress.note(f"all in INT8: {target.describe(best.figures)}, target: {target}")
    repairs = Repairs()
    records: tuple[RepairRecord, ...] = ()
    sensitive: list[Sensitivity] = []
    if not reached:
        count = 0
        if calibration is not None:
            found_equalised = equalised_network(network, calibration, folder / EQUALISED, progress=progress)
            if found_equalised is not None:
                network.equalised, count = found_equalised
        with progress.task("trying repairs", total=None, unit="repairs") as task:
            repairs, records = find_repairs(network, searching, task, equalised=count)
        repaired = Candidate(repairs=repairs)
        if repaired.key != base.key:
            every.append(Checked(repaired, checking.measure(repaired)))
            best, reached = every[-1], target.met(every[-1].figures)
            kept = sum(record.kept for record in records)
            progress.note(f"with {kept} of {len(records)} repairs: {target.describe(best.figures)}")
    if not reached:
        own = network.of(Candidate(repairs=repairs))
        if own is not network:
            costs = node_costs(own.fp32, first, times, passes=passes, quantized=own.plan(base).quantized_nodes)
        units = make_units(_movable(own, own.plan(base)), costs)
        with progress.task("measuring sensitivities", total=len(units), unit="layers") as task:
            sensitive = sensitivities(units, Candidate(repairs=repairs), searching, task)
        with progress.task("searching", total=None, unit="checks") as task:
            found = search(sensitive, repairs, target, searching, checking, costs, task)
        known = {item.candidate.key for item in every}
        every += [item for item in found.checked if item.candidate.key not in known]
        reached = found.reached
        best = (
            min(every, key=lambda item: target.shortfall(item.figures))
            if found.best is None or not reached
            else found.best
        )
    quantized = [network.of(item.candidate).plan(item.candidate).quantized_nodes for item in every]
    aside = {}
    if unseen is not None:
        with progress.task("measuring on samples that the search never saw", total=2, unit="points") as task:
            judge = Evaluator("unseen", network, unseen, memory, labels)
            for item in (every[0], best):
                aside[item.candidate.key] = judge.measure(item.candidate)
                task.advance()
    points = pareto_points(every, best, costs, quantized, target, aside)
    result = MixedResult(
        target=target,
        reached=reached,
        taken=next(point.number for point in points if point.chosen),
        unit=costs.unit,
        points=points,
        repairs=tuple(records),
        sensitivities=tuple(sensitive),
        search_samples=searching.samples,
        check_samples=checking.samples,
        unseen_samples=next((figures.samples for figures in aside.values()), 0),
    ).at(folder)
    if not any(point.equalised for point in points):
        shutil.rmtree(folder / EQUALISED, ignore_errors=True)
    write_json(folder / PARETO_JSON, result.model_dump(mode="json", exclude={"dependencies"}))
    pareto_plot(folder / PARETO_PNG, points, target, costs.unit)
    save_repairs(folder / REPAIRS, repairs)
    (progress.note if reached else progress.warn)(result.sentence())
    return result


def _movable(network: Network, plan: PlacementPlan) -> list[str]:
    """Quantised nodes that compute something, in network order."""
    chosen = set(plan.quantized_nodes)
    return [node.name for node in network.fp32.nodes if node.name in chosen and node.op_type not in MOVEMENT]
