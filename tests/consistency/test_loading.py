from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.artifact import INT8_MODEL, SCALES, Artifact
from pipeline.consistency.compare import assert_consistent, compare
from pipeline.consistency.graph import context_of_graph, visible_tensors
from pipeline.consistency.loading import load_context, save_context
from pipeline.core.errors import InputError
from tests.consistency.contexts import context
from tests.consistency.graphs import W_SCALES, X_SCALE, Y_SCALE, float_model, qdq_model, write_artifact


def saved(tmp_path: Path, name: str = "m.onnx", **options: object) -> Path:
    onnx.save(qdq_model(**options), tmp_path / name)  # type: ignore[arg-type]
    return tmp_path / name


def test_graph(tmp_path: Path) -> None:
    found = context_of_graph(saved(tmp_path)).by_key()
    assert sorted(found) == [("activation", "x"), ("activation", "y"), ("weight", "w")]
    assert found["activation", "x"].scales == (float(X_SCALE),)
    assert found["activation", "y"].scales == (float(Y_SCALE),)
    weight = found["weight", "w"]
    assert (weight.scales, weight.axis, weight.dtype, weight.zero_points) == (tuple(W_SCALES.tolist()), 0, "int8", (0,))


@pytest.mark.parametrize("form", [{"stored_weights": True}, {"cast": True}, {"constant_node": True}])
def test_other_forms_of_the_same_quantisation(tmp_path: Path, form: dict[str, bool]) -> None:
    first, second = saved(tmp_path), saved(tmp_path, "other.onnx", **form)
    assert context_of_graph(first).digest == context_of_graph(second).digest


def test_onnxs_defaults_are_applied(tmp_path: Path) -> None:
    """No zero point means uint8, no axis means axis 1: both differ from what TensorRT assumes, so they must show."""
    found = context_of_graph(saved(tmp_path, zero=None, axis=None)).by_key()
    assert found["activation", "x"].dtype == "uint8"
    assert found["weight", "w"].axis == 1


def test_fp16_scale(tmp_path: Path) -> None:
    (tensor, *_) = context_of_graph(saved(tmp_path, x_scale=np.float16(0.031))).tensors
    assert tensor.scales == (float(np.float16(0.031)),)


def test_quantised_twice(tmp_path: Path) -> None:
    model = qdq_model()
    again = onnx.helper.make_node("QuantizeLinear", ["x", "y_scale", "zero"], ["x_q2"], name="again")
    model.graph.node.insert(0, again)
    onnx.save(model, tmp_path / "m.onnx")
    names = [tensor.name for tensor in context_of_graph(tmp_path / "m.onnx").tensors if tensor.kind == "activation"]
    assert names == ["x", "x (q)", "y"]


def test_visible_tensors(tmp_path: Path) -> None:
    assert visible_tensors(saved(tmp_path)) == {"x": "x_dq", "y": "z"}


def test_graphs_that_say_nothing(tmp_path: Path) -> None:
    onnx.save(float_model(), tmp_path / "float.onnx")
    with pytest.raises(InputError, match="has no QuantizeLinear or DequantizeLinear node"):
        context_of_graph(tmp_path / "float.onnx")
    with pytest.raises(InputError, match="the scale 'x_scale' of node 'q' is computed at run time"):
        context_of_graph(saved(tmp_path, run_time_scale=True))
    model = qdq_model()
    scale = next(init for init in model.graph.initializer if init.name == "x_scale")
    scale.data_location = onnx.TensorProto.EXTERNAL
    (tmp_path / "external.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="the scale 'x_scale' of node 'q' cannot be read"):
        context_of_graph(tmp_path / "external.onnx")


def test_artifact_agrees_with_its_graph(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "art")
    loaded = load_context(folder)
    assert (loaded.calibrator, loaded.params, loaded.model, loaded.data) == (
        "entropy", (("bins", 2048.0),), "a" * 64, "d" * 64,
    )  # fmt: skip
    assert_consistent([loaded, load_context(folder / INT8_MODEL)], atol=0.0)
    assert loaded.scales_digest == load_context(folder / INT8_MODEL).scales_digest


def test_artifact_with_another_scale(tmp_path: Path) -> None:
    folders = [write_artifact(tmp_path / "a", x_scale=0.031), write_artifact(tmp_path / "b", x_scale=0.04)]
    comparison = compare([load_context(folder) for folder in folders])
    assert [row.tensor for row in comparison.mismatches] == ["x"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tensors": {}}', '{"tensors": {"x": 1}, "weights": {}}'])
def test_damaged_scales(tmp_path: Path, content: str) -> None:
    folder = write_artifact(tmp_path / "art")
    (folder / SCALES).write_text(content)
    Artifact.open(folder).updated(files=(SCALES,))
    with pytest.raises(InputError, match=r"scales\.json is damaged"):
        load_context(folder)


def test_a_saved_context_comes_back(tmp_path: Path) -> None:
    original = context("here", calibrator="ema", params={"alpha": 0.9}, model="a" * 64)
    save_context(tmp_path / "c.json", original)
    loaded = load_context(tmp_path / "c.json", label="there")
    assert loaded == original.model_copy(update={"label": "there"})
    assert loaded.digest == original.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(kind="other"), "is no saved context"),
        (lambda content: content.update(schema=2), "has schema 2, this version reads 1"),
        (lambda content: content.pop("context"), "is damaged"),
        (lambda content: content["context"]["tensors"][0].update(scales=[0.5]), "its content has the digest"),
        (lambda content: content["context"].update(extra=1), "is damaged"),
    ],
)
def test_a_saved_context_that_is_wrong(tmp_path: Path, change, message: str) -> None:
    save_context(tmp_path / "c.json", context("here"))
    content = json.loads((tmp_path / "c.json").read_text())
    change(content)
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_context(tmp_path / "c.json")


def test_what_is_no_context(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_context(tmp_path / "none")
    (tmp_path / "x.bin").write_bytes(b"\x00\x01")
    with pytest.raises(InputError, match="is of no known kind"):
        load_context(tmp_path / "x.bin")
    (tmp_path / "model.plan").write_bytes(b"ftrt")
    with pytest.raises(InputError, match="an engine does not say its scales"):
        load_context(tmp_path / "model.plan")
    (tmp_path / "broken.json").write_text('{"kind":')
    with pytest.raises(InputError, match="is not valid JSON"):
        load_context(tmp_path / "broken.json")
    folder = write_artifact(tmp_path / "art")
    with pytest.raises(InputError, match=f"is no saved context; give the folder {folder}"):
        load_context(folder / SCALES)
