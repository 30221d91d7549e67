"""The experiment: one calibration pass, every calibrator from its statistics, every INT8 graph on the same samples.

Each piece is a stage of :class:`pipeline.runner.StageRunner`, so an experiment that is repeated with one more
calibrator, or that was interrupted, measures only what is missing. Graphs that are the same to the bit are evaluated
once.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.compare.archive import read_arrays
from pipeline.compare.bootstrap import CONFIDENCE, RESAMPLES
from pipeline.compare.doubt import almost_zero_outputs
from pipeline.compare.engines import EngineBuilder, require_tensorrt
from pipeline.compare.figures import mean_of_known
from pipeline.compare.measured import Measured, chosen_score
from pipeline.compare.metric import metric_code
from pipeline.compare.preparation import Candidate, Preparation
from pipeline.compare.recommend import recommend
from pipeline.compare.records import FIGURES_NPZ, OUTPUTS_NPZ, Outcome, RunResult
from pipeline.compare.report import write_reports
from pipeline.compare.runs import (
    LAYER_SAMPLES,
    TaskRunner,
    files_of,
    layer_task,
    moments_task,
    output_task,
)
from pipeline.compare.shifts import ACTIVATIONS, CLEAN, Shift, planned_shifts
from pipeline.compare.table import rows
from pipeline.compare.task import FileSet, Setting, Task
from pipeline.compare.variants import expand
from pipeline.compare.workers import open_workers
from pipeline.core.progress import SILENT, Progress
from pipeline.provenance import installed_versions
from pipeline.runner import Finished, StageRunner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.compare.config import CompareConfig
    from pipeline.errors.layers import Layer

__all__ = ["run_experiment"]

_TOOLS = ("numpy", "numba", "onnx", "onnx-ir", "onnxruntime", "pillow")
FP32 = "fp32"


def run_experiment(
    config: CompareConfig,
    *,
    fresh: bool = False,
    artifact: bool = False,
    command: str = "",
    progress: Progress = SILENT,
) -> Outcome:
    """Measure every calibrator, write the reports into ``config.out`` and say which calibrator to take.

    Args:
        fresh: take nothing from an earlier experiment.
        artifact: one is built afterwards (:mod:`pipeline.compare.follow_up`): a model that it would be refused for is
            refused before it is measured.
        command: the command line, for the record.

    Raises:
        InputError: a wrong option, data, labels or metric; what was measured before stays measured.
        CheckFailed: a NaN or infinity in the model.
        ToolError: onnxruntime or a worker failed.
    """
    begun = time.monotonic(), time.process_time()
    variants = expand(config.calibrators)
    if config.metric is not None:
        metric_code(config.metric)
    on_card = config.target == "tensorrt"
    if on_card:
        require_tensorrt()
    preparation = Preparation(config, artifact=artifact, progress=progress)
    preparation.check()
    with (
        preparation.runner.locked(),
        open_workers(1 if on_card else config.workers, config.address, progress) as workers,
    ):
        if fresh:
            preparation.runner.prune()
        preparation.begin()
        setting, calibration_samples = preparation.setting()
        shifts = planned_shifts(config.shift_sigma, config.shift_draws, config.shift_images)
        cache = StageRunner(preparation.runner.work, SILENT)
        tasks = TaskRunner(cache, workers, installed_versions(_TOOLS), progress)
        options = preparation.build.engine_options
        engines = EngineBuilder(setting, preparation.runner, options, progress) if on_card else None
        evaluation = _Evaluation(setting, tasks, engines)
        evaluation.measure_fp32(shifts, calibration_samples)
        candidates = preparation.candidates(variants)
        subsets = preparation.subset_candidates(variants)
        layers = _layers(preparation)
        evaluation.measure(candidates, shifts, layers)
        evaluation.measure(subsets, (CLEAN,), ())
        runs = {
            "calibration_seconds": preparation.calibrated.seconds,
            "measured_seconds": dict(sorted(tasks.seconds.items())),
            "taken_from_cache": tasks.taken,
            "seconds": time.monotonic() - begun[0],
            "cpu_seconds_of_this_process": time.process_time() - begun[1],
        }
        outcome = _outcome(preparation, evaluation, candidates, subsets, layers, command, runs)
        write_reports(outcome)
    return outcome


class _Evaluation:
    """Runs the tasks of an experiment and files their figures."""

    def __init__(self, setting: Setting, tasks: TaskRunner, engines: EngineBuilder | None) -> None:
        self.setting = setting
        self.tasks = tasks
        self.engines = engines
        """None: onnxruntime computes the INT8 graphs."""
        self.moments: FileSet | None = None
        self.references: dict[Shift, FileSet] = {}
        self.fp32 = Measured(label=FP32, graph=setting.fp32.digests[0])

    def measure_fp32(self, shifts: Sequence[Shift], calibration_samples: FileSet | None) -> None:
        """The float graph once per shift; where noise is relative, the spread of the activations first."""
        if calibration_samples is not None and self.setting.activations:
            task = moments_task(self.setting, calibration_samples)
            (finished,) = self.tasks.run([task], "spread of the activations", lambda task, finished: None)
            self.moments = files_of(finished, FIGURES_NPZ)
        tasks = [output_task(self.setting, shift, FP32, None, moments=self.moments) for shift in shifts]
        for shift, finished in zip(shifts, self.tasks.run(tasks, "FP32", self.line), strict=True):
            self.references[shift] = files_of(finished, OUTPUTS_NPZ)
            self.fp32.add(shift, _figures(finished))

    def measure(self, candidates: Sequence[Candidate], shifts: Sequence[Shift], layers: Sequence[Layer]) -> None:
        """Every distinct INT8 graph under every shift, and layer by layer where ``layers`` are given."""
        by_graph: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            by_graph.setdefault(candidate.measured.graph, []).append(candidate)
        planned: list[tuple[str, Shift | None, Task]] = []
        for candidate, *_ in by_graph.values():
            label = _label(candidate.measured)
            for shift in shifts:
                task = output_task(
                    self.setting,
                    shift,
                    label,
                    candidate.files,
                    moments=self.moments,
                    reference=self.references[shift],
                    engine=self.engine(candidate.files, shift),
                )
                planned.append((candidate.measured.graph, shift, task))
            if layers:
                task = layer_task(self.setting, label, candidate.files, [layer.tensor for layer in layers])
                planned.append((candidate.measured.graph, None, task))
        if not planned:
            return
        finished = self.tasks.run([task for _, _, task in planned], "INT8", self.line)
        for (graph, condition, _), done in zip(planned, finished, strict=True):
            figures = _figures(done)
            for candidate in by_graph[graph]:
                if condition is None:
                    candidate.measured.layers = mean_of_known(figures["relative_l2"].T)
                else:
                    candidate.measured.add(condition, figures)

    def engine(self, int8: FileSet, shift: Shift) -> FileSet | None:
        if self.engines is None:
            return None
        return self.engines.build(int8, noisy=shift.kind == ACTIVATIONS)

    def line(self, task: Task, finished: Finished[RunResult]) -> str | None:
        """``top-1 70.43 %`` for a finished run."""
        if task.function != "outputs":
            return None
        measured = Measured(label="", graph="", draws={(CLEAN.kind, CLEAN.strength): [_figures(finished)]})
        if "reference" not in task.files and not {"metric", "top1"} & measured.clean.keys():
            return "done"
        score = chosen_score([measured])
        return f"{score.name} {score.text(float(np.nanmean(score.of(measured.clean))))}"


def _figures(finished: Finished[RunResult]) -> Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]:
    return read_arrays(finished.result.folder / FIGURES_NPZ)


def _label(measured: Measured) -> str:
    if measured.subset is None:
        return measured.label
    return f"{measured.label} on {measured.calibration_samples} samples ({measured.subset + 1})"


def _known(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [None if np.isnan(value) else float(value) for value in values]


def _layers(preparation: Preparation) -> tuple[Layer, ...]:
    from pipeline.errors.graphs import Graph
    from pipeline.errors.layers import layers_of_plan

    return layers_of_plan(preparation.plan, Graph(preparation.prepared.result.model_path))


def _outcome(
    preparation: Preparation,
    evaluation: _Evaluation,
    candidates: Sequence[Candidate],
    subsets: Sequence[Candidate],
    layers: Sequence[Layer],
    command: str,
    runs: Mapping[str, Any],
) -> Outcome:
    config, setting = preparation.config, evaluation.setting
    measured = tuple(candidate.measured for candidate in candidates)
    fewer = tuple(candidate.measured for candidate in subsets)
    score = chosen_score(measured)
    recommendation = recommend(measured, score, config.seed)
    doubts = tuple(almost_zero_outputs(setting.fp32.path, evaluation.references[CLEAN].path))
    for text in doubts:
        preparation.progress.warn(text)
    recommendation = recommendation.model_copy(update={"reasons": (*recommendation.reasons, *doubts)})
    names = tuple(layer.tensor for layer in layers)
    table = rows(evaluation.fp32, [*measured, *fewer], score, names, samples=setting.total, seed=config.seed)
    document = {
        "schema": 1,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "model": {"spec": config.model, "sha256": preparation.exported.result.source_sha256},
        "data": {
            "spec": preparation.source.describe(),
            "sha256": preparation.source.sha256(),
            "calibration_samples": sorted(preparation.split.calibration),
            "samples": sorted(preparation.split.verification),
            "labelled": setting.labels is not None,
        },
        "config": config.model_dump(mode="json"),
        "seeds": {"experiment": config.seed, "shift_draws": config.shift_draws},
        "tools": installed_versions((*_TOOLS, "torch", "ray", "quantize-trt")),
        "bootstrap": {"resamples": RESAMPLES, "confidence": CONFIDENCE},
        "score": score.figure,
        "recommendation": recommendation.model_dump(mode="json"),
        "rows": list(table),
        "layers": {
            "samples": min(LAYER_SAMPLES, setting.total),
            "relative_l2": {
                item.label: dict(zip(names, _known(item.layers), strict=True))
                for item in measured
                if item.layers is not None
            },
        },
        "activation_layers": list(setting.activations),
        "runs": dict(runs),
    }
    return Outcome(
        fp32=evaluation.fp32,
        measured=measured,
        subsets=fewer,
        layers=names,
        layer_nodes=tuple(layer.node for layer in layers),
        samples=setting.total,
        score=score,
        recommendation=recommendation,
        table=tuple(table),
        document=document,
        statistics=preparation.calibrated.result.statistics_path,
        folder=preparation.build.out,
    )
