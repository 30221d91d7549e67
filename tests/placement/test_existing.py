"""Graphs that come with Q/DQ nodes: what is accepted, repaired without loss, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.config import PlacementConfig
from pipeline.core.errors import InputError
from pipeline.core.ort import make_session
from pipeline.placement import make_plan
from pipeline.placement.existing import has_quantizers, repair
from pipeline.placement.given import given_scales, given_weights
from pipeline.placement.graph import GraphView, load_graph
from tests.placement.tiny import Tiny

OMIT = object()
ZERO = np.int8(0)


class Quantized(Tiny):
    """A convolution with pairs, every detail of which can be changed."""

    def pair(self, x: str, scale: Any, zero: Any, *, axis: int | None = None, name: str | None = None) -> str:
        name = name or x
        attributes = {} if axis is None else {"axis": axis}
        self.constants[f"{name}.s"] = numpy_helper.from_array(np.asarray(scale, np.float32), f"{name}.s")
        parameters = [f"{name}.s"]
        if zero is not OMIT:
            self.constants[f"{name}.z"] = numpy_helper.from_array(np.asarray(zero), f"{name}.z")
            parameters.append(f"{name}.z")
        q = self.op("QuantizeLinear", [x, *parameters], f"{name}.q", **attributes)
        return self.op("DequantizeLinear", [q, *parameters], f"{name}.dq", **attributes)

    def stored(self, name: str, values: np.ndarray, scale: Any, zero: Any, *, axis: int | None = None) -> str:
        attributes = {} if axis is None else {"axis": axis}
        self.constants[name] = numpy_helper.from_array(values, name)
        self.constants[f"{name}.s"] = numpy_helper.from_array(np.asarray(scale, np.float32), f"{name}.s")
        parameters = [f"{name}.s"]
        if zero is not OMIT:
            self.constants[f"{name}.z"] = numpy_helper.from_array(np.asarray(zero), f"{name}.z")
            parameters.append(f"{name}.z")
        return self.op("DequantizeLinear", [name, *parameters], f"{name}.dq", **attributes)


def network(
    *, scale: Any = 0.02, zero: Any = ZERO, weights: Any = None, weight_scale: Any = None, weight_zero: Any =
    None, axis: int | None = 0, bias: Any = None, bias_axis: int | None = 0,
) -> Quantized:  # fmt: skip
    """Conv 16 -> 16 over 8x8, activation pair, stored INT8 weights."""
    net = Quantized()
    x = net.pair(net.input("x", 2, 16, 8, 8), scale, zero)
    if weights is None:
        weights = net.random.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)
    if weight_scale is None:
        weight_scale = net.random.uniform(0.001, 0.004, 16)
    if weight_zero is None:
        weight_zero = np.zeros(np.shape(weight_scale), weights.dtype)
    operands = [x, net.stored("w", weights, weight_scale, weight_zero, axis=axis)]
    if bias is not None:
        operands.append(net.stored("b", bias, net.random.uniform(0.001, 0.004, 16), OMIT, axis=bias_axis))
    net.op("Conv", operands, "y", pads=[1] * 4)
    return net


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(5).standard_normal((2, 16, 8, 8)).astype(np.float32) * 2}


def repaired(net: Tiny, folder: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The repaired graph, proved to compute the very same numbers."""
    path = net.save(folder, "y")
    model = load_graph(path)
    notes = repair(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    before = make_session(path, optimise=False).run(None, feeds())[0]
    after = make_session(proto, optimise=False).run(None, feeds())[0]
    assert np.array_equal(before, after)
    return proto, notes


def constant(model: onnx.ModelProto, node: str, index: int) -> np.ndarray:
    (found,) = [item for item in model.graph.node if item.name == node]
    (tensor,) = [item for item in model.graph.initializer if item.name == found.input[index]]
    return numpy_helper.to_array(tensor)


def test_a_sound_graph_is_left_alone(tmp_path: Path) -> None:
    path = network().save(tmp_path, "y")
    model = load_graph(path)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert repair(model) == ()
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_plan_adds_nothing_and_says_what_is_quantised(tmp_path: Path) -> None:
    plan = make_plan(network().save(tmp_path, "y"), PlacementConfig())
    assert plan.prequantized
    assert plan.activations == () and plan.weights == () and plan.tensors == ()  # noqa: PT018
    assert plan.quantized_nodes == ("y",)
    assert {item.rule for item in plan.decisions} == {"existing"}


def test_a_float_graph_is_no_such_graph(tmp_path: Path) -> None:
    net = Tiny()
    net.conv(net.input("x", "n", 16, 8, 8), "y", 16, 16)
    path = net.save(tmp_path, "y")
    assert not has_quantizers(GraphView(load_graph(path)))
    assert not make_plan(path, PlacementConfig()).prequantized


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_include_and_exclude_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(InputError, match=f"{option} 'y': the model already has Q/DQ nodes"):
        make_plan(network().save(tmp_path, "y"), PlacementConfig(**{option: ("y",)}))


def test_half_a_pair_is_told(tmp_path: Path) -> None:
    net = Quantized()
    net.weights("w", 16, 16, 3, 3)
    net.op("Conv", [net.pair(net.input("x", "n", 16, 8, 8), 0.02, np.int8(0)), "w"], "y")
    plan = make_plan(net.save(tmp_path, "y"), PlacementConfig())
    assert plan.quantized_nodes == ()
    assert plan.notes == ("1 nodes have a pair on one operand only and run in float: y",)


def test_uint8_activations_with_zero_point_128(tmp_path: Path) -> None:
    model, notes = repaired(network(zero=np.uint8(128)), tmp_path)
    assert constant(model, "x.q", 2).dtype == np.int8
    assert constant(model, "x.dq", 2).dtype == np.int8
    assert "uint8 with zero point 128 became int8 with zero point 0 (the same steps): x.q, x.dq" in notes


@pytest.mark.parametrize(("dtype", "zero"), [(np.uint8, 128), (np.uint8, 100), (np.int8, 3)])
def test_stored_weights_with_a_zero_point(tmp_path: Path, dtype: type, zero: int) -> None:
    random = np.random.default_rng(1)
    weights = (random.integers(-100, 100, (16, 16, 3, 3)) + zero).astype(dtype)
    model, notes = repaired(network(weights=weights, weight_zero=np.full(16, zero, dtype)), tmp_path)
    assert constant(model, "w.dq", 0).dtype == np.int8
    assert not constant(model, "w.dq", 2).any()
    assert notes == ("constants with a zero point became int8 with zero point 0 (the same values): w.dq",)


def test_int32_bias_becomes_float(tmp_path: Path) -> None:
    bias = np.random.default_rng(2).integers(-5000, 5000, 16).astype(np.int32)
    model, notes = repaired(network(bias=bias), tmp_path)
    (conv,) = [node for node in model.graph.node if node.name == "y"]
    assert constant(model, "y", 2).dtype == np.float32
    assert conv.input[2] == "b_float"
    assert notes == ("int32 constants behind a DequantizeLinear (biases) became float constants: b.dq",)


def test_missing_zero_points_of_int8_constants_are_written_out(tmp_path: Path) -> None:
    model, notes = repaired(network(weight_zero=OMIT), tmp_path)
    assert constant(model, "w.dq", 2).tolist() == [0] * 16
    assert "an int8 zero point of 0 was written out" in notes[0]


def test_missing_axis_takes_the_definition(tmp_path: Path) -> None:
    """16x16 weights: axis 1 fits, and 1 is what ONNX says a missing axis means."""
    model, notes = repaired(network(axis=None), tmp_path)
    (node,) = [item for item in model.graph.node if item.name == "w.dq"]
    assert [item.i for item in node.attribute] == [1]
    assert "the axis of per-channel scales was written out" in notes[0]


def test_lost_axis_is_the_only_one_that_fits(tmp_path: Path) -> None:
    """onnxruntime refuses this graph, so only the repair is looked at."""
    net = network()
    weights = net.random.integers(-127, 128, (32, 16, 3, 3)).astype(np.int8)
    scales = net.random.uniform(0.001, 0.004, 32)
    model = load_graph(network(weights=weights, weight_scale=scales, axis=None).save(tmp_path, "y"))
    repair(model)
    (node,) = [item for item in model.graph if item.name == "w.dq"]
    assert node.attributes["axis"].as_int() == 0


def test_zero_scale_of_a_channel_of_zeros(tmp_path: Path) -> None:
    weights = np.random.default_rng(3).integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)
    weights[4] = 0
    scales = np.full(16, 0.002)
    scales[4] = 0
    model, notes = repaired(network(weights=weights, weight_scale=scales), tmp_path)
    assert constant(model, "w.dq", 1)[4] == 1.0
    assert "scale 0 of channels whose weights are all zero became 1: w.dq" in notes


