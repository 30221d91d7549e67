"""`--device cuda` on a machine that lacks something for it: refused before the model is looked at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from pipeline import activations_cuda, export
from pipeline.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.onnx, two convolutions, and data.npy."""
    folder = tmp_path_factory.mktemp("device")
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(0.1 * random.standard_normal((16, 16, 3, 3)).astype(np.float32), f"w{k}")
        for k in range(2)
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w1"], ["y"], "second", pads=[1] * 4),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 16, 8, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    np.save(folder / "data.npy", random.standard_normal((40, 16, 8, 8)).astype(np.float32))
    return folder


COMMANDS = ("calibrate", "build", "compare")


@pytest.fixture(params=COMMANDS)
def refused(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[int, str]]:
    """The command with `--device cuda`, which must end before the model is looked at: exit code and what is said."""

    def run() -> tuple[int, str]:
        monkeypatch.setattr(export, "run", lambda *_, **__: pytest.fail("exported"))
        arguments = [request.param, str(folder / "model.onnx"), "--data", str(folder / "data.npy"), "--device", "cuda"]
        arguments += ["--profile", "x=1x16x8x8,4x16x8x8,8x16x8x8", "--out", str(tmp_path / "out")]
        arguments += [] if request.param == "calibrate" else ["--target", "onnx"]
        result = CliRunner().invoke(main, arguments)
        assert isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, " ".join(result.output.split())

    return run


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])


def test_without_a_cuda_provider(refused: Callable[[], tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    code, said = refused()
    assert code == 2
    assert "calibration on a CUDA device needs onnxruntime's CUDA provider, this onnxruntime has none" in said
    assert "pip install 'quantize-trt[gpu]', or calibrate with --device cpu" in said


def test_without_pycuda(
    refused: Callable[[], tuple[int, str]], provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.delitem(sys.modules, "pycuda.driver", raising=False)
    code, said = refused()
    assert code == 2
    assert "calibration on a CUDA device needs the package 'pycuda.driver', which cannot be imported" in said
    assert "pip install 'quantize-trt[gpu]'" in said


def test_without_a_card_or_its_compiler(
    refused: Callable[[], tuple[int, str]], provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pycuda", "pycuda.driver"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(activations_cuda, "no_device_reason", lambda: "the NVIDIA driver finds no device")
    code, said = refused()
    assert code == 1
    assert "calibration on a CUDA device needs one: the NVIDIA driver finds no device" in said
    assert "calibrate with --device cpu" in said
    monkeypatch.setattr(activations_cuda, "no_device_reason", lambda: None)
    monkeypatch.setattr(activations_cuda.shutil, "which", lambda name: None)
    code, said = refused()
    assert code == 1
    assert "calibration on a CUDA device compiles its kernels, and there is no nvcc on PATH" in said


def test_what_is_there_is_taken(provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pycuda", "pycuda.driver"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(activations_cuda, "no_device_reason", lambda: None)
    monkeypatch.setattr(activations_cuda.shutil, "which", lambda name: "/usr/local/cuda/bin/nvcc")
    activations_cuda.check_device("cuda")
    activations_cuda.check_device("cpu")


def test_the_device_of_a_build_can_be_configured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    config = tmp_path / "build.yaml"
    config.write_text(
        f"model: {folder / 'model.onnx'}\ndata: {folder / 'data.npy'}\nout: {tmp_path / 'out'}\ndevice: cuda\n"
        "targets: [onnx]\nprofiles: ['x=1x16x8x8,4x16x8x8,8x16x8x8']\n"
    )
    refused = CliRunner().invoke(main, ["build", "-c", str(config)])
    assert refused.exit_code == 2
    assert "needs onnxruntime's CUDA provider" in refused.output
    done = CliRunner().invoke(main, ["build", "-c", str(config), "--device", "cpu", "--quiet"])
    assert done.exit_code == 0, done.output
