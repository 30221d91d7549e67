"""`--device cuda` on a machine whose onnxruntime has no CUDA provider."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

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


@pytest.mark.parametrize("command", ["calibrate", "build"])
def test_without_a_cuda_provider(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    arguments = [command, str(folder / "model.onnx"), "--data", str(folder / "data.npy"), "--device", "cuda"]
    arguments += ["--profile", "x=1x16x8x8,4x16x8x8,8x16x8x8", "--out", str(tmp_path / "out")]
    arguments += ["--target", "onnx"] if command == "build" else []
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "calibration on a CUDA device needs onnxruntime's CUDA provider, this onnxruntime has none" in result.output
    assert "pip install 'quantize-trt[gpu]', or calibrate with --device cpu" in " ".join(result.output.split())


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
