"""Tasks in this process and on Ray: the same results, errors told, lost workers replaced, nothing finished lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.compare.activations import activation_outputs
from pipeline.compare.archive import open_archive, read_arrays, read_batches, write_arrays
from pipeline.compare.cluster import _RayWorkers, unpacked
from pipeline.compare.perform import perform
from pipeline.compare.records import FIGURES_NPZ
from pipeline.compare.runs import TaskRunner, file_set
from pipeline.compare.task import Done, FileSet, Task
from pipeline.compare.workers import open_workers
from pipeline.core.errors import InputError, ToolError
from pipeline.core.progress import SILENT
from pipeline.onnxfile import load_model
from pipeline.runner import StageRunner
from tests.compare.networks import classifier, images


def stored_samples(path: Path, count: int = 16, rows: int = 5) -> FileSet:
    values = images(count)
    with open_archive(path) as writer:
        for start in range(0, count, rows):
            part = values[start : start + rows]
            writer.add_batch(tuple(range(start, start + len(part))), {"x": part})
    return file_set(path)


def moments(folder: Path, label: str = "spread") -> Task:
    model = classifier(folder / "model.onnx")
    tensors = list(activation_outputs(load_model(model)))
    files = {"fp32": file_set(model), "samples": stored_samples(folder / "samples.npz")}
    return Task(label, "moments", files, {"tensors": tensors})


def test_archives_of_equal_arrays_are_equal_to_the_bit(tmp_path: Path) -> None:
    arrays = {"b": np.arange(5), "a/x": np.float64(3.0).reshape(())}
    write_arrays(tmp_path / "1.npz", arrays)
    write_arrays(tmp_path / "2.npz", dict(reversed(arrays.items())))
    assert (tmp_path / "1.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()
    assert read_arrays(tmp_path / "1.npz")["a/x"].shape == ()


def test_batches_come_back_in_order(tmp_path: Path) -> None:
    batches = list(read_batches(stored_samples(tmp_path / "s.npz").path))
    assert [batch.samples for batch in batches] == [tuple(range(5 * i, min(5 * i + 5, 16))) for i in range(4)]
    assert np.array_equal(np.concatenate([batch.feeds["x"] for batch in batches]), images(16))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(InputError, match=r"bad\.npz cannot be read"):
        read_arrays(tmp_path / "bad.npz")


def test_the_spread_of_the_activations(tmp_path: Path) -> None:
    from pipeline.core.ort import make_session

    task = moments(tmp_path)
    found = perform(task).arrays["std"]
    tensors = task.options["tensors"]
    values = make_session(task.files["fp32"].path, capture=tensors).run(tensors, {"x": images(16)})
    assert found == pytest.approx([float(each.astype(np.float64).std()) for each in values], rel=1e-6)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(InputError, match="there is no task 'nothing'"):
        perform(Task("x", "nothing", {}, {}))


def test_an_error_names_its_task(tmp_path: Path) -> None:
    task = replace(moments(tmp_path, "mse, noise 0.1"), options={"tensors": ["gone"]})
    with pytest.raises(InputError, match=r"^mse, noise 0.1: tensor 'gone' to capture does not exist"):
        perform(task)


class Scripted:
    """Workers that answer or fail as told."""

    def __init__(self, failing: set[str], count: int = 1) -> None:
        self.count = count
        self.failing = failing
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def perform(self, task: Task) -> Done:
        with self._lock:
            self.asked.append(task.label)
        if task.label in self.failing:
            raise InputError(f"{task.label}: failed")
        return Done({"value": np.array([float(len(task.label))])})


def scripted(labels: list[str]) -> list[Task]:
    return [Task(label, "outputs", {}, {"label": label}) for label in labels]


@pytest.mark.parametrize("count", [1, 4])
def test_after_a_failure_finished_tasks_are_kept_and_not_done_again(tmp_path: Path, count: int) -> None:
    tasks = scripted(["a", "bb", "bad", "dddd", "eeeee"])
    first = Scripted({"bad"}, count)
    with pytest.raises(InputError, match="bad: failed"):
        TaskRunner(StageRunner(tmp_path), first, {}, SILENT).run(tasks, "runs", lambda task, finished: None)
    second = Scripted(set(), count)
    runner = TaskRunner(StageRunner(tmp_path), second, {}, SILENT)
    finished = runner.run(tasks, "runs", lambda task, finished: None)
    kept = set(first.asked) - {"bad"}
    assert {"a", "bb"} <= kept
    assert set(second.asked) == {"a", "bb", "bad", "dddd", "eeeee"} - kept
    assert runner.taken == len(kept)
    values = [read_arrays(each.result.folder / FIGURES_NPZ)["value"][0] for each in finished]
    assert values == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_of_several_failures_the_earliest_is_raised(tmp_path: Path) -> None:
    tasks = scripted(["one", "two", "three"])
    with pytest.raises(InputError, match="one: failed"):
        TaskRunner(StageRunner(tmp_path), Scripted({"one", "two", "three"}, 3), {}, SILENT).run(
            tasks, "runs", lambda task, finished: None
        )


def test_files_are_unpacked_under_their_hashes(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"model")
    (tmp_path / "m.onnx.data").write_bytes(b"weights")
    files = FileSet(tmp_path, ("m.onnx", "m.onnx.data"), ("d1", "d2"))
    there = unpacked(files, {"d1": b"model", "d2": b"weights"}, tmp_path / "cache")
    assert there.path.read_bytes() == b"model"
    assert (there.folder / "m.onnx.data").read_bytes() == b"weights"
    assert unpacked(files, {}, tmp_path / "cache") == there
    assert unpacked(replace(files, digests=("d1", "d3")), {"d1": b"", "d3": b""}, tmp_path / "cache") != there


def test_an_address_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(InputError, match="--address needs the package 'ray'") as caught,
        open_workers(2, "auto", SILENT),
    ):
        pass
    assert caught.value.remedy == "pip install 'quantize-trt[cluster]'"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nothing_answers_is_told_at_once(address: str) -> None:
    pytest.importorskip("ray", reason="Ray (extra 'cluster') is not installed")
    with pytest.raises(InputError, match=f"no connection to a Ray cluster at '{address}'"):
        with open_workers(None, address, SILENT):
            pass


def test_without_ray_several_run_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pipeline.compare.workers._ray_installed", lambda: False)
    with open_workers(3, None, SILENT) as workers:
        assert workers.count == 3
        assert perform(moments(tmp_path)).arrays.keys() == workers.perform(moments(tmp_path)).arrays.keys()


class FakeRay:
    """Ray whose tasks end with ``error``."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.exceptions = pytest.importorskip("ray.exceptions", reason="Ray (extra 'cluster') is not installed")

    def remote(self, *_: object, **__: object) -> Any:
        return lambda *_, **__: self

    def options(self, **_: object) -> FakeRay:
        return self

    def get(self, _: object) -> None:
        assert self.error is not None
        raise self.error


