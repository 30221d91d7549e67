"""What a build says when something is wrong that used to be told late, twice, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from pipeline.artifact import Artifact, calibrator_text
from pipeline.cli.build import command
from pipeline.cli.calibrate import command as calibrate_command
from pipeline.cli.explain import command as explain_command
from pipeline.cli.inspect import command as inspect_command
from pipeline.config import Profile, load_config
from pipeline.core.errors import InputError
from pipeline.engine.profiles import samples_outside
from pipeline.onnxfile import load_model
from pipeline.prepare.names import one_line_names
from tests.compare.networks import classifier, graph, images, transformer

BIG = "x=1x3x8x8,4x3x8x8,8x3x8x8"


def built(model: Path, data: Path, out: Path, *more: str, profile: str = BIG) -> Any:
    arguments = [str(model), "--data", str(data), "--out", str(out), "--target", "onnx", "--profile", profile]
    return CliRunner().invoke(command, [*arguments, *more])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.save(tmp_path / "data.npy", images(24))
    return tmp_path / "data.npy"


def convolutions(path: Path) -> Path:
    """Nx3xHxW to Nx16xHxW: two convolutions, nothing between them."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["y"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["y", "w2"], ["z"], name="second", pads=[1, 1, 1, 1]),
    ]
    generator = np.random.default_rng(0)
    weights = {
        "w1": generator.standard_normal((32, 3, 3, 3)).astype(np.float32),
        "w2": generator.standard_normal((16, 32, 3, 3)).astype(np.float32),
    }
    onnx.save(graph(nodes, {"x": ["N", 3, "H", "W"]}, {"z": ["N", 16, "H", "W"]}, weights), path)
    return path


def changed(model: Path, name: str, value: float) -> Path:
    """The model with one number of the weight ``name`` replaced."""
    loaded = onnx.load(model)
    (tensor,) = [item for item in loaded.graph.initializer if item.name == name]
    array = numpy_helper.to_array(tensor).copy()
    array.flat[3] = value
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(loaded, model)
    return model


@pytest.mark.parametrize(("value", "held"), [(np.nan, "1 NaN"), (np.inf, "1 infinite values")])
def test_a_broken_weight_is_named(tmp_path: Path, data: Path, value: float, held: str) -> None:
    found = built(changed(convolutions(tmp_path / "m.onnx"), "w1", value), data, tmp_path / "out")
    assert found.exit_code == 2
    assert f"the weight 'w1' holds {held}" in " ".join(found.stderr.split())


@pytest.mark.parametrize("shape", [(3, 16, 12), (3, 6, 8)], ids=["larger", "smaller"])
def test_samples_outside_every_profile_are_warned_of(shape: tuple[int, ...], tmp_path: Path) -> None:
    convolutions(tmp_path / "m.onnx")
    np.save(tmp_path / "d.npy", np.random.default_rng(1).standard_normal((24, *shape)).astype(np.float32))
    found = built(tmp_path / "m.onnx", tmp_path / "d.npy", tmp_path / "out", "-q", profile=BIG)
    assert found.exit_code == 0, found.output
    text = (
        "18 of 18 calibration samples have shapes that no profile allows, most of them input 'x' with "
        f"{'x'.join(map(str, shape))}, where profile 0 allows 3x8x8 to 3x8x8 (the nearest of 1): the engine will see"
    )
    assert found.stderr.startswith(f"warning: {text}")  # also with --quiet
    (warning,) = [line for line in Artifact.open(tmp_path / "out").manifest.warnings if "profile" in line]
    assert warning.startswith(text)


def test_one_profile_that_holds_the_samples_is_enough() -> None:
    small, large = Profile.parse(BIG), Profile.parse("x=1x3x8x8,4x3x8x8,8x3x32x32")
    assert samples_outside((small, large), {(("x", (3, 16, 12)),): 4, (("x", (3, 8, 8)),): 1}) == ()
    assert len(samples_outside((small,), {(("x", (3, 16, 8)),): 4})) == 1
    assert samples_outside((), {(("x", (3, 16, 8)),): 4}) == ()
    assert samples_outside((small,), {}) == ()