def integer_conv(folder: Path) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 1, 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, None)
    w = numpy_helper.from_array(np.ones((1, 1, 1, 1), np.uint8), "w")
    graph = helper.make_graph([helper.make_node("ConvInteger", ["x", "w"], ["y"], name="y")], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), folder / "integer.onnx")
    return folder / "integer.onnx"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"zero": np.uint8(0)}, "QuantizeLinear 'x.q' of 'x' has uint8 zero point 0; only 128 has an int8 equal"),
        ({"zero": OMIT}, "QuantizeLinear 'x.q' of 'x' has uint8 zero point 0"),
        ({"zero": np.int8(5)}, "QuantizeLinear 'x.q' of 'x' has int8 zero point 5; TensorRT takes 0 only"),
        ({"scale": 0.0}, "QuantizeLinear 'x.q' of 'x' has scale 0; TensorRT takes positive finite ones"),
        ({"scale": np.inf}, "has scale inf"),
        (
            {"weights": np.full((16, 16, 3, 3), 250, np.uint8), "weight_zero": np.zeros(16, np.uint8)},
            "'w.dq' of 'w' holds constants that do not fit int8 without their zero point (250..250)",
        ),
        ({"weight_scale": np.full(5, 0.1), "weight_zero": np.zeros(5, np.int8), "axis": None}, "has 5 scales, no axis"),
    ],
)
def test_what_cannot_be_repaired(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    net = network(**change)
    path = tmp_path / "net.onnx"
    values = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(net.nodes, "net", net.inputs, values, list(net.constants.values()))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with pytest.raises(InputError) as caught:
        make_plan(path, PlacementConfig())
    assert words in str(caught.value)
    assert "quantise it again, symmetrically to int8 with zero point 0" in str(caught.value)


def test_uint8_that_others_read(tmp_path: Path) -> None:
    net = network(zero=np.uint8(128))
    net.op("Cast", ["x.q"], "raw", to=TensorProto.FLOAT)
    with pytest.raises(InputError, match="writes uint8 that other operators than DequantizeLinear read"):
        make_plan(net.save(tmp_path, "y", "raw"), PlacementConfig())


def test_scale_at_run_time(tmp_path: Path) -> None:
    net = Quantized()
    net.constant("z", 0, "int8")
    x = net.input("x", "n", 16)
    scale = net.op("ReduceMax", [x], "scale", keepdims=0)
    net.op("DequantizeLinear", [net.op("QuantizeLinear", [x, scale, "z"], "q"), scale, "z"], "y")
    with pytest.raises(InputError, match="'q' of 'x' computes its scale scale at run time"):
        make_plan(net.save(tmp_path, "y"), PlacementConfig())


def test_zero_point_at_run_time(tmp_path: Path) -> None:
    net = Quantized()
    net.constant("s", 0.1)
    zero = net.input("z", dtype=TensorProto.INT8)
    net.op("DequantizeLinear", [net.op("QuantizeLinear", [net.input("x", "n", 16), "s", zero], "q"), "s", zero], "y")
    with pytest.raises(InputError, match="'q' of 'x' computes its zero point z at run time"):
        make_plan(net.save(tmp_path, "y"), PlacementConfig())


def test_integer_input_that_is_not_int8(tmp_path: Path) -> None:
    net = Quantized()
    net.constant("s", 0.1)
    net.constant("z", 0, "uint8")
    net.op("DequantizeLinear", [net.input("x", "n", 16, dtype=TensorProto.UINT8), "s", "z"], "y")
    with pytest.raises(InputError, match="'y' of 'x' dequantises uint8, not int8"):
        make_plan(net.save(tmp_path, "y"), PlacementConfig())


def test_qoperator_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the QOperator format, which TensorRT does not import: ConvInteger 'y'"):
        make_plan(integer_conv(tmp_path), PlacementConfig())


def test_given_scales(tmp_path: Path) -> None:
    graph = GraphView(load_graph(network(scale=0.25).save(tmp_path, "y")))
    assert given_scales(graph) == {"x": 0.25}


def test_given_weights(tmp_path: Path) -> None:
    """Stored in INT8, or in float behind a pair; per channel, or one scale for all; of each node that reads them."""
    net = network(weight_scale=np.full(16, 0.5))
    net.constants["v"] = numpy_helper.from_array(np.ones((16, 16, 1, 1), np.float32), "v")
    pair = net.pair("v", 0.25, ZERO)
    for name in ("one", "two"):
        net.op("Conv", ["x.dq", pair], name)
    found = given_weights(GraphView(load_graph(net.save(tmp_path, "y", "one", "two"))))
    shown = {(item.point.tensor, item.point.node, item.point.input_index, item.point.axis) for item in found}
    assert shown == {("w", "y", 1, 0), ("v", "one", 1, None), ("v", "two", 1, None)}
    scales = {item.point.tensor: item.scale.tolist() for item in found}
    assert scales == {"w": [0.5] * 16, "v": [0.25]}


def test_pairs_are_no_nodes_to_decide_about(tmp_path: Path) -> None:
    plan = make_plan(network().save(tmp_path, "y"), PlacementConfig())
    assert [(decision.node, decision.quantized) for decision in plan.decisions] == [("y", True)]


def test_graph_of_onnxruntime(tmp_path: Path) -> None:
    """Its defaults (uint8 or asymmetric activations) are refused, its symmetric form with int32 biases is repaired."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    net = Tiny()
    x = net.op("Relu", [net.conv(net.input("x", 2, 16, 8, 8), "c", 16, 16)], "r")
    net.conv(x, "y", 16, 16)
    path = net.save(tmp_path, "y")

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [feeds(), feeds()]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    target = tmp_path / "ort.onnx"
    quantize_static(path, target, Reader(), per_channel=True, activation_type=QuantType.QUInt8)
    with pytest.raises(InputError, match="only 128 has an int8 equal"):
        make_plan(target, PlacementConfig())
    symmetric = {"ActivationSymmetric": True, "WeightSymmetric": True}
    quantize_static(path, target, Reader(), per_channel=True, extra_options=symmetric)
    plan = make_plan(target, PlacementConfig())
    assert plan.prequantized
    assert {"c", "y"} <= set(plan.quantized_nodes)
    assert any("biases" in note for note in plan.notes)
