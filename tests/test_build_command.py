"""`quantize build` from end to end on a small trained-like network: artifact, cache, determinism, kills, bad input."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forked_cli import quantize
from tests.once import once

PROFILE = "x=1x3x16x16,4x3x16x16,8x3x16x16"
MODEL = """
import torch


def net():
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU())

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU())
            self.block = block
            self.head = torch.nn.Linear(16, 32)

        def forward(self, x):
            y = self.stem(x)
            return self.head((y + self.block(y)).mean((2, 3)))

    return Net()
"""


def fresh(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter that has imported nothing."""
    command = [sys.executable, "-m", "pipeline.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with net.py, its export net.onnx and data.npz (24 samples)."""
    return once(tmp_path_factory, "build-inputs", write_inputs)


def write_inputs(folder: Path) -> None:
    (folder / "net.py").write_text(MODEL)
    samples = np.random.default_rng(0).normal(size=(24, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "data.npz", x=samples)
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "import net, torch\n"
        f"torch.onnx.export(net.net().eval(), torch.zeros(1, 3, 16, 16), {str(folder / 'net.onnx')!r},\n"
        "    input_names=['x'],\n"
        "    output_names=['y'], dynamic_axes={'x': {0: 'N'}, 'y': {0: 'N'}}, opset_version=17, dynamo=False)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)


def build_args(inputs: Path, out: Path, *more: str | Path, model: str = "net.onnx") -> list[str | Path]:
    return [
        "build", f"{inputs / model}", "--data", inputs / "data.npz", "--out", out, "--profile", PROFILE,
        "--target", "onnx", "--samples", "16", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def built(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(folder: Path) -> None:
        done = fresh(*build_args(inputs, folder / "net"))
        assert done.returncode == 0, done.stderr

    return once(tmp_path_factory, "build-built", build) / "net"


def test_the_artifact_is_complete(built: Path) -> None:
    for name in (
        "manifest.json", "model.fp32.onnx", "model.int8.onnx", "scales.json", "calibration.cache", "calibration.npz",
        "samples.npz", "placement.json", "engines/onnx/build.json", "reports/errors.csv", "reports/errors.png",
        "reports/summary.md",
    ):  # fmt: skip
        assert (built / name).is_file(), name
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest["data"]["calibration_samples"] == 16
    assert manifest["data"]["verification_samples"] == 8
    assert manifest["data"]["held_aside"]
    assert manifest["calibration"]["calibrator"] == "mse"
    assert 0 < manifest["verification"]["outputs"][0]["relative_l2_mean"] < 1
    scales = json.loads((built / "scales.json").read_text())
    assert scales["schema"] == 1
    assert "x" in scales["tensors"]
    assert set(scales["tensors"]["x"]) >= {"amax", "scale", "calibrator", "samples", "min", "max", "zeros"}
    assert scales["weights"]
    assert fresh("verify", built).returncode == 0


def test_a_second_build_gives_the_same_bytes_and_runs_nothing(inputs: Path, built: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    done = quantize(*build_args(inputs, other, "--batch-size", "8", "--json"))
    assert done.returncode == 0, done.stderr
    for name in ("model.int8.onnx", "scales.json"):
        assert (other / name).read_bytes() == (built / name).read_bytes(), name
    again = quantize(*build_args(inputs, other, "--batch-size", "8"))
    assert again.returncode == 0
    for stage in ("export", "prepare", "calibrate", "quantize", "build-onnx", "verify"):
        assert f"{stage}: unchanged" in again.stderr, stage


def test_json_summary_and_quiet(inputs: Path, built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "net")
    done = fresh(*build_args(inputs, tmp_path / "net", "--json", "--quiet"))
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["calibration"]["calibrator"] == "mse"


def test_another_calibrator_takes_no_other_pass(inputs: Path, built: Path, tmp_path: Path) -> None:
    out = tmp_path / "net"
    shutil.copytree(built, out)
    done = quantize(*build_args(inputs, out, "--calibrator", "percentile", "--percentile", "99.0"))
    assert done.returncode == 0, done.stderr
    assert "calibrate: unchanged" in done.stderr
    assert json.loads((out / "manifest.json").read_text())["calibration"]["params"] == {"percentile": 99.0}
    from_file = quantize(
        *build_args(inputs, tmp_path / "mse", "--calibration", built / "calibration.npz", "--calibrator", "mse")
    )
    assert from_file.returncode == 0, from_file.stderr


def test_a_configuration_file_and_flags_over_it(inputs: Path, tmp_path: Path) -> None:
    config = tmp_path / "build.yaml"
    config.write_text(
        f"model: {inputs / 'net.onnx'}\ndata: {inputs / 'data.npz'}\nout: {tmp_path / 'net'}\nprofiles: ['{PROFILE}']\n"
        "targets: [onnx]\nsamples: 16\ncalibrator: {name: percentile, params: {percentile: 99.9}}\n"
    )
    done = quantize("build", "-c", config, "--calibrator", "minmax", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verification"]["outputs"][0]["relative_l2_mean"] < 0.05
    assert json.loads(done.stdout)["calibration"] == {
        "calibrator": "minmax", "params": {}, "batches": 2, "skipped_batches": 0, "given": False,
        "tensors": json.loads(done.stdout)["calibration"]["tensors"],
    }  # fmt: skip


@pytest.mark.slow
def test_a_pytorch_model_builds(inputs: Path, tmp_path: Path) -> None:
    model = f"{inputs / 'net.py'}:net"
    args = build_args(inputs, tmp_path / "net", "--input", "x:1x3x16x16:float32")
    args[1] = model
    done = fresh(*args, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"]["kind"] == "python"


def test_a_damaged_file_is_found(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "net"
    shutil.copytree(built, out, ignore=shutil.ignore_patterns(".work"))
    data = bytearray((out / "model.int8.onnx").read_bytes())
    data[-1] ^= 1
    (out / "model.int8.onnx").write_bytes(data)
    done = quantize("verify", out)
    assert done.returncode == 1
    assert "model.int8.onnx: SHA-256 is" in done.stderr


def test_another_models_artifact_is_left_alone(inputs: Path, built: Path, tmp_path: Path) -> None:
    import onnx

    out = tmp_path / "net"
    shutil.copytree(built, out)
    before = (out / "manifest.json").read_bytes()
    model = onnx.load(inputs / "net.onnx")
    model.doc_string = "another"
    onnx.save(model, tmp_path / "net.onnx")
    args = build_args(inputs, out)
    args[1] = tmp_path / "net.onnx"
    done = quantize(*args)
    assert done.returncode == 2
    assert "of another model" in done.stderr
    assert (out / "manifest.json").read_bytes() == before
    assert quantize("verify", out).returncode == 0
    assert quantize(*args, "--force").returncode == 0


def test_kill_at_random_moments_then_finish(inputs: Path, built: Path, tmp_path: Path) -> None:
    """Killed builds never leave anything that passes for finished, and the last one ends with the same bytes."""
    out = tmp_path / "net"
    chance = random.Random(7)
    command = [sys.executable, "-m", "pipeline.cli", *map(str, build_args(inputs, out, "--quiet"))]
    for _ in range(5):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(chance.uniform(0.3, 4.0))
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if (out / "manifest.json").exists():
            assert quantize("verify", out).returncode == 0
    done = quantize(*build_args(inputs, out))
    assert done.returncode == 0, done.stderr
    assert quantize("verify", out).returncode == 0
    for name in ("model.int8.onnx", "scales.json"):
        assert (out / name).read_bytes() == (built / name).read_bytes(), name


def _bad_data(folder: Path, **arrays: np.ndarray[Any, Any]) -> Path:
    np.savez(folder / "bad.npz", **arrays)
    return folder / "bad.npz"


GOOD = np.zeros((8, 3, 16, 16), np.float32)


def _with_nan() -> np.ndarray[Any, Any]:
    array = GOOD.copy()
    array[5, 1, 2, 3] = np.nan
    return array


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": GOOD}, ["'y'", "known: x"]),
        ({"x": GOOD[:, :2]}, ["x", "3"]),
        ({"x": GOOD.astype("U1")}, ["x"]),
        ({"x": _with_nan()}, ["'x'", "sample 5", "nan", "1, 2, 3"]),
        ({"x": GOOD[:0]}, ["no"]),
    ],
    ids=["name", "shape", "dtype", "nan", "empty"],
)
def test_bad_data_is_refused(
    inputs: Path, tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]], words: list[str]
) -> None:
    done = quantize(*build_args(inputs, tmp_path / "net"), "--data", _bad_data(tmp_path, **arrays))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "net" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--profile", "x=8x3x16x16,4x3x16x16,8x3x16x16"], ["min 8", "opt 4"]),
        (["--profile", "x=1x3x16x16,4x3x20x16,8x3x20x16"], ["dimension 2", "'x'", "16"]),
        (["--profile", "z=1x3x16x16"], ["'z'", "known: x"]),
        (["--calibrator", "entrpy"], ["entropy"]),
        (["--exclude", "no-such-node"], ["no-such-node"]),
        (["--labels", "nowhere.csv"], ["nowhere.csv"]),
        (["--data", "nowhere"], ["nowhere"]),
        (["--opset", "3"], ["opset"]),
    ],
)
def test_bad_options_are_refused(inputs: Path, tmp_path: Path, more: list[str], words: list[str]) -> None:
    args = build_args(inputs, tmp_path / "net")
    if more[0] == "--profile":
        at = args.index("--profile")
        del args[at : at + 2]
    done = quantize(*args, *more)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("index,class_index\n0,1\n", "has no label for sample 1"),
        ("file,label\na.png,1\n", "has no column 'class_index'"),
        ("file,class_index\na.png,1\n", "have no file names"),
        ("class_index\n" + "1\n" * 23, "has 23 labels, the data have 24 samples"),
    ],
)
def test_labels_that_do_not_fit_are_refused_before_any_work(
    inputs: Path, tmp_path: Path, labels: str, said: str
) -> None:
    (tmp_path / "labels.csv").write_text(labels)
    done = quantize(*build_args(inputs, tmp_path / "net"), "--labels", tmp_path / "labels.csv")
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize("command", ["build", "compare", "calibrate"])
@pytest.mark.parametrize(
    ("preprocess", "said"),
    [
        (None, "no preprocessing is declared"),
        ("none;layout=nhwc", "the model takes the channels first"),
        ("none;resize=8x8", "has the shape (3, 8, 8), the model expects (3, 16, 16) float32 (as --input and --profile"),
    ],
)
def test_preprocessing_is_checked_before_any_work(
    inputs: Path, tmp_path: Path, command: str, preprocess: str | None, said: str
) -> None:
    """The model is code that cannot be loaded, which would be told if it were tried."""
    from PIL import Image

    (tmp_path / "net.py").write_text("raise OSError('loaded')\n")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "images" / "a.png")
    options = ["--data", tmp_path / "images", "--profile", "x=1x3x16x16,4x3x16x16,8x3x16x16"]
    options += ["--preprocess", preprocess] if preprocess else []
    out = tmp_path / "out" / "calibration.npz" if command == "calibrate" else tmp_path / "out"
    done = quantize(command, f"{tmp_path / 'net.py'}:make", *options, "--out", out)
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_labels_for_a_model_without_classes_are_refused_after_the_export(inputs: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(inputs / "net.onnx")
    pooled = next(node for node in model.graph.node if node.op_type == "Relu").output[0]
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(pooled, onnx.TensorProto.FLOAT, ["N", 16, 16, 16]))
    onnx.save(model, tmp_path / "maps.onnx")
    (tmp_path / "labels.csv").write_text("index,class_index\n" + "".join(f"{i},1\n" for i in range(24)))
    args = build_args(inputs, tmp_path / "net", "--labels", tmp_path / "labels.csv")
    args[1] = tmp_path / "maps.onnx"
    done = quantize(*args)
    assert done.returncode == 2, done.stderr
    assert "labels are given, but no output has one row of class scores per sample" in done.stderr
    assert "leave --labels out for this model" in done.stderr
    assert [path.name.partition("-")[0] for path in (tmp_path / "net" / ".work").iterdir() if path.is_dir()] == [
        "export"
    ]


