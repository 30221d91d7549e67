"""A rank's batches on its GPU, with this CPU in the GPU's place (as in tests/test_calibrate_cuda.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest

from pipeline import activations_cuda
from pipeline.consistency.measure import Measured, measure_on, measure_on_cpu, measure_on_cuda
from pipeline.consistency.work import Work
from pipeline.core.errors import InputError
from scripts import gpu_nccl
from tests.plugins import fake_cuda
from tests.test_calibrate import TENSORS, Recorded, batches, data, network, poisoned
from tests.test_calibrate_cuda import cuda, expected  # noqa: F401

pytestmark = pytest.mark.skipif(fake_cuda.compiler() is None, reason="needs g++ to run the kernels on the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


class Rank:
    """The group as :func:`measure_on_cuda` sees it."""

    local_rank = 0

    def __init__(self) -> None:
        self.checks = 0

    def check(self) -> None:
        self.checks += 1


def measure(model: Path, x: np.ndarray, on_nonfinite: str = "error", **more: Any) -> Measured:
    work = Work(model, TENSORS, cast(Any, None), tuple(range(len(x))), (), on_nonfinite=on_nonfinite)
    progress = more.get("progress") or Recorded()
    return measure_on("cuda")(work, batches(x), cast(Any, more.get("rank") or Rank()), cast(Any, progress))


def test_which_device() -> None:
    assert measure_on("cpu") is measure_on_cpu
    assert measure_on("cuda") is measure_on_cuda


def test_statistics_are_those_of_the_activations(folder: Path) -> None:
    model, x = network(folder), data(18)
    rank, progress = Rank(), Recorded()
    found = measure(model, x, rank=rank, progress=progress)
    assert found.statistics == expected(model, x)
    assert (found.batches, found.skipped, found.samples) == ([0, 1, 2, 3, 4], [], 18)
    assert (rank.checks, progress.steps) == (5, 18)


def test_a_rank_without_batches(folder: Path) -> None:
    found = measure(network(folder), data(0))
    assert not any(statistics.elements for statistics in found.statistics.values())
    assert (found.batches, found.samples) == ([], 0)


def test_nonfinite(folder: Path) -> None:
    model, x = network(folder), poisoned(np.nan, 9)
    with pytest.raises(InputError, match=r"tensor 'x' has 1 NaN and 0 infinite values in batch 2 \(samples 8 to 11\)"):
        measure(model, x)
    progress = Recorded()
    found = measure(model, x, "skip", progress=progress)
    assert (found.batches, found.skipped, found.samples) == ([0, 1, 3, 4], [2], 16)
    assert found.statistics == expected(model, data(), without=(2,))
    (warning,) = progress.warnings
    assert warning.endswith("in batch 2 (samples 8 to 11); no weight of the model holds one; the batch is skipped")


def test_the_ranks_own_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int] = []

    class Stop(Exception):
        pass

    def passes(*_: Any, device: int, **__: Any) -> Any:
        devices.append(device)
        raise Stop

    monkeypatch.setattr(activations_cuda, "CudaActivationPass", passes)
    with pytest.raises(Stop):
        measure(network(folder), data(4), rank=SimpleNamespace(local_rank=3))
    assert devices == [3]


def test_no_cuda_provider(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_cuda, "_PROVIDER", "CUDAExecutionProvider")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(InputError, match="needs onnxruntime's CUDA provider, this onnxruntime has none"):
        measure(network(folder), data(4))


def test_the_comparison_that_the_script_for_gpu_machines_makes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(folder), data(gpu_nccl.BITS_BATCHES * gpu_nccl.FEW_BATCH)
    assert gpu_nccl.same_bits(model, list(TENSORS), x, 0) == {"tensors": len(TENSORS), "different": []}
    monkeypatch.setattr("calibrators.accumulate.add_batch", lambda *_: None)
    assert gpu_nccl.same_bits(model, list(TENSORS), x, 0)["different"] == list(TENSORS)