IMPORT = "The remote function failed to import on the worker.\n\nNo module named 'pipeline'"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda ray: ray.WorkerCrashedError(), "a task: its worker was lost 4 times: The worker died unexpectedly"),
        (lambda ray: ray.ObjectLostError("0" * 56, None, ""), "a task: Ray failed: "),
        (
            lambda ray: ray.RayTaskError("f", "", RuntimeError(IMPORT)),
            "a task: a worker cannot load the task: No module named 'pipeline'",
        ),
    ],
)
def test_what_ray_says_of_a_task(error: Callable[[Any], Exception], message: str) -> None:
    ray = FakeRay()
    ray.error = error(ray.exceptions)
    workers = _RayWorkers(ray, 2, spread=False)
    with pytest.raises(ToolError, match=message):
        workers.perform(Task("a task", "moments", {}, {}))


@pytest.mark.slow
def test_ray_gives_the_same_results_and_ships_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster for all of it: starting Ray takes seconds."""
    pytest.importorskip("ray", reason="Ray (extra 'cluster') is not installed")
    from pipeline.compare import cluster

    task = moments(tmp_path)
    expected = perform(task).arrays["std"]
    with open_workers(2, None, SILENT) as workers:
        assert np.array_equal(workers.perform(task).arrays["std"], expected)

        with pytest.raises(InputError, match=r"^spread: tensor 'gone' to capture does not exist"):
            workers.perform(replace(task, options={"tensors": ["gone"]}))

        # As seen from another machine: the files come through the object store.
        monkeypatch.setattr(cluster, "machine", lambda: "elsewhere")
        workers._function = workers._ray.remote(num_cpus=1)(cluster._remote)  # type: ignore[attr-defined]
        workers._spread = True  # type: ignore[attr-defined]
        moved = replace(task, files={role: _hidden(files) for role, files in task.files.items()})
        for role, files in task.files.items():
            for digest, name in zip(files.digests, files.names, strict=True):
                workers._store[digest] = workers._ray.put((files.folder / name).read_bytes())  # type: ignore[attr-defined]
            assert not moved.files[role].path.exists()
        assert np.array_equal(workers.perform(moved).arrays["std"], expected)


def _hidden(files: FileSet) -> FileSet:
    return replace(files, folder=files.folder / "not-here")
