"""The script that measures calibration on a GPU, with this CPU in the GPU's place: what it runs, and how it judges."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrators import TensorStatistics, accumulate
from scripts import gpu_calibration
from scripts.gpu_calibration import BITS_BATCH, Clock, Model, bits, device_seconds, kernel, passes
from tests.plugins import fake_cuda
from tests.test_calibrate import TENSORS, data, network
from tests.test_calibrate_cuda import cuda  # noqa: F401

pytestmark = pytest.mark.skipif(fake_cuda.compiler() is None, reason="needs g++ to run the kernels on the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


def test_kernel_and_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_calibration, "REPEATED_IMAGES", 4)
    monkeypatch.setattr(gpu_calibration, "device_seconds", partial(device_seconds, rounds=1, calls=1))
    path, tensors, clock = network(folder), list(TENSORS), Clock(-1.0)
    model = Model(path, tensors, data(4))
    try:
        found = kernel(model, 2, clock)
        assert (found["tensors"], found["different"]) == (len(tensors), [])
        assert found["bytes"] == sum(array.elements * 4 for array in model.own.bind(model.feeds(2)).arrays)
        assert found["tb_s"] == pytest.approx(found["bytes"] / found["ms"] / 1e9)
        timed = passes(model, 2, clock, rounds=5)
        assert timed["ratio"]["plain"] == 1.0
        assert {mode: len(each) for mode, each in timed["all"].items()} == {
            "plain": 3, "captured": 3, "with statistics": 3,
        }, "no budget is left: the least number of rounds"  # fmt: skip
        monkeypatch.setattr("calibrators.accumulate.add_batch", lambda *_: None)
        assert kernel(model, 2, clock)["different"] == tensors
    finally:
        model.close()


def test_bits(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_calibration, "BITS_BATCHES", 3)
    path, tensors, x = network(folder), list(TENSORS), data(3 * BITS_BATCH)
    assert bits(path, tensors, x, Clock(1.0))["different"] == []
    assert f"{len(tensors)} tensors, the same bits as on the CPU" in capsys.readouterr().out
    right = accumulate.add_batch

    def forgetful(statistics: TensorStatistics, values: np.ndarray, index: int) -> None:
        if index != 4:
            right(statistics, values, index)

    monkeypatch.setattr(accumulate, "add_batch", forgetful)
    assert bits(path, tensors, x, Clock(1.0))["different"] == tensors
    assert f"{len(tensors)} tensors DIFFER, such as {tensors[0]!r}" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [[], ["a"]])
@pytest.mark.parametrize("kind", ["kernel", "bits"])
def test_run_tells_whether_bits_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, wrong: list[str]
) -> None:
    def unpack(_: Path, name: str, out: Path) -> tuple[Path, list[str]]:
        return network(folder).rename(out / f"{name}.onnx"), list(TENSORS)

    def found(name: str) -> Any:
        return lambda *_: {"different": wrong if name == kind else []}

    monkeypatch.setattr(gpu_calibration, "unpack", unpack)
    monkeypatch.setattr(gpu_calibration, "photographs_of", lambda *_: data(4))
    for name in ("kernel", "passes", "bits"):
        monkeypatch.setattr(gpu_calibration, name, found(name))
    assert gpu_calibration.run(tmp_path, tmp_path / "out", rounds=3, budget_s=60.0) is not bool(wrong)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {name: len(each) for name, each in results.items()} == {"kernel": 4, "passes": 4, "bits": 2}
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["results.json"]
