"""FP16 tensors that overflow on a card are seen by the verification, and kept from it by the build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from pipeline import verify
from pipeline.cli.build import command
from pipeline.compare.config import CompareConfig
from pipeline.compare.preparation import Preparation
from pipeline.compare.variants import expand
from pipeline.config import PlacementConfig, Profile
from pipeline.core.errors import CheckFailed
from pipeline.core.ort import make_session
from pipeline.core.progress import SILENT
from pipeline.data import split
from pipeline.data.batching import Batch
from pipeline.errors.graphs import Graph
from pipeline.overflow import half_tensors
from pipeline.placement import PlacementPlan
from pipeline.placement.explain import load_explained
from pipeline.placement.graph import load_graph
from pipeline.placement.half import to_half
from tests.honest import evaluate
from tests.placement.tiny import Tiny

SHAPE = (16, 8, 8)


def network(folder: Path, *outputs: str) -> Path:
    """conv "small" to 8 channels, "large" a thousand times larger than it, a Sqrt, and what it pools."""
    net = Tiny()
    y = net.conv(net.input("x", "n", *SHAPE), "small", 16, 8)
    net.constant("w", np.abs(net.random.standard_normal((8, 8, 3, 3))) * 1e3)
    large = net.op("Conv", [y, "w"], "large", pads=[1] * 4)
    root = net.op("Sqrt", [net.op("Abs", [large], "abs")], "root")
    net.weights("w2", 8, 4)
    net.op("Gemm", [net.op("Flatten", [net.op("GlobalAveragePool", [root], "pool")], "flat"), "w2"], "y")
    return net.save(folder, "y", *outputs)


def images(count: int, scale: float, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(seed).standard_normal((count, *SHAPE)) * scale).astype(np.float32)


def checked(folder: Path, path: Path, batches: list[Batch], **options: Any) -> verify.VerifyResult:
    """The graph with FP16 in it, made without ranges, verified."""
    model = load_graph(path)
    to_half(model, **options)
    onnx.save(ir.to_proto(model), folder / "half.onnx")
    return verify.run(path, folder / "half.onnx", PlacementPlan(), batches, folder=folder)


def batch(values: np.ndarray[Any, Any], first: int = 40) -> Batch:
    return Batch(0, tuple(range(first, first + len(values))), {"x": values})


def test_an_overflow_that_onnxruntime_hides_is_an_error(tmp_path: Path) -> None:
    """It names the first tensor, the sample among sound ones, and its float32 value."""
    path = network(tmp_path)
    values = images(5, 0.1)
    values[3] *= 1000
    hidden = load_graph(path)
    to_half(hidden)
    proto = ir.to_proto(hidden)
    assert np.isfinite(make_session(proto, optimise=False).run(None, {"x": values})[0]).all()
    assert not np.isfinite(evaluate(proto, {"x": values})[0]).all()
    (large,) = make_session(path, capture=["large"]).run(["large"], {"x": values})
    beyond = large[3][np.abs(large[3]) >= 65520][0]
    with pytest.raises(CheckFailed) as caught:
        checked(tmp_path, path, [batch(values)])
    assert caught.value.message.startswith(
        f"tensor 'large' overflows in FP16, which ends at 65504, for sample 43: {beyond:.4g} there in float32."
    )
    assert "calibrate on data that reach as far as this sample" in (caught.value.remedy or "")
    assert "leave --precision fp16 out" in (caught.value.remedy or "")
    assert checked(tmp_path, path, [batch(values[:3])]).samples == 3


def test_the_last_value_that_fits_and_the_first_that_does_not(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("w", np.ones((1, 16)))
    net.op("Gemm", [net.input("x", "n", 16), "w"], "y", transB=1)
    path = net.save(tmp_path, "y")
    for value, sound in ((65519.0, True), (65520.0, False)):
        values = np.zeros((2, 16), np.float32)
        values[1, :2] = 60000.0, value - 60000.0
        if sound:
            checked(tmp_path, path, [batch(values)])
        else:
            with pytest.raises(CheckFailed, match=r"'y_fp16' overflows in FP16, .* for sample 41: 6.552e\+04 there"):
                checked(tmp_path, path, [batch(values)])


def test_infinite_in_the_float_network_too_is_none(tmp_path: Path) -> None:
    """A mask of -inf, as input and through the nodes that read it; beside it, an overflow is still seen."""
    net = Tiny()
    y = net.conv(net.input("x", "n", *SHAPE), "conv", 16, 16)
    net.conv(net.op("Softmax", [net.op("Add", [y, net.input("m", "n", 1, 1, 8)], "masked")], "p", axis=-1), "y", 16, 16)
    path = net.save(tmp_path, "y")
    mask = np.zeros((3, 1, 1, 8), np.float32)
    mask[..., 6:] = -np.inf
    values = images(3, 1.0)
    sound = Batch(0, (0, 1, 2), {"x": values, "m": mask})
    assert checked(tmp_path, path, [sound]).outputs[0].relative_l2_mean < 0.01  # type: ignore[operator]
    wrong = mask.copy()
    wrong[1, 0, 0, 0] = -1e9
    with pytest.raises(CheckFailed, match=r"tensor 'm_fp16' overflows in FP16, .* sample 1: -1e\+09 there"):
        checked(tmp_path, path, [Batch(0, (0, 1, 2), {"x": values, "m": wrong})])


def test_an_output_in_float16_that_overflows(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("k", 1000.0)
    net.op("Exp", [net.conv(net.input("x", "n", *SHAPE), "conv", 16, 16)], "y")
    path = net.save(tmp_path, "y")
    with pytest.raises(CheckFailed, match="tensor 'y' overflows in FP16") as caught:
        checked(tmp_path, path, [batch(images(2, 10.0))], nodes=False, outputs=True)
    assert caught.value.remedy == "keep this output float32: leave --fp16-io outputs (both) out"


def test_static_batches(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("w", np.full((8, 16, 1, 1), 1e4))
    net.op("Conv", [net.input("x", 2, *SHAPE), "w"], "y")
    path = net.save(tmp_path, "y")
    values = images(4, 0.01)
    values[2] *= 1000
    halves = [Batch(0, (0, 1), {"x": values[:2]}), Batch(1, (2, 3), {"x": values[2:]})]
    checked(tmp_path, path, halves[:1])
    with pytest.raises(CheckFailed, match="for sample 2:"):
        checked(tmp_path, path, halves)


def test_which_tensors_are_float16(tmp_path: Path) -> None:
    model = load_graph(network(tmp_path))
    to_half(model)
    assert half_tensors(Graph(ir.to_proto(model))) == (
        "x_fp16", "small", "large", "abs", "root_fp16", "pool", "flat", "y_fp16",
    )  # fmt: skip
    assert half_tensors(Graph(network(tmp_path))) == ()


def build(model: Path, data: Path, out: Path, *more: str) -> Any:
    profile = "x=1x16x8x8,4x16x8x8,8x16x8x8"
    arguments = [str(model), "--data", str(data), "--out", str(out), "--target", "onnx", "--profile", profile]
    return CliRunner().invoke(command, [*arguments, "--precision", "fp16", *more])


def test_a_build_keeps_what_overflows_in_float32(tmp_path: Path) -> None:
    """On the data that it calibrates on; again it is taken from the cache; --calibration FILE makes no difference."""
    path, data = network(tmp_path), tmp_path / "data.npy"
    np.save(data, images(24, 10.0))
    found = build(path, data, tmp_path / "out")
    assert found.exit_code == 0, found.output
    _, _, types = load_explained(tmp_path / "out" / "placement.json", tmp_path / "out" / "scales.json")
    assert types.fp16 == ("small", "pool", "flat", "y")
    assert types.not_fp16["large"].startswith("'large' reaches ")
    model = onnx.load(tmp_path / "out" / "model.int8.onnx")
    feeds = {"x": images(2, 10.0, seed=9)}
    (wanted,) = make_session(path).run(None, feeds)
    assert np.linalg.norm(evaluate(model, feeds)[0] - wanted) < 5e-3 * np.linalg.norm(wanted)
    assert "magnitudes: unchanged" in build(path, data, tmp_path / "out").output
    taken = build(path, data, tmp_path / "two", "--calibration", str(tmp_path / "out" / "calibration.npz"))
    assert taken.exit_code == 0, taken.output
    assert (tmp_path / "two" / "model.int8.onnx").read_bytes() == (tmp_path / "out" / "model.int8.onnx").read_bytes()


def test_a_build_fails_where_samples_reach_further_than_calibration_has_seen(tmp_path: Path) -> None:
    path, data = network(tmp_path), tmp_path / "data.npy"
    values = images(24, 1e-2)
    np.save(data, values)
    assert build(path, data, tmp_path / "sound", "--samples", "12").exit_code == 0
    _, _, types = load_explained(tmp_path / "sound" / "placement.json", tmp_path / "sound" / "scales.json")
    assert "large" in types.fp16
    aside = min(split(24, 12, None, labelled=False).verification)
    values[aside] *= 1e5
    np.save(data, values)
    found = build(path, data, tmp_path / "out", "--samples", "12")
    assert found.exit_code == 1
    text = " ".join(found.output.split())
    assert f"tensor 'large' overflows in FP16, which ends at 65504, for sample {aside}" in text
    assert not (tmp_path / "out" / "manifest.json").exists()


def int8_and_half(folder: Path) -> Path:
    """Two INT8 convolutions, and behind an Exp two float ones of few channels, the second of which is "large"."""
    net = Tiny()
    y = net.conv(net.conv(net.input("x", "n", *SHAPE), "a", 16, 32), "b", 32, 32)
    y = net.op("Exp", [net.op("Tanh", [y], "tanh")], "exp")
    net.constant("w", np.abs(net.random.standard_normal((8, 8, 3, 3))) * 1e4)
    large = net.op("Conv", [net.conv(y, "tiny", 32, 8), "w"], "large", pads=[1] * 4)
    net.op("Softmax", [net.op("Sqrt", [net.op("Abs", [large], "abs")], "root")], "y", axis=1)
    return net.save(folder, "y")


def test_a_point_of_a_search_is_made_with_the_ranges_too(tmp_path: Path) -> None:
    path, data = int8_and_half(tmp_path), tmp_path / "data.npy"
    np.save(data, images(24, 1.0))
    found = build(path, data, tmp_path / "out", "--min-sqnr", "1dB", "--samples", "12")
    assert found.exit_code == 0, found.output
    plan, _, types = load_explained(tmp_path / "out" / "placement.json", tmp_path / "out" / "scales.json")
    assert "b" in plan.quantized_nodes
    assert "tiny" in types.fp16
    assert types.not_fp16["large"].startswith("'large' reaches ")


def test_a_comparison_makes_its_graphs_with_the_ranges_too(tmp_path: Path) -> None:
    path, data = int8_and_half(tmp_path), tmp_path / "data.npy"
    np.save(data, images(24, 1.0))
    config = CompareConfig(
        model=str(path), data=str(data), out=tmp_path / "out", samples=12,
        profiles=(Profile.parse("x=1x16x8x8,4x16x8x8,8x16x8x8"),), placement=PlacementConfig(precision="fp16"),
    )  # fmt: skip
    preparation = Preparation(config, progress=SILENT)
    with preparation.runner.locked():
        preparation.begin()
        (candidate,) = preparation.candidates(expand(["minmax"]))
    model = onnx.load(candidate.files.path)
    halves = half_tensors(Graph(model))
    assert "tiny" in halves
    assert "large" not in halves
