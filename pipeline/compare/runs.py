"""Tasks as cached stages: what is in the cache is taken, the rest is spread over the workers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.compare.archive import write_arrays
from pipeline.compare.images import IMAGE_SHIFTS
from pipeline.compare.records import FIGURES_NPZ, OUTPUTS_NPZ, RunResult
from pipeline.compare.shifts import ACTIVATIONS, Shift
from pipeline.compare.task import FileSet, Task
from pipeline.core.files import sha256_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeline.compare.task import Setting
    from pipeline.compare.workers import Workers
    from pipeline.core.progress import Progress
    from pipeline.runner import Finished, StageRunner

__all__ = ["LAYER_SAMPLES", "TaskRunner", "files_of", "layer_task", "moments_task", "output_task"]

LAYER_SAMPLES = 64
"""Samples on which the layers are compared, evenly spaced over the held-aside ones."""


_EVALUATION = 3
"""To be raised when a change of this package changes the figures of equal tasks: kept ones are then measured again."""


def files_of(finished: Finished[Any], name: str) -> FileSet:
    """A stage's file ``name`` and, for a model, the external weights beside it."""
    others = [other for other in finished.files if other != name and other.startswith(f"{name}.")]
    names = (name, *sorted(others))
    return FileSet(finished.result.folder, names, tuple(finished.files[each] for each in names))


def file_set(path: Path) -> FileSet:
    return FileSet(path.parent, (path.name,), (sha256_file(path),))


def moments_task(setting: Setting, samples: FileSet) -> Task:
    """``samples`` are the calibration samples."""
    return Task(
        label="spread of the activations",
        function="moments",
        files={"fp32": setting.fp32, "samples": samples},
        options={"tensors": list(setting.activations)},
    )


def output_task(
    setting: Setting,
    shift: Shift,
    label: str,
    int8: FileSet | None,
    *,
    moments: FileSet | None = None,
    reference: FileSet | None = None,
    engine: FileSet | None = None,
) -> Task:
    """One graph under one shift; ``int8`` None: FP32, whose outputs are kept.

    Args:
        moments: for noise relative to each tensor.
        reference: FP32's outputs under the same shift.
        engine: computes the INT8 graph; None: onnxruntime does.
    """
    noisy, on_images = shift.kind == ACTIVATIONS, shift.kind in IMAGE_SHIFTS
    files = {"model": int8 or setting.fp32, "samples": setting.samples}
    if noisy:
        files["fp32"] = setting.fp32
        if moments is not None:
            files["moments"] = moments
    if reference is not None:
        files["reference"] = reference
    if engine is not None:
        files["engine"] = engine
    if setting.metric_file is not None:
        files["metric"] = setting.metric_file
    return Task(
        label=f"{label}, {shift.label}" if shift.draw == 0 else f"{label}, {shift.label}, draw {shift.draw + 1}",
        function="outputs",
        files=files,
        options={
            "quantized": int8 is not None,
            "shift": shift.model_dump(mode="json"),
            # Only what this evaluation depends on: its results stay valid when another shift is added.
            "seed": setting.seed if noisy or on_images else 0,
            "absolute": setting.absolute and noisy,
            "activations": list(setting.activations) if noisy else [],
            "coding": setting.coding.model_dump(mode="json") if setting.coding is not None and on_images else None,
            "labels": None if setting.labels is None else [list(pair) for pair in setting.labels],
            "outputs": {name: asdict(facts) for name, facts in setting.outputs.items()},
            "metric": setting.metric,
            "metric_sha256": setting.metric_sha256,
            "keep": int8 is None,
        },
    )


def layer_task(setting: Setting, label: str, int8: FileSet, tensors: Sequence[str]) -> Task:
    return Task(
        label=f"{label}, layers",
        function="layers",
        files={"fp32": setting.fp32, "int8": int8, "samples": setting.samples},
        options={
            "tensors": list(tensors),
            "limit": LAYER_SAMPLES,
            "total": setting.total,
            "static_batch": setting.static_batch,
        },
    )


class TaskRunner:
    """Runs tasks through the stage cache, several at a time."""

    def __init__(self, stages: StageRunner, workers: Workers, tools: Mapping[str, str], progress: Progress) -> None:
        self._stages = stages
        self._workers = workers
        self._tools = dict(tools)
        self._progress = progress
        self.seconds: dict[str, float] = {}
        """Duration of each task that was not taken from the cache, by label."""
        self.taken = 0
        """Tasks taken from the cache."""

    def run(
        self, tasks: Sequence[Task], description: str, describe: Callable[[Task, Finished[RunResult]], str | None]
    ) -> list[Finished[RunResult]]:
        """The finished stage of each task, in their order.

        After a failure, running tasks are waited for (and kept) and no other is begun; of several errors the one of the
        earliest task is raised.

        Args:
            describe: a line for people about a finished task, or None for silence.
        """
        results: dict[int, Finished[RunResult]] = {}
        errors: dict[int, BaseException] = {}
        stop = threading.Event()

        def unless_stopped(task: Task) -> Finished[RunResult] | None:
            return None if stop.is_set() else self._one(task)

        with (
            self._progress.task(description, total=len(tasks), unit="runs") as bar,
            ThreadPoolExecutor(self._workers.count) as pool,
        ):
            futures = {pool.submit(unless_stopped, task): index for index, task in enumerate(tasks)}
            try:
                for future in as_completed(futures):
                    index = futures[future]
                    if (error := future.exception()) is not None:
                        errors[index] = error
                        stop.set()
                    elif (finished := future.result()) is not None:
                        results[index] = finished
                        bar.advance()
                        self._say(tasks[index], finished, describe(tasks[index], finished))
            finally:
                stop.set()
        if errors:
            raise errors[min(errors)]
        return [results[index] for index in range(len(tasks))]

    def _say(self, task: Task, finished: Finished[RunResult], line: str | None) -> None:
        if finished.cached:
            self.taken += 1
        else:
            self.seconds[task.label] = round(finished.seconds, 3)
        if line is not None:
            self._progress.note(f"{task.label}: {line}" + (" (kept)" if finished.cached else ""))

    def _one(self, task: Task) -> Finished[RunResult]:
        inputs: dict[str, Any] = {
            "files": {role: list(files.digests) for role, files in task.files.items()},
            "options": dict(task.options),
            "tools": self._tools,
            "evaluation": _EVALUATION,
        }

        def action(folder: Path) -> RunResult:
            done = self._workers.perform(task)
            outputs = {name: array for name, array in done.arrays.items() if "/" in name}
            figures = {name: array for name, array in done.arrays.items() if "/" not in name}
            write_arrays(folder / FIGURES_NPZ, figures)
            if outputs:
                write_arrays(folder / OUTPUTS_NPZ, outputs)
            return RunResult(label=task.label, dependencies=done.dependencies).at(folder)

        return self._stages.run(task.function, RunResult, inputs, action)
