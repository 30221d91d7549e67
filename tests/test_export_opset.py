"""Conversion from newer opsets, operator by operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.equivalence import difference, run_model
from pipeline.export.opset import CannotConvert, convert, lower_ir_version
from pipeline.onnxfile import load_model, save_model
from pipeline.onnxgraph import infer_shapes

RNG = np.random.default_rng(0)
X = {"x": RNG.standard_normal((2, 6, 4, 4), dtype=np.float32)}


def _model(
    path: Path,
    nodes: list[onnx.NodeProto],
    opset: int,
    weights: dict[str, np.ndarray] | None = None,
    outputs: tuple[str, ...] = ("y",),
    shape: tuple[int | str, ...] = ("N", 6, 4, 4),
    types: tuple[int, int] = (TensorProto.FLOAT, TensorProto.FLOAT),
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", types[0], shape)],
        [helper.make_tensor_value_info(name, types[1], [None] * 4) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, path)
    return path


def _lowered(path: Path, folder: Path, target: int = 17) -> Path:
    model = load_model(path)
    infer_shapes(model)
    model = convert(model, target)
    lower_ir_version(model)
    written = save_model(model, folder)
    onnx.checker.check_model(str(written), full_check=True)
    assert onnx.load(written).opset_import[0].version == target
    return written


def _same(tmp_path: Path, *arguments, target: int = 17, **options) -> onnx.GraphProto:
    path = _model(tmp_path / "m.onnx", *arguments, **options)
    written = _lowered(path, tmp_path / "out", target)
    (expected,), (found,) = run_model(path, [X]), run_model(written, [X])
    assert list(expected) == list(found)
    assert difference(expected, found).error < 2e-6
    return onnx.load(written).graph


def _refused(tmp_path: Path, *arguments, **options) -> str:
    model = load_model(_model(tmp_path / "m.onnx", *arguments, **options))
    infer_shapes(model)
    with pytest.raises(CannotConvert) as caught:
        convert(model, 17)
    return str(caught.value)


@pytest.mark.parametrize(
    "op", ["ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSumSquare"]
)
@pytest.mark.parametrize("opset", [18, 21])
def test_axes_of_reductions(tmp_path, op: str, opset: int) -> None:
    nodes = [helper.make_node(op, ["x", "axes"], ["y"], keepdims=1, name="r")]
    graph = _same(tmp_path, nodes, opset, {"axes": np.array([-1, 2])})
    assert [tuple(a.ints) for a in graph.node[0].attribute if a.name == "axes"] == [(-1, 2)]
    assert len(graph.node[0].input) == 1


def test_reduction_of_everything_and_of_nothing(tmp_path) -> None:
    _same(tmp_path, [helper.make_node("ReduceMean", ["x"], ["y"], keepdims=1)], 18)
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], noop_with_empty_axes=1, name="r")]
    assert "ReduceMean 'r': noop_with_empty_axes=1 without axes" in _refused(tmp_path, nodes, 18)


def test_axes_that_are_computed(tmp_path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=0, end=1),
        helper.make_node("ReduceMean", ["x", "s"], ["y"], name="r"),
    ]
    assert "ReduceMean 'r': axes 's' is no constant" in _refused(tmp_path, nodes, 18)


def test_reduction_of_booleans(tmp_path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BOOL),
        helper.make_node("ReduceMax", ["b", "axes"], ["m"], name="r"),
        helper.make_node("Cast", ["m"], ["y"], to=TensorProto.FLOAT),
    ]
    assert "ReduceMax 'r': a reduction of booleans" in _refused(tmp_path, nodes, 20, {"axes": np.array([1])})


@pytest.mark.parametrize("axes", [[2, 3], [-1, -2], [3]])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_axes_of_pad(tmp_path, axes: list[int], mode: str) -> None:
    pads = np.arange(1, 2 * len(axes) + 1) % 3
    nodes = [helper.make_node("Pad", ["x", "pads", "", "axes"], ["y"], mode=mode)]
    _same(tmp_path, nodes, 18, {"pads": pads, "axes": np.array(axes)})


def test_pad_without_axes_and_with_wrap(tmp_path) -> None:
    weights = {"pads": np.array([0, 0, 1, 0, 0, 0, 0, 2]), "v": np.float32(3)}
    _same(tmp_path, [helper.make_node("Pad", ["x", "pads", "v"], ["y"])], 21, weights)
    nodes = [helper.make_node("Pad", ["x", "pads"], ["y"], mode="wrap", name="p")]
    assert "Pad 'p': mode wrap" in _refused(tmp_path, nodes, 19, weights)


def test_resize(tmp_path) -> None:
    weights = {"scales": np.array([1, 1, 2, 2], np.float32), "two": np.array([2, 3], np.float32)}
    plain = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["y"], antialias=0, keep_aspect_ratio_policy="stretch", **plain)
    ]
    _same(tmp_path, nodes, 19, weights)
    _same(tmp_path, [helper.make_node("Resize", ["x", "", "two"], ["y"], axes=[2, 3], **plain)], 18, weights)
    for attributes, reason in (
        ({"antialias": 1}, "antialias=1"),
        ({"keep_aspect_ratio_policy": "not_larger"}, "keep_aspect_ratio_policy"),
        ({"coordinate_transformation_mode": "half_pixel_symmetric"}, "half_pixel_symmetric"),
    ):
        nodes = [helper.make_node("Resize", ["x", "", "scales"], ["y"], name="r", mode="linear", **attributes)]
        assert reason in _refused(tmp_path, nodes, 19, weights)
    nodes = [helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], axes=[2, 3], name="r")]
    assert "Resize 'r': axes together with sizes" in _refused(tmp_path, nodes, 18, {"sizes": np.array([8, 8])})


@pytest.mark.parametrize("count", [2, 4])
def test_split_into_a_number_of_parts(tmp_path, count: int) -> None:
    outputs = tuple(f"y{number}" for number in range(count))
    nodes = [helper.make_node("Split", ["x"], list(outputs), axis=1, num_outputs=count)]
    _same(tmp_path, nodes, 18, outputs=outputs)


def test_split_of_a_dynamic_axis(tmp_path) -> None:
    nodes = [helper.make_node("Split", ["x"], ["y", "z"], axis=0, num_outputs=2, name="s")]
    assert "Split 's': num_outputs of the dynamic axis 0" in _refused(tmp_path, nodes, 18, outputs=("y", "z"))


def test_scatter(tmp_path) -> None:
    weights = {"i": np.zeros((1, 1), np.int64), "u": np.ones((1, 6, 4, 4), np.float32)}
    _same(tmp_path, [helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="add")], 18, weights)
    nodes = [helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="max", name="s")]
    assert "ScatterND 's': reduction max" in _refused(tmp_path, nodes, 18, weights)


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_grid_sample(tmp_path, mode: str) -> None:
    grid = RNG.uniform(-1, 1, (2, 3, 3, 2)).astype(np.float32)
    _same(tmp_path, [helper.make_node("GridSample", ["x", "g"], ["y"], mode=mode)], 20, {"g": grid})


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(tmp_path, approximate: str) -> None:
    _same(tmp_path, [helper.make_node("Gelu", ["x"], ["y"], approximate=approximate)], 20)


def test_mish(tmp_path) -> None:
    _same(tmp_path, [helper.make_node("Mish", ["x"], ["y"])], 18)


@pytest.mark.parametrize("alpha", [1.0, 1.7])
def test_swish(tmp_path, alpha: float) -> None:
    path = _model(tmp_path / "m.onnx", [helper.make_node("Swish", ["x"], ["y"], alpha=alpha)], 24)
    (found,) = run_model(_lowered(path, tmp_path / "out"), [X])
    np.testing.assert_allclose(found["y"], X["x"] / (1 + np.exp(-alpha * X["x"])), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("opset", "size"), [(18, 3), (21, 6)])
def test_group_normalization(tmp_path, opset: int, size: int) -> None:
    weights = {name: RNG.standard_normal(size).astype(np.float32) for name in ("scale", "bias")}
    nodes = [helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["y"], num_groups=3, epsilon=1e-3)]
    path = _model(tmp_path / "m.onnx", nodes, opset, weights)
    (found,) = run_model(_lowered(path, tmp_path / "out"), [X])
    grouped = X["x"].reshape(2, 3, -1)
    normal = (grouped - grouped.mean(2, keepdims=True)) / np.sqrt(grouped.var(2, keepdims=True) + 1e-3)
    scale, bias = (np.repeat(array, 6 // size).reshape(6, 1, 1) for array in weights.values())
    np.testing.assert_allclose(found["y"], normal.reshape(X["x"].shape) * scale + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", [17, 18])
def test_rms_normalization(tmp_path, target: int) -> None:
    scale = RNG.standard_normal((4, 4)).astype(np.float32)
    nodes = [helper.make_node("RMSNormalization", ["x", "scale"], ["y"], axis=2, epsilon=1e-3)]
    path = _model(tmp_path / "m.onnx", nodes, 23, {"scale": scale})
    (found,) = run_model(_lowered(path, tmp_path / "out", target), [X])
    mean = (X["x"] ** 2).mean((2, 3), keepdims=True)
    np.testing.assert_allclose(found["y"], X["x"] / np.sqrt(mean + 1e-3) * scale, rtol=1e-5, atol=1e-6)


def test_decomposed_node_keeps_the_name_of_its_tensor(tmp_path) -> None:
    nodes = [helper.make_node("Gelu", ["x"], ["mid"], name="g"), helper.make_node("Relu", ["mid"], ["y"])]
    graph = _same(tmp_path, nodes, 20)
    assert "mid" in {name for node in graph.node for name in node.output}
    assert graph.output[0].name == "y"


def test_new_attributes_at_their_old_meaning_are_dropped(tmp_path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16, saturate=1),
        helper.make_node("Cast", ["h"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("AveragePool", ["f"], ["y"], kernel_shape=[2, 2], dilations=[1, 1]),
    ]
    _same(tmp_path, nodes, 19)
    nodes = [helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], dilations=[2, 2], name="a")]
    assert "AveragePool 'a': the attribute dilations=[2, 2] has no equal" in _refused(tmp_path, nodes, 19)


def test_quantize_and_dequantize(tmp_path) -> None:
    weights = {"s": np.float32(0.02), "z": np.int8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], block_size=0, saturate=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], block_size=0),
    ]
    _same(tmp_path, nodes, 21, weights)
    for dtype in (TensorProto.INT8, TensorProto.UINT8):  # becomes a zero point
        nodes[0] = helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=dtype, name="q")
        nodes[1] = helper.make_node("DequantizeLinear", ["q", "s"], ["y"])
        _same(tmp_path, nodes, 21, weights)
    nodes[0] = helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=TensorProto.INT16, name="q")
    text = _refused(tmp_path, nodes, 21, weights)
    assert "QuantizeLinear 'q': the older opset does not allow tensor(int16) for 'y_zero_point'" in text


def test_every_node_without_an_equal_is_named(tmp_path) -> None:
    weights = {"m": np.zeros((1,), np.int32)}
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT32),
        helper.make_node("BitwiseAnd", ["i", "m"], ["a"], name="and"),
        helper.make_node("BitwiseNot", ["a"], ["n"], name="not"),
        helper.make_node("Cast", ["n"], ["y"], to=TensorProto.FLOAT),
    ]
    text = _refused(tmp_path, nodes, 18, weights)
    assert "BitwiseAnd 'and': opset 17 has no such operator" in text
    assert "BitwiseNot 'not': opset 17 has no such operator" in text


def test_types_that_the_older_definition_does_not_have(tmp_path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("HardSwish", ["b"], ["r"], name="h"),
        helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
    ]
    assert "HardSwish 'h': the older opset does not allow tensor(bfloat16) for 'X'" in _refused(tmp_path, nodes, 22)


def test_dft_is_refused(tmp_path) -> None:
    nodes = [helper.make_node("DFT", ["x"], ["y"], name="d")]
    assert "DFT 'd': its axis is an input" in _refused(tmp_path, nodes, 20, shape=("N", 4, 4, 1))


def test_inner_graphs_are_converted_too(tmp_path) -> None:
    def branch(op: str) -> onnx.GraphProto:
        node = helper.make_node(op, ["x", "axes"], [f"{op}_out"], keepdims=1)
        return helper.make_graph([node], op, [], [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch("ReduceMax"), else_branch=branch("ReduceMin")),
    ]
    _same(tmp_path, nodes, 18, {"axes": np.array([1]), "zero": np.float32(0)})