def test_an_output_of_almost_zeros_is_said_and_recorded(inputs: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(inputs / "net.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(30), "thirty"))
    model.graph.node.append(onnx.helper.make_node("Sub", ["y", "thirty"], ["low"], "shift"))
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["low"], ["p"], "sigmoid"))
    model.graph.output[0].name = "p"
    onnx.save(model, tmp_path / "p.onnx")
    args = build_args(inputs, tmp_path / "net")
    args[1] = tmp_path / "p.onnx"
    done = quantize(*args)
    assert done.returncode == 0, done.stderr
    said = "output 'p': FP32 is almost zero in all of 8 samples"
    assert said in " ".join(done.stderr.split())
    manifest = json.loads((tmp_path / "net" / "manifest.json").read_text())
    assert any(text.startswith(said) for text in manifest["warnings"])
    (output,) = manifest["verification"]["outputs"]
    assert output["relative_l2_mean"] is None
    assert output["max_abs"] < 1e-6


def test_a_dynamic_input_without_profile_is_refused(inputs: Path, tmp_path: Path) -> None:
    args = build_args(inputs, tmp_path / "net")
    at = args.index("--profile")
    del args[at : at + 2]
    done = quantize(*args)
    assert done.returncode == 2
    assert "input 'x' is dynamic" in done.stderr


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "missing"])
def test_unreadable_models_are_refused(inputs: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "net.onnx"
    data = (inputs / "net.onnx").read_bytes()
    if damage != "missing":
        path.write_bytes({"truncated": data[: len(data) // 2], "garbage": b"\x07garbage" * 50, "empty": b""}[damage])
    args = build_args(inputs, tmp_path / "out")
    args[1] = path
    done = quantize(*args)
    assert done.returncode == 2, done.stderr
    assert "net.onnx" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unwritable_folder_is_refused(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = quantize(*build_args(inputs, tmp_path / "file" / "net"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_explained_and_the_next_run_finishes(inputs: Path, built: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        done = quantize(*build_args(inputs, disk / "net"))
        assert done.returncode == 2, done.stderr
        assert "no space left" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (disk / "net" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        done = quantize(*build_args(inputs, disk / "net"))
        assert done.returncode == 0, done.stderr
        assert (disk / "net" / "model.int8.onnx").read_bytes() == (built / "model.int8.onnx").read_bytes()
    finally:
        subprocess.run(["umount", "-l", disk], check=False)
