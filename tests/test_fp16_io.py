"""`--fp16-io`: the INT8 graph's inputs and outputs in float16, and everything that feeds and reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from pipeline.artifact import Artifact
from pipeline.cli.build import command as build
from pipeline.cli.compare import command as compare
from pipeline.cli.errors import command as errors
from pipeline.cli.explain import command as explain
from pipeline.cli.inspect import command as inspect
from pipeline.cli.verify import command as verify
from pipeline.core.ort import make_session
from tests.compare.networks import classifier, graph, images

PROFILE = "x=1x3x8x8,4x3x8x8,8x3x8x8"
HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT


def run(command: click.Command, *arguments: str | Path) -> str:
    result = CliRunner().invoke(command, [str(item) for item in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def document(command: click.Command, *arguments: str | Path) -> Any:
    return json.loads(CliRunner().invoke(command, [str(item) for item in (*arguments, "--json")]).stdout)


def types(model: Path) -> list[int]:
    loaded = onnx.load(model)
    return [value.type.tensor_type.elem_type for value in (*loaded.graph.input, *loaded.graph.output)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    classifier(folder / "m.onnx")
    np.save(folder / "data.npy", images(48))
    return folder


@pytest.fixture(scope="module")
def arguments(source: Path) -> list[str | Path]:
    return [source / "m.onnx", "--data", source / "data.npy", "--profile", PROFILE, "--target", "onnx"]


@pytest.fixture(scope="module", params=["inputs", "outputs", "both"])
def built(
    request: pytest.FixtureRequest, arguments: list[str | Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("built") / "out"
    run(build, *arguments, "--fp16-io", request.param, "--out", out)
    return request.param, out


@pytest.fixture(scope="module")
def plain(arguments: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "out"
    run(build, *arguments, "--out", out)
    return out


def figures(folder: Path) -> Any:
    return Artifact.open(folder).manifest.verification["outputs"][0]


def test_types_names_and_figures(built: tuple[str, Path], plain: Path) -> None:
    """The data, the FP32 model and its recorded outputs stay float32; the figures are those of float32 but for the
    rounding of inputs and outputs."""
    io, out = built
    manifest = Artifact.open(out).manifest
    half_in, half_out = io in ("inputs", "both"), io in ("outputs", "both")
    assert types(out / "model.int8.onnx") == [HALF if half_in else FULL, HALF if half_out else FULL]
    assert types(out / "model.fp32.onnx") == [FULL, FULL]
    assert manifest.fp16_io == (("x",) if half_in else ()) + (("scores",) if half_out else ())
    assert (manifest.half_inputs, manifest.half_outputs) == (half_in, half_out)
    assert [spec.dtype for spec in (*manifest.inputs, *manifest.outputs)] == ["float32"] * 2
    assert (plain / "scales.json").read_bytes() == (out / "scales.json").read_bytes()
    assert abs(figures(out)["relative_l2_mean"] - figures(plain)["relative_l2_mean"]) < 2e-3
    assert figures(out)["relative_l2_mean"] > 0.0
    with np.load(out / "samples.npz") as kept, np.load(plain / "samples.npz") as full:
        assert kept["inputs/x"].dtype == kept["fp32/scores"].dtype == np.float32
        assert kept["int8/scores"].dtype == (np.float16 if half_out else np.float32)
        feeds = {"x": kept["inputs/x"].astype(np.float16) if half_in else kept["inputs/x"]}
        (found,) = make_session(out / "model.int8.onnx", optimise=False).run(["scores"], feeds)
        assert np.array_equal(found, kept["int8/scores"])
        distance = np.linalg.norm(found.astype(np.float32) - full["int8/scores"])
        assert 0 < distance < 0.02 * np.linalg.norm(full["int8/scores"])


def test_commands_that_read_the_artifact(built: tuple[str, Path], tmp_path: Path) -> None:
    _, out = built
    assert "as written" in run(verify, out)
    float16 = ", ".join(Artifact.open(out).manifest.fp16_io)
    assert f"float16 {float16}" in " ".join(run(inspect, out).split())
    assert f"- float16: `{float16.replace(', ', '`, `')}`" in (out / "reports" / "summary.md").read_text()
    report = document(errors, out, "--out", tmp_path / "report")
    (output,) = report["outputs"].values()
    assert output["relative_l2_mean"] == pytest.approx(figures(out)["relative_l2_mean"], rel=1e-6)
    assert report["layers"] == Artifact.open(out).manifest.verification["layers"]


def test_a_search_for_mixed_precision_measures_the_graph_that_is_built(
    arguments: list[str | Path], tmp_path: Path
) -> None:
    run(build, *arguments, "--fp16-io", "both", "--min-sqnr", "20dB", "--search-samples", "8", "--out", tmp_path / "o")
    assert types(tmp_path / "o" / "model.int8.onnx") == [HALF, HALF]
    assert figures(tmp_path / "o")["relative_l2_mean"] < 0.1


def test_an_experiment_with_noise_and_shifts(source: Path, arguments: list[str | Path], tmp_path: Path) -> None:
    asked = [*arguments[:5], "--calibrators", "minmax,mse", "--fp16-io", "both", "--shift-sigma", "0.05"]
    half = document(compare, *asked, "--out", tmp_path / "out", "--workers", "1")
    full = document(
        compare,
        *(item for item in asked if item not in ("--fp16-io", "both")),
        "--out",
        tmp_path / "full",
        "--workers",
        "1",
    )
    rows = [
        [
            (row["calibrator"], row["shift"], row["relative_l2"])
            for row in each["rows"]
            if row["relative_l2"] is not None
        ]
        for each in (half, full)
    ]
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]
    assert len(rows[0]) == 4
    for (*_, one), (*_, other) in zip(*rows, strict=True):
        assert one != other
        assert one == pytest.approx(other, rel=0.1)


def test_nothing_to_make_float16_is_said(tmp_path: Path) -> None:
    """Token numbers stay integers."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="embed"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], name="product"),
    ]
    generator = np.random.default_rng(0)
    constants = {name: generator.standard_normal((32, 32)).astype(np.float32) for name in ("table", "w")}
    model = graph(nodes, {"ids": ["N", 8]}, {"y": ["N", 8, 32]}, constants)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    onnx.save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "data.npy", generator.integers(0, 32, (24, 8)))
    said = run(
        build, tmp_path / "m.onnx", "--data", tmp_path / "data.npy", "--profile", "ids=1x8,4x8,8x8", "--target", "onnx",
        "--fp16-io", "both", "--out", tmp_path / "out",
    )  # fmt: skip
    assert "--fp16-io both: no float32 input of this model can be float16, its inputs stay as they are" in " ".join(
        said.split()
    )
    assert types(tmp_path / "out" / "model.int8.onnx") == [TensorProto.INT64, HALF]
    assert Artifact.open(tmp_path / "out").manifest.fp16_io == ("y",)


