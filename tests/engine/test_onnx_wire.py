"""The small ONNX reader against the onnx package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.core.errors import InputError
from pipeline.engine.onnx_wire import read_model
from tests.engine import graphs


def written(path: Path, model: onnx.ModelProto) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def test_everything_that_is_read_equals_what_onnx_reads(tmp_path: Path) -> None:
    path = graphs.qdq_conv(tmp_path / "m.onnx")
    ours, theirs = read_model(path), onnx.load(path)
    assert ours.ir_version == theirs.ir_version
    assert ours.opsets == {"": 17, "my": 1}
    stored = [numpy_helper.to_array(tensor) for tensor in theirs.graph.initializer]
    assert ours.weight_bytes == sum(values.nbytes for values in stored)
    for mine, node in zip(ours.graph.nodes, theirs.graph.node, strict=True):
        assert (mine.name, mine.op_type, mine.domain) == (node.name, node.op_type, node.domain)
        assert (mine.inputs, mine.outputs) == (list(node.input), list(node.output))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.INT:
                assert mine.attributes[attribute.name].integer == attribute.i
            elif attribute.type == onnx.AttributeProto.INTS:
                assert mine.attributes[attribute.name].integers == list(attribute.ints)
    for tensor in theirs.graph.initializer:
        mine = ours.graph.initializers[tensor.name]
        values = numpy_helper.to_array(tensor)
        assert (mine.shape, mine.dtype) == (values.shape, values.dtype.name)
        assert np.array_equal(mine.values(), values.reshape(-1))
    (spec,) = ours.inputs
    assert (spec.name, spec.dtype, spec.shape) == ("x", "float32", ("N", 8, 16, 16))
    assert ours.quantised
    assert not ours.uses_half


@pytest.mark.skipif(importlib.util.find_spec("rapidocr_onnxruntime") is None, reason="needs rapidocr-onnxruntime")
def test_real_models_from_another_exporter() -> None:
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    for path in (Path(spec.origin).parent / "models").glob("*.onnx"):
        ours, theirs = read_model(path), onnx.load(path)
        assert [node.op_type for node in ours.graph.nodes] == [node.op_type for node in theirs.graph.node]
        assert ours.opsets[""] == next(o.version for o in theirs.opset_import if not o.domain)
        constants = [n.attributes["value"].tensor for n in ours.graph.nodes if n.op_type == "Constant"]
        theirs_constants = [
            helper.get_attribute_value(node.attribute[0]) for node in theirs.graph.node if node.op_type == "Constant"
        ]
        for mine, tensor in zip(constants, theirs_constants, strict=True):
            assert mine is not None
            assert np.array_equal(mine.values(), numpy_helper.to_array(tensor).reshape(-1))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TensorProto.FLOAT, [0.5, -2.0]),
        (TensorProto.DOUBLE, [0.25, 3.0]),
        (TensorProto.INT32, [-1, 7]),
        (TensorProto.INT64, [-(1 << 40), 3]),
        (TensorProto.INT8, [-128, 127]),
        (TensorProto.UINT8, [0, 255]),
        (TensorProto.BOOL, [0, 1]),
        (TensorProto.FLOAT16, [0.5, -1.25]),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_constants_of_every_kind(tmp_path: Path, kind: int, values: list[float], raw: bool) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    data = np.array(values, dtype)
    made = helper.make_tensor("t", kind, [2], data.tobytes() if raw else data, raw=raw)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["t"], ["y"])], "g", [], [helper.make_tensor_value_info("y", kind, [2])], [made]
    )
    tensor = read_model(written(tmp_path / "m.onnx", helper.make_model(graph))).graph.initializers["t"]
    assert tensor.dtype == dtype.name
    assert np.array_equal(tensor.values(), data)
    assert tensor.size == 2


def test_external_and_exotic_tensors_have_no_values(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["far"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", 1, [1])],
        [
            TensorProto(name="far", data_type=1, dims=[1], data_location=1),
            TensorProto(name="tiny", data_type=17, dims=[1]),
        ],
    )
    model = read_model(written(tmp_path / "m.onnx", helper.make_model(graph)))
    assert model.graph.initializers["far"].values() is None
    assert model.graph.initializers["tiny"].dtype == "type 17"


def test_shapes_that_are_unknown_and_inputs_with_a_default(tmp_path: Path) -> None:
    free = helper.make_tensor_value_info("a", TensorProto.INT64, None)
    unnamed = helper.make_tensor_value_info("b", 1, [None, -1, 4])
    sequence = helper.make_tensor_sequence_value_info("s", 1, None)
    default = helper.make_tensor_value_info("w", 1, [1])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["b"], ["y"])],
        "g",
        [free, unnamed, sequence, default],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.ones(1, np.float32), "w")],
    )
    a, b, s = read_model(written(tmp_path / "m.onnx", helper.make_model(graph))).inputs
    assert (a.dtype, a.shape) == ("int64", None)
    assert b.shape == ("?", "?", 4)
    assert (s.dtype, s.shape) == ("unknown", None)


@pytest.mark.parametrize("how", ["input", "cast", "initializer"])
def test_half_types_are_noticed(tmp_path: Path, how: str) -> None:
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=half if how == "cast" else 1)],
        "g",
        [helper.make_tensor_value_info("x", half if how == "input" else 1, [1])],
        [helper.make_tensor_value_info("y", 1, [1])],
        [numpy_helper.from_array(np.ones(1, np.float16), "w")] if how == "initializer" else [],
    )
    assert read_model(written(tmp_path / "m.onnx", helper.make_model(graph))).uses_half


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\xff" * 40, "not a readable ONNX model"),
        (b"\x3a\xff\x01", "the file ends early"),
        (b"\x08\x07", "its graph has no outputs"),
        (b"\x3a\x02\x08\x01", "a number where a message was expected"),
        (b"\x0a\x01\x01", "a message where a number was expected"),
        (b"\x42\x02\x08\x01", "a number where a text was expected"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_model(path)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_model(tmp_path / "none.onnx")
    with pytest.raises(InputError, match="cannot read"):
        read_model(tmp_path)


def test_every_truncation_is_refused_or_read_but_never_crashes(tmp_path: Path) -> None:
    whole = graphs.qdq_conv(tmp_path / "m.onnx").read_bytes()
    for size in range(1, len(whole), 97):
        (tmp_path / "cut.onnx").write_bytes(whole[:size])
        with pytest.raises(InputError):
            read_model(tmp_path / "cut.onnx")