def test_the_nearest_profile_of_the_commonest_shape_is_named() -> None:
    narrow, wide = Profile.parse("x=1x4,1x4,1x8;m=1x4,1x4,1x8"), Profile.parse("x=1x64,1x64,1x96;m=1x64,1x64,1x96")
    samples = {
        (("m", (48,)), ("x", (48,))): 5,
        (("m", (2,)), ("x", (2,))): 3,
        (("m", (8,)), ("x", (8,))): 20,
        (("m", (64,)), ("x", (8,))): 1,  # each fits some profile, and no profile takes both
    }
    (text,) = samples_outside((narrow, wide), samples)
    assert text.startswith(
        "9 of 29 calibration samples have shapes that no profile allows, most of them input 'x' with 48, where "
        "profile 1 allows 64 to 96; input 'm' with 48, where profile 1 allows 64 to 96 (the nearest of 2)"
    )
    (text,) = samples_outside((narrow,), {(("m", (4, 4)), ("x", (4, 4))): 1})
    assert "input 'x' with 4x4, where profile 0 allows 4 to 8" in text


def test_a_control_character_inside_the_model_is_replaced(tmp_path: Path, data: Path) -> None:
    model = onnx.load(classifier(tmp_path / "m.onnx"))
    for node in model.graph.node:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                names[position] = {"r1": "r\n1", "w2": "w\t2"}.get(name, name)
    for item in (*model.graph.initializer, *model.graph.value_info):
        item.name = {"r1": "r\n1", "w2": "w\t2"}.get(item.name, item.name)
    onnx.save(model, tmp_path / "m.onnx")
    found = built(tmp_path / "m.onnx", data, tmp_path / "out", "-q")
    assert found.exit_code == 0, found.output
    assert {"x", "r_1"} <= json.loads((tmp_path / "out" / "scales.json").read_text())["tensors"].keys()


def test_new_names_are_free_ones(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a\nb"]),
        helper.make_node("Relu", ["a\nb"], ["a_b"]),
        helper.make_node("Relu", ["a_b"], ["a\rb"]),
        helper.make_node("Relu", ["a\rb"], ["y"]),
    ]
    onnx.save(graph(nodes, {"x": ["N"]}, {"y": ["N"]}), tmp_path / "m.onnx")
    model = load_model(tmp_path / "m.onnx")
    assert one_line_names(model) == ["a_b_1", "a_b_2"]
    assert [node.outputs[0].name for node in model.graph] == ["a_b_1", "a_b", "a_b_2", "y"]


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_control_character_in_an_input_or_output_is_refused_before_calibration(tmp_path: Path, kind: str) -> None:
    first, last = ("x\n", "y") if kind == "input" else ("x", "y\x1b")
    onnx.save(graph([helper.make_node("Relu", [first], [last])], {first: ["N", 4]}, {last: ["N", 4]}), tmp_path / "m")
    np.save(tmp_path / "d.npy", np.ones((24, 4), np.float32))
    (tmp_path / "m").rename(tmp_path / "m.onnx")
    with pytest.raises(InputError, match=f"the name of the model {kind} .* has a control character"):
        one_line_names(load_model(tmp_path / "m.onnx"))


def test_a_warning_is_told_once(tmp_path: Path) -> None:
    model = onnx.load(classifier(tmp_path / "m.onnx"))
    for item in model.graph.initializer:
        if item.name == "b1":
            item.CopyFrom(numpy_helper.from_array(np.full(16, -1e6, np.float32), "b1"))
    onnx.save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "d.npy", images(24))
    found = built(tmp_path / "m.onnx", tmp_path / "d.npy", tmp_path / "out", "-q")
    assert found.exit_code == 0, found.output
    lines = [line for line in found.stderr.splitlines() if line.startswith("warning: r1: all")]
    assert len(lines) == 1
    warnings = Artifact.open(tmp_path / "out").manifest.warnings
    assert len([text for text in warnings if text.startswith("r1: all")]) == 1


def joined(text: str) -> str:
    """Without white space: long paths are broken where a line ends."""
    return "".join(text.split())