def test_a_value_beyond_float16_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    data = images(24)
    data[20:] *= 1e5
    np.save(tmp_path / "data.npy", data)
    result = CliRunner().invoke(
        build,
        [
            str(source / "m.onnx"), "--data", str(tmp_path / "data.npy"), "--profile", PROFILE, "--target", "onnx",
            "--fp16-io", "inputs", "--out", str(tmp_path / "out"),
        ],
    )  # fmt: skip
    assert result.exit_code == 2
    assert "input 'x' has the value" in result.output
    assert "leave --fp16-io inputs (both) out" in " ".join(result.output.split())


def test_explain_says_what_computes_in_fp16_and_why_others_do_not(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    run(
        build, source / "m.onnx", "--data", source / "data.npy", "--profile", PROFILE, "--target", "onnx",
        "--precision", "fp16", "--exclude", "conv2", "--exclude", "linear", "--out", out,
    )  # fmt: skip
    text = run(explain, out)
    assert "conv2  Conv, FP16, rule" in text
    assert "conv1  Conv, INT8, rule" in text
    nodes = {item["node"]: item for item in document(explain, out)}
    assert nodes["conv2"]["fp16"]
    assert not nodes["conv1"]["fp16"]
    assert nodes["linear"]["fp16"] or nodes["linear"]["not_fp16"]


@pytest.mark.parametrize("io", ["inputs", "both"])
def test_a_rtx_engine_takes_them(io: str, source: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    out = tmp_path / "out"
    arguments: list[str | Path] = [
        source / "m.onnx",
        "--data",
        source / "data.npy",
        "--profile",
        PROFILE,
        "--target",
        "rtx",
    ]
    run(build, *arguments, "--fp16-io", io, "--precision", "fp16", "--out", out)
    assert Artifact.open(out).manifest.targets["rtx"]["plan_bytes"] > 0
