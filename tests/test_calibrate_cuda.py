"""Calibration on a CUDA device, with this CPU in the device's place: the flow of buffers, batches and statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from calibrators import TensorStatistics, load_statistics
from calibrators.accumulate import add_batch
from pipeline import activations_cuda, calibrate
from pipeline.core.errors import InputError, ToolError
from pipeline.core.ort import make_session
from plugins import statistics
from plugins.layout import Tuning
from tests.plugins import fake_cuda
from tests.test_calibrate import TENSORS, Recorded, Stop, batches, data, dying, network, poisoned

pytestmark = pytest.mark.skipif(fake_cuda.compiler() is None, reason="needs g++ to run the kernels on the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture
def model(folder: Path) -> Path:
    return network(folder)


@pytest.fixture(autouse=True)
def cuda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, fake in fake_cuda.modules(folder).items():
        monkeypatch.setitem(sys.modules, name, fake)

    def on_cpu(*arguments: Any, providers: list[Any], **options: Any) -> Any:
        (name, settings), rest = providers
        assert (name, rest) == ("CPUExecutionProvider", "CPUExecutionProvider")
        assert settings["user_compute_stream"] == "0"
        assert settings["use_tf32"] == "0"
        return make_session(*arguments, providers=[name], **options)

    monkeypatch.setattr(activations_cuda, "make_session", on_cpu)
    monkeypatch.setattr(activations_cuda, "_PROVIDER", "CPUExecutionProvider")
    monkeypatch.setattr(activations_cuda, "_MEMORY", "cpu")
    tuning = Tuning(threads=16, per_thread=8, blocks_per_sm=1, pieces=2, finish_threads=32)
    monkeypatch.setattr(statistics, "TUNING", tuning)
    yield
    assert fake_cuda.CONTEXT.depth == 0, "the context was given back"


def expected(model: Path, x: np.ndarray, size: int = 4, without: tuple[int, ...] = ()) -> dict[str, TensorStatistics]:
    captured = [name for name in TENSORS if name != "x"]
    session = make_session(model, capture=captured)
    result = {name: TensorStatistics() for name in TENSORS}
    for batch in batches(x, size):
        if batch.index not in without:
            values = dict(zip(captured, session.run(captured, batch.feeds), strict=True)) | batch.feeds
            for name in TENSORS:
                add_batch(result[name], values[name], batch.index)
    return result


def test_statistics_are_those_of_the_activations(model: Path, tmp_path: Path) -> None:
    x = data(18)  # the last batch is ragged
    progress = Recorded()
    result = calibrate.run(model, TENSORS, batches(x), folder=tmp_path, device="cuda", progress=progress)
    assert load_statistics(result.statistics_path)[0] == expected(model, x)
    assert (result.samples, result.batches, progress.steps) == (18, 5, 18)


def test_more_shapes_than_are_kept(model: Path, tmp_path: Path) -> None:
    x = data(12)
    cut = [(0, 3), (3, 5), (5, 6), (6, 9), (9, 12)]
    stream = [
        type(batch)(index, tuple(range(a, b)), {"x": x[a:b]})
        for index, (a, b) in enumerate(cut)
        for batch in [next(batches(x))]
    ]
    found, _ = load_statistics(calibrate.run(model, TENSORS, stream, folder=tmp_path, device="cuda").statistics_path)
    assert found["x"].elements == x.size
    assert found["y"].elements == 12 * 4


def test_resume(model: Path, tmp_path: Path) -> None:
    x = data()
    whole = calibrate.run(model, TENSORS, batches(x), folder=tmp_path / "whole", device="cuda").statistics_path
    with pytest.raises(Stop):
        calibrate.run(model, TENSORS, dying(x, 3), folder=tmp_path / "killed", device="cuda", checkpoint_every=2)
    progress = Recorded()
    result = calibrate.run(model, TENSORS, batches(x), folder=tmp_path / "killed", device="cuda", progress=progress)
    assert progress.notes == ["calibration goes on after 2 batches of an unfinished pass"]
    assert result.statistics_path.read_bytes() == whole.read_bytes()


def test_nonfinite(model: Path, tmp_path: Path) -> None:
    x = poisoned(np.nan, 9)
    with pytest.raises(InputError) as caught:
        calibrate.run(model, TENSORS[1:], batches(x), folder=tmp_path, device="cuda")
    assert "in batch 2 (samples 8 to 11); the data of the model input 'x' already holds one" in str(caught.value)
    result = calibrate.run(model, TENSORS, batches(x), folder=tmp_path, device="cuda", on_nonfinite="skip")
    assert (result.samples, result.batches, result.skipped_batches) == (16, 4, 1)
    assert load_statistics(result.statistics_path)[0] == expected(model, data(), without=(2,))


def test_integers_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tensor 'class' is of type tensor\(int64\); on a CUDA device"):
        calibrate.run(model, ("class",), batches(data()), folder=tmp_path, device="cuda")


def test_no_cuda_provider(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_cuda, "_PROVIDER", "CUDAExecutionProvider")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(InputError, match="needs onnxruntime's CUDA provider, this onnxruntime has none"):
        calibrate.run(model, TENSORS, batches(data()), folder=tmp_path, device="cuda")


def test_a_provider_that_does_not_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_cuda, "_PROVIDER", "CUDAExecutionProvider")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(
        activations_cuda, "make_session", lambda *_, capture, **__: make_session(model, capture=capture)
    )
    with pytest.raises(ToolError, match="onnxruntime's CUDA provider does not start on this machine"):
        calibrate.run(model, TENSORS, batches(data()), folder=tmp_path, device="cuda")


def test_a_failing_run(model: Path, tmp_path: Path) -> None:
    bad = type(next(batches(data())))(0, (0,), {"x": np.ones((1, 3, 8), np.float32)})
    with pytest.raises(ToolError, match="onnxruntime fails on the first batch of its shape on the CUDA device"):
        calibrate.run(model, TENSORS, [bad], folder=tmp_path, device="cuda")
