"""Captured tensors in the layout they are computed in: the same values, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.core import ort_capture
from pipeline.core.errors import InputError, ToolError
from pipeline.core.ort import make_session
from pipeline.core.ort_capture import open_capture

CHANNELS = {"a": 32, "b": 24, "sum": 32, "pool": 32, "wide": 48, "up": 48, "depth": 48}
SHAPE = (5, 3, 12, 10)
ASYMMETRIC = {"coordinate_transformation_mode": "asymmetric"}


def model(bias: float = 0.1) -> onnx.ModelProto:
    """Full and ragged blocks, a residual Add, pools, an upsampling, a depthwise convolution, fused activations."""
    rng = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []

    def conv(x: str, y: str, inputs: int, outputs: int, size: int, group: int = 1) -> onnx.NodeProto:
        shape = (outputs, inputs // group, size, size)
        for name, value in ((f"{y}.w", rng.normal(size=shape)), (f"{y}.b", np.full(outputs, bias))):
            weights.append(numpy_helper.from_array(value.astype(np.float32), name))
        pads = [size // 2] * 4
        return helper.make_node("Conv", [x, f"{y}.w", f"{y}.b"], [y], kernel_shape=[size, size], pads=pads, group=group)

    weights.append(numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"))
    nodes = [
        conv("x", "a0", 3, 32, 3),
        helper.make_node("Relu", ["a0"], ["a"]),
        conv("a", "b0", 32, 24, 1),
        helper.make_node("Sigmoid", ["b0"], ["b"]),
        conv("b", "c", 24, 32, 3),
        helper.make_node("Add", ["a", "c"], ["sum"]),
        helper.make_node("MaxPool", ["sum"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        conv("pool", "wide", 32, 48, 1),
        helper.make_node("Resize", ["wide", "", "scales"], ["up"], mode="nearest", **ASYMMETRIC),
        conv("up", "depth0", 48, 48, 3, 48),
        helper.make_node("LeakyRelu", ["depth0"], ["depth"]),
        helper.make_node("GlobalAveragePool", ["depth"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *SHAPE[1:]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 48])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def batch(special: float | None = None) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    if special is not None:
        x[2, 1, 3, 4] = special
    return x


def ordered(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.sort(np.ascontiguousarray(x).view(np.uint32).reshape(-1))


CAPTURE = ("y", *CHANNELS)


@pytest.mark.parametrize("special", [None, np.nan, np.inf])
def test_same_values_as_without(special: float | None, tmp_path: Path) -> None:
    proto = model()
    before = proto.SerializeToString()
    blocked = open_capture(proto, CAPTURE, threads=1, external_data_dir=tmp_path)
    plain = make_session(proto, capture=CAPTURE, threads=1)
    assert proto.SerializeToString() == before
    feeds = {"x": batch(special)}
    for name, ours, theirs in zip(CAPTURE, blocked.run(feeds), plain.run(list(CAPTURE), feeds), strict=True):
        assert ours.shape == theirs.shape, name
        np.testing.assert_array_equal(ordered(ours), ordered(theirs), err_msg=name)


def test_full_blocks_are_not_converted_and_ragged_ones_are(tmp_path: Path) -> None:
    if not has_blocks():
        pytest.skip("onnxruntime has no blocked layout on this processor")
    outputs = dict(
        zip(CAPTURE, open_capture(model(), CAPTURE, threads=1, external_data_dir=tmp_path).outputs, strict=True)
    )
    assert outputs["b"] == "b"  # 24 channels
    assert outputs["y"] == "y"
    for name in ("a", "sum", "pool", "wide", "depth"):
        assert outputs[name] != name


def has_blocks() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimised.onnx"
        make_session(model(), threads=1, save_optimised=path)
        return any(node.domain == "com.microsoft.nchwc" for node in onnx.load(path).graph.node)


def test_a_converted_tensor_that_others_read_stays(tmp_path: Path) -> None:
    """`wide` is read by an operator without a blocked form, too."""
    proto = model()
    proto.graph.node.append(helper.make_node("Erf", ["wide"], ["erf"]))
    proto.graph.output.append(helper.make_tensor_value_info("erf", TensorProto.FLOAT, None))
    capture = ("wide", "erf")
    found = open_capture(proto, capture, threads=1, external_data_dir=tmp_path).run({"x": batch()})
    plain = make_session(proto, capture=capture, threads=1).run(list(capture), {"x": batch()})
    np.testing.assert_array_equal(ordered(found[0]), ordered(plain[0]))
    np.testing.assert_array_equal(found[1], plain[1])


def test_a_tensor_that_only_a_branch_reads_stays_too(tmp_path: Path) -> None:
    proto = model()
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["wide"], [f"{op}_out"])],
            op,
            [],
            [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)],
        )
        for op in ("Neg", "Abs")
    ]
    proto.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    proto.graph.node.append(
        helper.make_node("If", ["flag"], ["chosen"], then_branch=branches[0], else_branch=branches[1])
    )
    proto.graph.output.append(helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None))
    feeds = {"x": batch(), "flag": np.array(True)}
    found = open_capture(proto, ("wide", "chosen"), threads=1, external_data_dir=tmp_path)
    wide, chosen = found.run(feeds)
    plain = make_session(proto, capture=("wide",), threads=1).run(["wide", "chosen"], feeds)
    np.testing.assert_array_equal(ordered(wide), ordered(plain[0]))
    np.testing.assert_array_equal(chosen, plain[1])
    assert not has_blocks() or found.outputs[0] != "wide"


def test_a_transposed_tensor_has_its_own_shape(tmp_path: Path) -> None:
    """The conversion to channels-last is one node, in front of which the shape is another."""
    proto = model()
    proto.graph.node.append(helper.make_node("Transpose", ["a"], ["last"], perm=[0, 2, 3, 1]))
    proto.graph.output.append(helper.make_tensor_value_info("last", TensorProto.FLOAT, None))
    last, a = open_capture(proto, ("last", "a"), threads=1, external_data_dir=tmp_path).run({"x": batch()})
    assert last.shape == (5, 12, 10, 32)
    np.testing.assert_array_equal(ordered(last), ordered(a))


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_optimised_graph_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.delattr(ort_capture.os, "memfd_create", raising=False)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    session = open_capture(model(), CAPTURE, threads=1, external_data_dir=tmp_path)
    assert not has_blocks() or session.outputs != CAPTURE
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.delattr(ort_capture.os, "memfd_create", raising=False)
    session = open_capture(model(), CAPTURE, threads=1, external_data_dir=tmp_path)
    assert session.outputs == CAPTURE
    assert session.run({"x": batch()})[0].shape == (5, 48)


def test_without_convolutions_and_with_external_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_capture, "_open_blocked", None)  # would fail when called
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Exp", ["h"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert open_capture(proto, ("h",), threads=1, external_data_dir=tmp_path).outputs == ("h",)
    onnx.save(model(), tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=64)
    external = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    found = open_capture(external, ("a",), threads=1, external_data_dir=tmp_path)
    assert found.run({"x": batch()})[0].shape == (5, 32, 12, 10)


def test_a_model_of_products_behind_one_convolution_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_capture, "_open_blocked", None)  # would fail when called
    proto = model()
    weight = np.random.default_rng(2).normal(size=(48, 20_000)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "large"))
    proto.graph.node.append(helper.make_node("MatMul", ["y", "large"], ["z"]))
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert open_capture(proto, ("a",), threads=1, external_data_dir=tmp_path).outputs == ("a",)


def test_errors_are_those_of_an_ordinary_session(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'nowhere' to capture does not exist"):
        open_capture(model(), ("nowhere",), threads=1, external_data_dir=tmp_path)
    broken = model()
    broken.graph.node[1].op_type = "NoSuchOperator"
    with pytest.raises(ToolError, match="NoSuchOperator"):
        open_capture(broken, ("a",), threads=1, external_data_dir=tmp_path)
