"""The calibrate stage: statistics of a small network, resume, skip, errors, merging, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, load, numpy_helper, save

import calibrators
from calibrators import TensorStatistics, load_statistics, save_statistics
from calibrators.accumulate import add_batch
from pipeline import activations, calibrate
from pipeline.core.errors import InputError, ToolError
from pipeline.core.ort import make_session
from pipeline.core.ort_capture import open_capture
from pipeline.data import Batch

TENSORS = ("x", "conv", "relu", "pooled", "y")
Array = np.ndarray


def network(folder: Path, *, batch: int | str = "n", dtype: int = TensorProto.FLOAT, seed: int = 0) -> Path:
    """x (n, 3, 8, 8) -> Conv -> conv -> Relu -> relu -> mean -> pooled -> Gemm -> y (n, 4); and an integer tensor."""
    random = np.random.default_rng(seed)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weights = {
        "w": random.standard_normal((6, 3, 3, 3)).astype(kind),
        "b": random.standard_normal(6).astype(kind),
        "fc": random.standard_normal((6, 4)).astype(kind),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["conv"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["relu"], "relu1"),
        helper.make_node("ReduceMean", ["relu"], ["pooled"], "pool", axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["pooled", "fc"], ["y"], "fc1"),
        helper.make_node("ArgMax", ["y"], ["class"], "arg", axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", dtype, [batch, 3, 8, 8])],
        [helper.make_tensor_value_info("y", dtype, [batch, 4])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    path = folder / f"small-{batch}-{dtype}.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def data(count: int = 20, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)


def batches(x: Array, size: int = 4, name: str = "x") -> Iterator[Batch]:
    for index, start in enumerate(range(0, len(x), size)):
        rows = x[start : start + size]
        yield Batch(index, tuple(range(start, start + len(rows))), {name: rows})


def expected(model: Path, x: Array, size: int = 4, tensors: Sequence[str] = TENSORS) -> dict[str, TensorStatistics]:
    """Row by row through a session of our own, so that it is the stage's rows that are compared and not its cut."""
    captured = [name for name in tensors if name != "x"]
    session = make_session(model, capture=captured, threads=1)
    result = {name: TensorStatistics() for name in tensors}
    for batch in batches(x, size):
        rows = [session.run(captured, {"x": row[None]}) for row in batch.feeds["x"]]
        values = {name: [row[k] for row in rows] for k, name in enumerate(captured)} | {"x": batch.feeds["x"]}
        for name in tensors:
            add_batch(result[name], values[name], batch.index)
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return network(tmp_path_factory.mktemp("network"))


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "RUN_BYTES", 1)


class Recorded:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.steps = 0

    def task(self, description: str, *, total: int | None, unit: str) -> Recorded:
        self.total = total
        return self

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def advance(self, steps: int = 1) -> None:
        self.steps += steps

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)


# --- the pass