@pytest.mark.parametrize("together", [True, False])
def test_a_warning_in_a_terminal_comes_once(
    together: bool, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one place with standard error it is counted; in a file of its own the summary has it too."""
    monkeypatch.setattr("pipeline.cli.build.same_stream", lambda: together)
    convolutions(tmp_path / "m.onnx")
    np.save(tmp_path / "d.npy", np.random.default_rng(1).standard_normal((24, 3, 16, 12)).astype(np.float32))
    found = built(tmp_path / "m.onnx", tmp_path / "d.npy", tmp_path / "out", profile=BIG)
    assert found.exit_code == 0, found.output
    text = "18 of 18 calibration samples have shapes that no profile allows"
    assert text in found.stderr
    shown = joined(found.stdout)
    assert (joined(text) in shown) != together
    counted = f"1 warning above, also in {tmp_path / 'out' / 'reports' / 'summary.md'}"
    assert (joined(counted) in shown) == together
    # What an earlier run said and this one did not is shown.
    again = built(tmp_path / "m.onnx", tmp_path / "d.npy", tmp_path / "out", "--name", "other", profile=BIG)
    assert joined(again.output).count(joined(text)) == 2 - together


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("model: a\ndata: b\nmodel: c\n", "'model' twice, in lines 1 and 3"),
        ("placement:\n  exclude: [a]\n  exclude: [b]\n", "'exclude' twice, in lines 2 and 3"),
        ("profiles:\n- {x: 1, x: 2}\n", "'x' twice, in lines 2 and 2"),
    ],
)
def test_a_key_that_comes_twice_is_refused(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "build.yaml").write_text(text)
    with pytest.raises(InputError, match=where):
        load_config(tmp_path / "build.yaml")


def test_equal_keys_in_different_places_are_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "build.yaml").write_text("base: &b {x: 1}\nother: {x: 2}\nthird: *b\nlist: [{x: 1}, {x: 2}]\n")
    assert load_config(tmp_path / "build.yaml")["list"] == [{"x": 1}, {"x": 2}]


def test_an_id_beyond_the_vocabulary_names_its_sample(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((10, 64)).astype(np.float32)
    weight = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embedding"),
        helper.make_node("MatMul", ["e", "w"], ["y"], name="linear"),
    ]
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5, 64])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    ids = np.random.default_rng(2).integers(0, 10, (40, 5))
    ids[6:, 1] = 3
    ids[9, 2] = 10
    np.savez(tmp_path / "d.npz", ids=ids)
    found = built(tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "out", profile="ids=1x5,4x5,8x5")
    assert found.exit_code == 2, found.output
    text = " ".join(found.stderr.split())
    assert "sample 9 holds an index outside the model's table" in text
    assert "idx=10 must be within the inclusive range [-10,9]" in text


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("entropy", {"tensorrt_range": 0.0}, "entropy"),
        ("entropy", {"tensorrt_range": 1.0}, "entropy (range as TensorRT's)"),
        ("legacy", {"quantile": 0.999, "cutoff": 0.0}, "legacy (cutoff 0, quantile 0.999)"),
        ("minmax", {}, "minmax"),
    ],
)
def test_a_calibrator_for_people(name: str, params: dict[str, float], text: str) -> None:
    assert calibrator_text(name, params) == text


@pytest.mark.parametrize(("widest", "options", "told"), [(60.0, (), 1), (60.0, ("--equalise",), 0), (1.0, (), 0)])
def test_equalising_is_advised_where_a_transformer_is_far_off(
    tmp_path: Path, widest: float, options: tuple[str, ...], told: int
) -> None:
    data, out = tmp_path / "tokens.npy", tmp_path / "out"
    np.save(data, np.random.default_rng(0).standard_normal((24, 16, 32)).astype(np.float32))
    model = transformer(tmp_path / "m.onnx", widest=widest)
    result = built(model, data, out, *options, profile="x=1x16x32,4x16x32,8x16x32")
    assert result.exit_code == 0, result.output
    advice = [text for text in Artifact.open(out).manifest.warnings if "--equalise levels them" in text]
    assert len(advice) == told
    assert result.stderr.count("--equalise levels them") == told
    if told:
        assert "output 'y' is " in advice[0]
        assert "1 matrix product's input has one scale" in advice[0]


def test_equalising_is_not_advised_for_the_classifier_behind_many_convolutions(tmp_path: Path, data: Path) -> None:
    generator = np.random.default_rng(0)
    shapes = [(16, 16 if i else 3, 3, 3) for i in range(12)]
    weights = {f"w{i}": generator.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    weights["v"] = generator.standard_normal((16, 32)).astype(np.float32)
    tensors = ["x", *(f"c{i}" for i in range(12))]
    nodes = [
        helper.make_node("Conv", [tensors[i], f"w{i}"], [tensors[i + 1]], name=f"conv{i}", pads=[1, 1, 1, 1])
        for i in range(12)
    ]
    nodes += [
        helper.make_node("GlobalAveragePool", ["c11"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "v"], ["y"], name="head"),
    ]
    onnx.save(graph(nodes, {"x": ["N", 3, "H", "W"]}, {"y": ["N", 32]}, weights), tmp_path / "m.onnx")
    result = built(tmp_path / "m.onnx", data, tmp_path / "out", "--calibrator", "percentile", "--percentile", "80")
    assert result.exit_code == 0, result.output
    manifest = Artifact.open(tmp_path / "out").manifest
    assert manifest.verification["outputs"][0]["relative_l2_mean"] > 0.1
    assert not [text for text in manifest.warnings if "--equalise" in text]


def test_an_artifact_of_given_scales_names_no_calibrator(tmp_path: Path, data: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for model, out in ((classifier(tmp_path / "m.onnx"), first), (first / "model.int8.onnx", second)):
        result = built(model, data, out)
        assert result.exit_code == 0, result.output
    assert [Artifact.open(out).manifest.calibration.given for out in (first, second)] == [False, True]
    own, given = (json.loads((out / "scales.json").read_text())["weights"] for out in (first, second))
    assert {name: (entry["axis"], entry["scale"]) for name, entry in given.items()} == {
        name: (entry["axis"], pytest.approx(entry["scale"])) for name, entry in own.items()
    }
    assert f"{len(own)} weights" in result.stderr
    explained = CliRunner().invoke(explain_command, [str(second)]).stdout
    assert "QuantizeLinear" not in explained
    assert explained.startswith("2 of 7 nodes quantised")
    assert "channels, axis" in explained
    tensors = Artifact.open(second).manifest.calibration.tensors
    assert tensors > 0
    text = f"the model's own Q/DQ nodes, {tensors} tensors"
    assert f"- scales of {text}\n" in (second / "reports" / "summary.md").read_text()
    assert text in CliRunner().invoke(inspect_command, [str(second)]).stdout


@pytest.mark.parametrize(
    ("calibrate", "build", "aside", "warnings"),
    [
        ((), (), True, ()),
        (("--samples", "12"), (), False, ("which samples", "is of is not known (12 of them)")),
        (("--samples", "12"), ("--samples", "12"), True, ()),
        (("--shard", "0/2"), (), False, ("is not known (", "of the first", "`quantize calibrate --merge` joins")),
        (("--data", "other.npy"), (), False, ("is not known (",)),
    ],
    ids=["the same", "fewer", "as many", "a shard", "other data"],
)
def test_what_statistics_from_a_file_are_of(
    data: Path,
    tmp_path: Path,
    calibrate: tuple[str, ...],
    build: tuple[str, ...],
    aside: bool,
    warnings: tuple[str, ...],
) -> None:
    """Samples that calibrated are not called held aside, and a part of a pass is no whole one."""
    np.save(tmp_path / "other.npy", images(24)[::-1])
    model, statistics, out = classifier(tmp_path / "m.onnx"), tmp_path / "c.npz", tmp_path / "out"
    options = [str(tmp_path / value) if value == "other.npy" else value for value in calibrate]
    first = ["--data", str(data)] if "--data" not in options else []
    made = CliRunner().invoke(
        calibrate_command,
        [str(model), *first, *options, "--profile", BIG, "--batch-size", "4", "-o", str(statistics)],
    )
    assert made.exit_code == 0, made.output
    result = built(model, data, out, "--calibration", str(statistics), *build)
    assert result.exit_code == 0, result.output
    manifest = Artifact.open(out).manifest
    assert manifest.data.held_aside is aside
    said = " ".join(manifest.warnings)
    for text in warnings:
        assert text in said
    assert ("is not known" in said, "--merge" in said) == (not aside, "--shard" in calibrate)