@pytest.mark.usefixtures("rows_alone")
@pytest.mark.parametrize("size", [1, 4, 7, 20])
def test_statistics_are_those_of_the_activations(model: Path, tmp_path: Path, size: int) -> None:
    x = data()
    progress = Recorded()
    result = calibrate.run(model, TENSORS, batches(x, size), folder=tmp_path, progress=progress, total=len(x))
    found, meta = load_statistics(result.statistics_path)
    assert found == expected(model, x, size)
    assert (result.samples, result.batches, result.skipped_batches) == (20, -(-20 // size), 0)
    assert (result.tensors, result.warnings) == (len(TENSORS), ())
    assert (progress.total, progress.steps) == (20, 20)
    assert meta["samples"] == 20
    assert not (tmp_path / calibrate.CHECKPOINT).exists()


def test_a_run_may_take_several_rows(model: Path, tmp_path: Path) -> None:
    x = data()
    found, _ = load_statistics(calibrate.run(model, TENSORS, batches(x, 8), folder=tmp_path).statistics_path)
    for name, stats in expected(model, x, 8).items():
        assert found[name].elements == stats.elements
        assert found[name].amax == pytest.approx(stats.amax, rel=1e-5)
        np.testing.assert_array_equal(found[name].batch_index, stats.batch_index)
        np.testing.assert_allclose(found[name].batch_amax, stats.batch_amax, rtol=1e-5)


def test_the_cut_depends_on_the_batch_alone(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 4 * (2 * 6 * 64 + 6 + 4)
    monkeypatch.setattr(activations, "RUN_BYTES", 3 * row_bytes)
    seen: list[tuple[int, int]] = []
    original = activations.ActivationPass._runs

    def spied(self: activations.ActivationPass, batch: Batch) -> Iterator[list[Array]]:
        for outputs in original(self, batch):
            seen.append((batch.index, len(outputs[0])))
            yield outputs

    monkeypatch.setattr(activations.ActivationPass, "_runs", spied)
    calibrate.run(model, TENSORS, batches(data(20), 9), folder=tmp_path)
    assert {index: [rows for i, rows in seen if i == index] for index in range(3)} == {
        0: [1, 3, 3, 2],
        1: [1, 3, 3, 2],
        2: [1, 1],
    }


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(model: Path, tmp_path: Path, threads: int) -> None:
    files: list[Path] = []
    for number in (threads, 1):
        folder = tmp_path / f"{number}-{len(files)}"
        files.append(calibrate.run(model, TENSORS, batches(data()), folder=folder, threads=number).statistics_path)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("held", [1, 4000])
def test_large_runs_let_fewer_batches_work_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(activations, "_HELD_BYTES", held)
    used: list[int] = []
    original = open_capture

    def spied(*args: Any, threads: int, **kwargs: Any) -> object:
        used.append(threads)
        return original(*args, threads=threads, **kwargs)

    monkeypatch.setattr(activations, "open_capture", spied)
    result = calibrate.run(model, TENSORS, batches(data()), folder=tmp_path / "few", threads=4)
    assert used == [1, 4], "from four batches with a thread each to one batch with four threads"
    assert load_statistics(result.statistics_path)[0]["x"] == expected(model, data())["x"]


def test_static_batch_and_half_precision(tmp_path: Path) -> None:
    static = network(tmp_path, batch=4)
    result = calibrate.run(static, TENSORS, batches(data(8)), folder=tmp_path / "static")
    assert result.samples == 8
    half = network(tmp_path, dtype=TensorProto.FLOAT16)
    x = data(8).astype(np.float16)
    found, _ = load_statistics(calibrate.run(half, ("x",), batches(x), folder=tmp_path / "half").statistics_path)
    assert found["x"].amax == float(np.abs(x).max())


def test_only_graph_inputs_and_no_tensor_at_all(model: Path, tmp_path: Path) -> None:
    found, _ = load_statistics(calibrate.run(model, ("x",), batches(data()), folder=tmp_path / "x").statistics_path)
    assert found == {"x": expected(model, data())["x"]}
    result = calibrate.run(model, (), batches(data()), folder=tmp_path / "none")
    assert (result.tensors, result.samples) == (0, 0)


def test_degenerate_tensors_are_named(model: Path, tmp_path: Path) -> None:
    progress = Recorded()
    result = calibrate.run(
        model, ("x", "conv"), batches(np.zeros((4, 3, 8, 8), np.float32)), folder=tmp_path, progress=progress
    )
    assert result.warnings == ("x: all-zero: all 768 values are zero in calibration; amax 1 is used",)
    assert progress.warnings == list(result.warnings)


# --- resume


class Stop(Exception):
    """Stands for a kill."""


def dying(x: Array, after: int) -> Iterator[Batch]:
    for batch in batches(x):
        if batch.index == after:
            raise Stop
        yield batch


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_killed_pass_goes_on_and_gives_the_same_bits(model: Path, tmp_path: Path, after: int) -> None:
    x = data()
    whole = calibrate.run(model, TENSORS, batches(x), folder=tmp_path / "whole", data_key="d").statistics_path
    folder = tmp_path / "killed"
    with pytest.raises(Stop):
        calibrate.run(model, TENSORS, dying(x, after), folder=folder, checkpoint_every=1, data_key="d")
    assert not (folder / "calibration.npz").exists()
    left = (
        load_statistics(folder / calibrate.CHECKPOINT)[1]["batches"] if (folder / calibrate.CHECKPOINT).exists() else []
    )
    progress = Recorded()
    run: list[int] = []
    original = activations.ActivationPass._run

    def spied(self: activations.ActivationPass, batch: Batch) -> activations.BatchStatistics:
        run.append(batch.index)
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations.ActivationPass, "_run", spied)
        result = calibrate.run(model, TENSORS, batches(x), folder=folder, data_key="d", progress=progress)
    assert result.statistics_path.read_bytes() == whole.read_bytes()
    assert sorted(run) == sorted(set(range(5)) - set(left))
    assert progress.steps == 20
    if left:
        assert progress.notes == [f"calibration goes on after {len(left)} batches of an unfinished pass"]


@pytest.mark.parametrize("change", ["data", "tensors", "nonfinite", "damage"])
def test_another_pass_is_not_resumed(model: Path, tmp_path: Path, change: str) -> None:
    x = data()
    with pytest.raises(Stop):
        calibrate.run(model, TENSORS, dying(x, 4), folder=tmp_path, checkpoint_every=1, data_key="d")
    checkpoint = tmp_path / calibrate.CHECKPOINT
    assert checkpoint.exists()
    if change == "damage":
        checkpoint.write_bytes(checkpoint.read_bytes()[:-50])
    progress = Recorded()
    tensors = TENSORS[:-1] if change == "tensors" else TENSORS
    result = calibrate.run(
        model,
        tensors,
        batches(x),
        folder=tmp_path,
        data_key="other" if change == "data" else "d",
        on_nonfinite="skip" if change == "nonfinite" else "error",
        progress=progress,
    )
    assert progress.notes == []
    assert result.batches == 5
    assert load_statistics(result.statistics_path)[0]["x"] == expected(model, x)["x"]


SLOW_PASS = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.test_calibrate import TENSORS, batches, data
from pipeline import calibrate

def slow():
    for batch in batches(data(400)):
        time.sleep(0.02)
        yield batch

calibrate.run(Path({model!r}), TENSORS, slow(), folder=Path({folder!r}), checkpoint_every=2, data_key="d")
"""


def test_killed_with_sigkill_at_some_moment(model: Path, tmp_path: Path) -> None:
    whole = calibrate.run(model, TENSORS, batches(data(400)), folder=tmp_path / "whole", data_key="d").statistics_path
    folder = tmp_path / "killed"
    script = SLOW_PASS.format(root=str(Path(__file__).parents[1]), model=str(model), folder=str(folder))
    for moment in (1, 4):
        child = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)
            checkpoint = folder / calibrate.CHECKPOINT
            if checkpoint.exists() and len(load_statistics(checkpoint)[1]["batches"]) >= 10 * moment:
                break
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "it was killed before it ended"
    progress = Recorded()
    result = calibrate.run(model, TENSORS, batches(data(400)), folder=folder, data_key="d", progress=progress)
    assert progress.notes, "it went on from a checkpoint"
    assert result.statistics_path.read_bytes() == whole.read_bytes()


# --- what cannot be used


def poisoned(value: float, sample: int) -> Array:
    x = data()
    x[sample, 0, 0, 0] = value
    return x


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_data(model: Path, tmp_path: Path, value: float) -> None:
    with pytest.raises(InputError) as caught:
        calibrate.run(model, TENSORS[1:], batches(poisoned(value, 9)), folder=tmp_path)
    assert "in batch 2 (samples 8 to 11); the data of the model input 'x' already holds one" in str(caught.value)
    assert "tensor 'conv' has" in str(caught.value)
    assert "--on-nonfinite skip" in str(caught.value)


def test_nonfinite_activation_of_finite_data(model: Path, tmp_path: Path) -> None:
    x = data()
    x[13] = 3e38
    with pytest.raises(InputError, match=r"tensor 'conv' has .* infinite values in batch 3") as caught:
        calibrate.run(model, TENSORS, batches(x), folder=tmp_path)
    assert "the data is finite, so the model makes it" in str(caught.value)


@pytest.mark.usefixtures("rows_alone")
def test_skipping_leaves_the_whole_batch_out_and_counts_it(model: Path, tmp_path: Path) -> None:
    progress = Recorded()
    result = calibrate.run(
        model, TENSORS, batches(poisoned(np.nan, 9)), folder=tmp_path, on_nonfinite="skip", progress=progress
    )
    assert (result.samples, result.batches, result.skipped_batches) == (16, 4, 1)
    assert [text for text in progress.warnings if text.endswith("the batch is skipped")]
    found, meta = load_statistics(result.statistics_path)
    assert meta["skipped"] == [2]
    keep = expected(model, data())
    assert found["x"].batch_index.tolist() == [0, 1, 3, 4]
    assert found["y"].elements == 16 * 4
    assert found["y"].nans == 0
    np.testing.assert_array_equal(found["conv"].batch_amax, np.delete(keep["conv"].batch_amax, 2))


def test_every_batch_skipped(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all 5 batches were skipped: each has a NaN or infinity in an activation"):
        calibrate.run(
            model, TENSORS, batches(np.full((20, 3, 8, 8), np.nan, np.float32)), folder=tmp_path, on_nonfinite="skip"
        )
    assert not (tmp_path / "calibration.npz").exists()


def test_no_data(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no calibration data: there is not a single batch") as caught:
        calibrate.run(model, TENSORS, [], folder=tmp_path)
    assert "random data is never used" in str(caught.value)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"image": data(2)}, "batch 0 (samples 0 to 1) feeds 'image': no such model input; known: x"),
        ({}, "batch 0 (samples 0 to 1) has no data for the model input 'x'"),
        ({"x": data(2).astype(np.float64)}, "input 'x' is float64, the model takes float32"),
        ({"x": data(2)[:, :2]}, "input 'x' has shape (2, 2, 8, 8), the model takes ('n', 3, 8, 8)"),
        ({"x": data(2)[0]}, "input 'x' has shape (3, 8, 8), the model takes ('n', 3, 8, 8)"),
    ],
)
def test_batches_that_do_not_fit(model: Path, tmp_path: Path, feeds: dict[str, Array], message: str) -> None:
    with pytest.raises(InputError) as caught:
        calibrate.run(model, TENSORS, [Batch(0, (0, 1), feeds)], folder=tmp_path)
    assert message in str(caught.value)


def test_a_batch_that_comes_twice(model: Path, tmp_path: Path) -> None:
    first = next(batches(data()))
    with pytest.raises(InputError, match="batch 0 comes twice"):
        calibrate.run(model, TENSORS, [first, first], folder=tmp_path)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_model_is_parsed_once(
    device: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its hash and for the pass."""
    from pipeline.core import ort

    parsed: list[Path] = []
    given: list[Any] = []

    class Pass:
        def __init__(self, *_: Any, proto: Any, **__: Any) -> None:
            given.append(proto)
            raise ToolError("no card")

    def once(path: Path) -> Any:
        parsed.append(path)
        return load(path)

    monkeypatch.setattr(ort, "read_graph", lambda path: pytest.fail("parsed again"))
    monkeypatch.setattr(activations, "read_graph", ort.read_graph)
    monkeypatch.setattr(calibrate, "read_graph", once)
    monkeypatch.setattr("onnx.load", lambda *_, **__: pytest.fail("parsed again"))
    monkeypatch.setattr("pipeline.activations_cuda.CudaActivationPass", Pass)
    if device == "cuda":
        with pytest.raises(ToolError, match="no card"):
            calibrate.run(model, TENSORS, batches(data()), folder=tmp_path, device=device)
        assert given[0].graph.node
    else:
        calibrate.run(model, TENSORS, batches(data()), folder=tmp_path, device=device)
    assert parsed == [model]


def test_tensors_that_cannot_be_calibrated(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tensor 'nothing' to capture does not exist"):
        calibrate.run(model, ("nothing",), batches(data()), folder=tmp_path)
    with pytest.raises(InputError, match=r"tensor 'class' cannot be calibrated: it is of type tensor\(int64\)"):
        calibrate.run(model, ("x", "class"), batches(data()), folder=tmp_path)


def test_a_model_that_fails_on_a_batch(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"], "reshape")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "k"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([-1, 4], np.int64), "shape")],
    )
    path = tmp_path / "reshape.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    good, bad = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)
    with pytest.raises(
        ToolError, match=r"onnxruntime fails on batch 1 \(samples 2 to 3\) with x \(2, 3\): .*"
    ) as caught:
        calibrate.run(path, ("y",), [Batch(0, (0, 1), {"x": good}), Batch(1, (2, 3), {"x": bad})], folder=tmp_path)
    assert caught.value.remedy == (
        "if the model does not take this size, give the data one that it takes; "
        "`--batch-size 1` shows which sample it is"
    )


def test_an_image_of_a_size_that_a_dynamic_model_does_not_take(tmp_path: Path) -> None:
    """Halved and doubled again, an odd side is one pixel off, as where a detector joins its feature maps."""
    graph = helper.make_graph(
        [
            helper.make_node("MaxPool", ["x"], ["half"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Resize", ["half", "", "scales"], ["whole"], "resize"),
            helper.make_node("Add", ["x", "whole"], ["y"], "join"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")],
    )
    path = tmp_path / "join.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    good, bad = np.ones((1, 3, 8, 8), np.float32), np.ones((1, 3, 8, 9), np.float32)
    with pytest.raises(
        ToolError, match=r"onnxruntime fails on batch 1 \(sample 1\) with x \(1, 3, 8, 9\): .*8 by 9"
    ) as caught:
        calibrate.run(path, ("y",), [Batch(0, (0,), {"x": good}), Batch(1, (1,), {"x": bad})], folder=tmp_path)
    assert caught.value.remedy == (
        "if the model does not take this size, give the data one that it takes: "
        "for images set resize and crop in --preprocess"
    )


# --- taking and merging


def test_take(model: Path, tmp_path: Path) -> None:
    source = calibrate.run(model, TENSORS, batches(data()), folder=tmp_path / "pass").statistics_path
    result = calibrate.take(source, ("relu", "x"), model=model, folder=tmp_path / "taken")
    found, _ = load_statistics(result.statistics_path)
    assert set(found) == {"relu", "x"}
    assert (result.tensors, result.samples, result.batches) == (2, 20, 5)
    with pytest.raises(InputError, match=r"has no statistics of 'other' \(1 of 2 tensors are missing\)"):
        calibrate.take(source, ("x", "other"), model=model, folder=tmp_path / "taken")


def test_unfinished_and_foreign_files_are_not_taken(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        calibrate.run(model, TENSORS, dying(data(), 4), folder=tmp_path, checkpoint_every=1)
    with pytest.raises(InputError, match="is of an unfinished pass"):
        calibrate.take(tmp_path / calibrate.CHECKPOINT, ("x",), model=model, folder=tmp_path / "taken")
    save_statistics(tmp_path / "bare.npz", {"x": TensorStatistics()}, {})
    with pytest.raises(InputError, match=r"bare\.npz does not say what it was made from: 'model'"):
        calibrate.take(tmp_path / "bare.npz", ("x",), model=model, folder=tmp_path / "taken")


def shards(model: Path, folder: Path, size: int) -> list[Path]:
    x = data()
    return [
        calibrate.run(
            model,
            TENSORS,
            (batch for batch in batches(x) if batch.index % size == rank),
            folder=folder / str(rank),
            data_key="d",
        ).statistics_path
        for rank in range(size)
    ]


def test_merged_shards_are_the_whole_pass(model: Path, tmp_path: Path) -> None:
    whole = calibrate.run(model, TENSORS, batches(data()), folder=tmp_path / "whole", data_key="d").statistics_path
    files = shards(model, tmp_path, 3)
    for number, order in enumerate((files, files[::-1], [files[1], files[0], files[2]])):
        result = calibrate.merge_passes(order, tmp_path / f"merged{number}" / "calibration.npz")
        assert result.statistics_path.read_bytes() == whole.read_bytes()
        assert (result.samples, result.batches) == (20, 5)


def test_what_cannot_be_merged(model: Path, tmp_path: Path) -> None:
    first, second = shards(model, tmp_path, 2)
    target = tmp_path / "m.npz"
    with pytest.raises(InputError, match="there is nothing to merge: 1 calibration files are given"):
        calibrate.merge_passes([first], target)
    with pytest.raises(InputError, match=r"batch 0 is in .* and in a file before it \(3 such batches\)"):
        calibrate.merge_passes([first, second, first], target)
    fewer = calibrate.run(model, TENSORS[:2], (b for b in batches(data()) if b.index == 1), folder=tmp_path / "fewer")
    with pytest.raises(InputError, match="have different tensors, such as 'pooled'"):
        calibrate.merge_passes([first, fewer.statistics_path], target)
    other = network(tmp_path, seed=1)
    foreign = calibrate.run(other, TENSORS, (b for b in batches(data()) if b.index == 1), folder=tmp_path / "foreign")
    with pytest.raises(InputError, match="are passes of different models"):
        calibrate.merge_passes([first, foreign.statistics_path], target)
    wider = calibrate.run(
        model, TENSORS, (b for b in batches(data(), 5) if b.index == 3), folder=tmp_path / "wider", data_key="d"
    )
    message = r"sample 16 is in a batch of .*wider.* and in another batch of a file before it \(4 such samples\)"
    with pytest.raises(InputError, match=message) as error:
        calibrate.merge_passes([first, wider.statistics_path], target)
    assert "the same --samples and --batch-size" in str(error.value.remedy)
    assert not target.exists()


def test_passes_over_different_data_or_of_an_earlier_version_are_merged(model: Path, tmp_path: Path) -> None:
    """Sample 16 of one source is not that of another; and nobody knows the samples of an old file."""
    first, _ = shards(model, tmp_path, 2)
    wider = (b for b in batches(data(), 5) if b.index == 3)
    other = calibrate.run(model, TENSORS, wider, folder=tmp_path / "wider", data_key="e").statistics_path
    statistics, meta = load_statistics(other)
    save_statistics(tmp_path / "old.npz", statistics, {key: meta[key] for key in meta if key != calibrate.NUMBERS})
    for source in (other, tmp_path / "old.npz"):
        result = calibrate.merge_passes([first, source], tmp_path / "m" / "calibration.npz")
        assert result.samples == 17
    assert load_statistics(other)[1][calibrate.NUMBERS] == {"e": [15, 16, 17, 18, 19]}


@pytest.mark.parametrize("numbers", [3, [1], {"d": 3}, {"d": ["x"]}, {"d": None}])
def test_damaged_sample_numbers(model: Path, tmp_path: Path, numbers: object) -> None:
    first, second = shards(model, tmp_path, 2)
    statistics, meta = load_statistics(second)
    save_statistics(second, statistics, {**meta, calibrate.NUMBERS: numbers})
    with pytest.raises(InputError, match=f"calibration file {second} does not say what it was made from"):
        calibrate.merge_passes([first, second], tmp_path / "m.npz")


# --- the command line


@pytest.fixture
def cli(model: Path, tmp_path: Path) -> tuple[Path, Path]:
    path = tmp_path / "data.npy"
    np.save(path, data())
    return model, path


def invoke(*arguments: object) -> tuple[int, str, str]:
    from pipeline.cli.calibrate import command

    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_command_alone_in_shards_and_merged(cli: tuple[Path, Path], tmp_path: Path) -> None:
    model, path = cli
    given = (
        model,
        "--data",
        path,
        "--samples",
        20,
        "--batch-size",
        4,
        "--profile",
        "x=1x3x8x8,4x3x8x8,8x3x8x8",
        "--include",
        "conv1",
    )
    code, out, _ = invoke(*given, "-o", tmp_path / "whole.npz", "--json", "--quiet")
    assert code == 0
    summary = json.loads(out)
    assert (summary["samples"], summary["batches"]) == (20, 5)
    for rank in range(2):
        assert invoke(*given, "-o", tmp_path / f"{rank}.npz", "--shard", f"{rank}/2", "--quiet")[0] == 0
    code, out, _ = invoke("--merge", tmp_path / "1.npz", tmp_path / "0.npz", "-o", tmp_path / "merged.npz")
    assert code == 0
    assert "20 samples in 5 batches" in out
    assert (tmp_path / "merged.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not list(tmp_path.glob(".*.work"))


@pytest.mark.parametrize("changed", [("--batch-size", 2), ("--samples", 12), ("--shard", "0/2")])
def test_command_does_not_go_on_from_a_pass_over_other_batches(
    cli: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: tuple[str, object]
) -> None:
    """Its batches have the numbers of the new ones: they would be passed over, and other samples be missing."""
    model, path = cli
    options: dict[str, object] = {"--samples": 20, "--batch-size": 4, "--profile": "x=1x3x8x8,4x3x8x8,8x3x8x8"}

    def calibrated(out: str, **more: object) -> tuple[int, str]:
        words = [word for pair in {**options, **more}.items() for word in pair]
        code, _, said = invoke(model, "--data", path, *words, "--include", "conv1", "-o", tmp_path / out)
        return code, said

    save = calibrate._State.save

    def killed(self: Any, path: Path, key: str | None) -> None:
        save(self, path, key)
        if key is not None and len(self.done) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calibrate._State, "save", killed)
        assert calibrated("c.npz", **{"--checkpoint-every": 1})[0] == 130
    more = dict([changed])
    folder = tmp_path / ".c.npz.0-of-1.work"
    if "--shard" in more:
        folder = folder.rename(tmp_path / ".c.npz.0-of-2.work")
    assert (folder / calibrate.CHECKPOINT).exists()
    code, said = calibrated("c.npz", **more)
    assert (code, "goes on after" in said) == (0, False)
    assert calibrated("reference.npz", **more)[0] == 0
    assert (tmp_path / "c.npz").read_bytes() == (tmp_path / "reference.npz").read_bytes()


def test_options_that_make_another_graph_are_those_of_the_build(tmp_path: Path) -> None:
    """A file of equal options is taken, one of others refused."""
    from pipeline.cli.build import command as build
    from tests.compare.networks import transformer

    model = load(transformer(tmp_path / "m.onnx"))
    model.opset_import[0].version = 19
    save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "data.npy", np.random.default_rng(0).standard_normal((24, 16, 32)).astype(np.float32))
    given = [tmp_path / "m.onnx", "--data", tmp_path / "data.npy", "--profile", "x=1x16x32,4x16x32,8x16x32"]
    files = {}
    for name, flags in (("plain", ()), ("opset", ("--opset", 19)), ("equalised", ("--equalise",))):
        files[name] = tmp_path / f"{name}.npz"
        code, _, said = invoke(*given, *flags, "-o", files[name])
        assert code == 0, said
    graphs = {name: load_statistics(path)[1]["graph"] for name, path in files.items()}
    assert len(set(graphs.values())) == 3
    for flags, fitting in ((("--opset", 19), "opset"), (("--equalise",), "equalised"), ((), "plain")):
        for name, path in files.items():
            arguments = [*given, "--target", "onnx", "--out", tmp_path / f"{fitting}-{name}", *flags]
            done = CliRunner().invoke(build, [str(item) for item in (*arguments, "--calibration", path, "--quiet")])
            said = " ".join(done.output.split())
            assert (done.exit_code == 0) == (name == fitting), said
            if name != fitting:
                assert "has statistics of another float graph" in said
                assert "the same MODEL, --input, --profile, --opset and --equalise" in said


def test_an_example_input_is_for_a_model_in_python(cli: tuple[Path, Path], tmp_path: Path) -> None:
    code, _, error = invoke(cli[0], "--data", cli[1], "--input", "x:1x3x8x8:float32", "-o", tmp_path / "c.npz")
    assert code == 2
    assert "--input x is given with the .onnx file" in error


def test_an_opset_without_an_effect_is_a_warning(cli: tuple[Path, Path], tmp_path: Path) -> None:
    profile = "x=1x3x8x8,4x3x8x8,8x3x8x8"
    code, _, error = invoke(
        cli[0], "--data", cli[1], "--profile", profile, "--opset", 18, "--include", "conv1", "-o", tmp_path / "c.npz"
    )
    assert code == 0, error
    assert "warning: --opset 18 has no effect: the model has opset 17" in error


def test_an_opset_that_was_not_typed_is_no_warning(cli: tuple[Path, Path], tmp_path: Path) -> None:
    model = load(cli[0])
    model.opset_import[0].version = 14
    save(model, tmp_path / "m.onnx")
    given = ("--data", cli[1], "--profile", "x=1x3x8x8,4x3x8x8,8x3x8x8", "--include", "conv1")
    code, _, error = invoke(tmp_path / "m.onnx", *given, "-o", tmp_path / "c.npz")
    assert code == 0, error
    assert "no effect" not in error


@pytest.mark.parametrize(
    "flags",
    [("--opset", "17"), ("--equalise",), ("--input", "x:1:float32"), ("--profile", "x=1"), ("--exclude", "Conv")],
    ids=lambda flags: flags[0],
)
def test_an_artifact_is_calibrated_as_it_is(flags: tuple[str, ...], tmp_path: Path) -> None:
    code, _, error = invoke(tmp_path, "--data", "d.npy", *flags, "-o", tmp_path / "c.npz")
    assert code == 2
    assert f"{flags[0]} has no effect here: it is for a model that is prepared here" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "`quantize calibrate` takes one model, got 0"),
        (("m.onnx",), "no calibration data is given (--data)"),
        (("m.onnx", "--data", "d", "--shard", "2/2"), "--shard '2/2' is not I/N with I below N"),
        (("--merge", "a.npz", "-o", "m.npz"), "there is nothing to merge: 1 calibration files"),
        (("--merge", "a.npz", "b.npz"), "calibration file a.npz does not exist"),
    ],
)
def test_command_errors(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = invoke(*arguments)
    assert code == 2
    assert message in error


def test_command_refuses_a_folder(cli: tuple[Path, Path], tmp_path: Path) -> None:
    code, _, error = invoke(cli[0], "--data", cli[1], "-o", tmp_path)
    assert code == 2
    assert f"--out {tmp_path} is a folder" in error


def histogram(*arguments: object) -> tuple[int, str, str]:
    from pipeline.cli.histogram import command

    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_histogram(model: Path, tmp_path: Path) -> None:
    source = calibrate.run(model, TENSORS, batches(data()), folder=tmp_path).statistics_path
    picture = tmp_path / "h.png"
    code, out, _ = histogram(source, "relu", "c*", "-o", picture, "--json")
    assert code == 0
    amax = json.loads(out)["amax"]
    assert set(amax) == {"relu", "conv"}
    assert len(amax["relu"]) == len(calibrators.names())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    code, out, _ = histogram(source, "relu", "-o", picture, "--calibrator", "minmax", "--json")
    stats = load_statistics(source)[0]["relu"]
    assert json.loads(out)["amax"] == {"relu": {"minmax": stats.amax}}


def test_histogram_errors(model: Path, tmp_path: Path) -> None:
    source = calibrate.run(model, TENSORS, batches(data()), folder=tmp_path).statistics_path
    code, _, error = histogram(source, "rellu")
    assert code == 2
    assert "no calibrated tensor is called or matches 'rellu'; did you mean 'relu'" in error
    many = {f"t{number:02}": TensorStatistics() for number in range(30)}
    save_statistics(tmp_path / "many.npz", many, {})
    code, _, error = histogram(tmp_path / "many.npz", "t*")
    assert code == 2
    assert "30 tensors match, one picture holds 24" in error


def test_histogram_density_counts_every_value_but_zeros() -> None:
    from pipeline.reports.histogram import density

    stats = TensorStatistics()
    x = np.maximum(np.random.default_rng(0).standard_normal(10_000), 0.0).astype(np.float32)
    add_batch(stats, x, 0)
    edges, share = density(stats)
    assert share.sum() == pytest.approx((x > 0).mean())
    assert (edges[0], edges[-1]) == (0.0, stats.amax)
