"""FP16 for the float part of a Q/DQ graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from pipeline.core.ort import make_session
from pipeline.placement.graph import load_graph
from pipeline.placement.half import HalfResult, to_half
from tests.placement.conftest import Quantised, int8_nodes, rtx_engine
from tests.placement.tiny import Tiny


def halved(
    path: Path, *, nodes: bool = True, inputs: bool = False, outputs: bool = False
) -> tuple[onnx.ModelProto, HalfResult]:
    model = load_graph(path)
    before = sum(node.op_type == "Cast" for node in model.graph)
    result = to_half(model, nodes=nodes, inputs=inputs, outputs=outputs)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert sum(node.op_type == "Cast" for node in proto.graph.node) == before + result.casts
    return proto, result


def test_float_convolution_becomes_fp16_between_two_casts(tmp_path: Path) -> None:
    net = Tiny()
    net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "y")
    path = net.save(tmp_path, "y")
    proto, result = halved(path)
    assert result.converted == ("conv", "y")
    assert [(node.op_type, node.name) for node in proto.graph.node] == [
        ("Cast", "x_Cast_fp16"),
        ("Conv", "conv"),
        ("Relu", "y"),
        ("Cast", "y_Cast"),
    ]
    assert [value.type.tensor_type.elem_type for value in proto.graph.output] == [TensorProto.FLOAT]
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    a, b = (make_session(model).run(None, feeds)[0] for model in (path, proto))
    assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(a)
    assert not np.array_equal(a, b)


def types(proto: onnx.ModelProto) -> list[int]:
    return [value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)]


@pytest.mark.parametrize(
    ("inputs", "outputs", "operators"),
    [
        (True, True, ["Conv", "Cast", "Exp", "Cast"]),
        (True, False, ["Conv", "Cast", "Exp"]),
        (False, True, ["Cast", "Conv", "Cast", "Exp", "Cast"]),
    ],
)
def test_inputs_and_outputs_in_fp16_when_asked(
    tmp_path: Path, inputs: bool, outputs: bool, operators: list[str]
) -> None:
    net = Tiny()
    x = net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)
    net.op("Exp", [x], "y")
    path = net.save(tmp_path, "y")
    proto, result = halved(path, inputs=inputs, outputs=outputs)
    half, full = TensorProto.FLOAT16, TensorProto.FLOAT
    assert types(proto) == [half if inputs else full, half if outputs else full]
    assert [node.op_type for node in proto.graph.node] == operators
    assert (result.inputs, result.outputs) == (("x",) if inputs else (), ("y",) if outputs else ())
    values = np.random.default_rng(0).standard_normal((2, 16, 8, 8)).astype(np.float16)
    (wanted,) = make_session(path).run(None, {"x": values.astype(np.float32)})
    (found,) = make_session(proto).run(None, {"x": values if inputs else values.astype(np.float32)})
    assert found.dtype == (np.float16 if outputs else np.float32)
    assert np.linalg.norm(found - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_inputs_and_outputs_alone_leave_every_node_float32(tmp_path: Path) -> None:
    """Two casts, whatever reads the input and the output; integers stay what they are."""
    net = Tiny()
    x, ids = net.input("x", "n", 16, 8, 8), net.input("ids", "n", dtype=TensorProto.INT64)
    y = net.op("Relu", [net.conv(x, "conv", 16, 16)], "y")
    net.op("Add", [net.op("Sigmoid", [y], "s"), net.op("Neg", [x], "n")], "z")
    net.op("Cast", [ids], "floats", to=TensorProto.FLOAT)
    proto, result = halved(net.save(tmp_path, "y", "z", "floats"), nodes=False, inputs=True, outputs=True)
    assert result == HalfResult((), {}, 4, ("x",), ("y", "z", "floats"))
    half = TensorProto.FLOAT16
    assert types(proto) == [half, TensorProto.INT64, half, half, half]
    readers = {node.op_type: node.input[0] for node in proto.graph.node}
    assert (readers["Conv"], readers["Neg"], readers["Sigmoid"]) == ("x_fp32", "x_fp32", "y_fp32")


def test_an_input_that_is_an_output_and_a_constant_output_stay_what_they_are(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.constant("c", 2.0)
    net.conv(x, "y", 16, 16)
    model = net.model("x", "c", "y")
    for output, shape in zip(model.graph.output, (["n", 16, 8, 8], [], ["n", 16, 8, 8]), strict=True):
        output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, TensorProto.FLOAT, shape))
    onnx.save(model, tmp_path / "tiny.onnx")
    proto, result = halved(tmp_path / "tiny.onnx", inputs=True, outputs=True)
    assert (result.inputs, result.outputs) == ((), ("y",))
    assert types(proto) == [TensorProto.FLOAT] * 3 + [TensorProto.FLOAT16]


def test_float16_that_was_there_before_stays(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8, dtype=TensorProto.FLOAT16)
    y = net.conv(net.op("Cast", [x], "wide", to=TensorProto.FLOAT), "conv", 16, 16)
    net.op("Cast", [y], "y", to=TensorProto.FLOAT16)
    model = net.model("y")
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["n", 16, 8, 8]))
    onnx.save(model, tmp_path / "tiny.onnx")
    for wanted in (False, True):
        proto, result = halved(tmp_path / "tiny.onnx", inputs=wanted, outputs=wanted)
        assert types(proto) == [TensorProto.FLOAT16] * 2
        assert (result.inputs, result.outputs) == ((), ())


def test_bodies_of_control_flow_nodes_read_float32(tmp_path: Path) -> None:
    """Types inside them are not changed: what they read gets a cast, be it an input or an FP16 layer's output."""
    net = Tiny()
    x = net.input("x", 2, 16, 8, 8)
    condition = net.input("condition", dtype=TensorProto.BOOL)
    conv = net.conv(x, "conv", 16, 16)
    bodies = [
        onnx.helper.make_graph(
            [onnx.helper.make_node(op, ["x", conv], [out], name=out)],
            out,
            [],
            [onnx.helper.make_tensor_value_info(out, TensorProto.FLOAT, [2, 16, 8, 8])],
        )
        for op, out in (("Add", "plus"), ("Sub", "minus"))
    ]
    net.op("If", [condition], "y", then_branch=bodies[0], else_branch=bodies[1])
    path = net.save(tmp_path, "y")
    proto, result = halved(path, inputs=True)
    assert (result.converted, result.inputs) == (("conv",), ("x",))
    values = np.random.default_rng(0).standard_normal((2, 16, 8, 8)).astype(np.float16)
    for chosen in (True, False):
        flag = {"condition": np.array(chosen)}
        (wanted,) = make_session(path).run(None, {"x": values.astype(np.float32), **flag})
        (found,) = make_session(proto).run(None, {"x": values, **flag})
        assert np.linalg.norm(found - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_equal_graphs_get_equal_bytes(tmp_path: Path) -> None:
    net = Tiny()
    inputs = [net.input(f"x{number}", "n", 16, 8, 8) for number in range(6)]
    for number, x in enumerate(inputs):
        net.op("Exp", [net.conv(x, f"c{number}", 16, 16)], f"y{number}")
        net.op("Neg", [x], f"n{number}")
    path = net.save(tmp_path, *(f"y{number}" for number in range(6)), *(f"n{number}" for number in range(6)))
    found = {halved(path, inputs=True, outputs=True)[0].SerializeToString(deterministic=True) for _ in range(4)}
    assert len(found) == 1


@pytest.mark.parametrize("op", ["Exp", "Log", "Sqrt", "Reciprocal", "ReduceMean", "ReduceL2"])
def test_operators_that_overflow_stay_float32(tmp_path: Path, op: str) -> None:
    net = Tiny()
    net.op(op, [net.op("Abs", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "abs")], "y")
    _, result = halved(net.save(tmp_path, "y"))
    assert "y" not in result.converted
    assert result.kept["y"] == "overflows or underflows in FP16"
    assert "conv" in result.converted


@pytest.mark.parametrize(
    ("value", "fits"), [(-1e9, False), (1e-12, False), (70000.0, False), (-10000.0, True), (0.0, True)]
)
def test_constants_that_fp16_cannot_hold(tmp_path: Path, value: float, fits: bool) -> None:
    net = Tiny()
    net.constant("c", value)
    net.op("Add", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16), "c"], "y")
    _, result = halved(net.save(tmp_path, "y"))
    assert ("y" in result.converted) is fits
    if not fits:
        assert result.kept["y"] == "its constant c is outside FP16's range"


@pytest.mark.parametrize(("values", "fits"), [([1e-9], True), ([1e-9] * 1152, False), ([1e6], False)])
def test_weights_that_fp16_cannot_hold_one_by_one(tmp_path: Path, values: list[float], fits: bool) -> None:
    """A trained layer has some weights next to zero; those alone keep no layer from FP16."""
    weights = np.random.default_rng(0).normal(0, 0.1, (8, 16, 3, 3)).astype(np.float32)
    weights.reshape(-1)[: len(values)] = values
    net = Tiny()
    net.constant("w", weights)
    net.op("Conv", [net.input("x", "n", 16, 8, 8), "w"], "y")
    _, result = halved(net.save(tmp_path, "y"))
    assert ("y" in result.converted) is fits
    if not fits:
        assert result.kept["y"] == "its constant w is outside FP16's range"


def test_element_wise_operators_alone_are_not_worth_it(tmp_path: Path) -> None:
    net = Tiny()
    net.op("Sigmoid", [net.op("Relu", [net.input("x", "n", 16)], "a")], "y")
    proto, result = halved(net.save(tmp_path, "y"))
    assert result.converted == ()
    assert result.kept == {"a": "element-wise, not worth two casts", "y": "element-wise, not worth two casts"}
    assert [node.op_type for node in proto.graph.node] == ["Relu", "Sigmoid"]


def test_inputs_with_a_fixed_type_keep_it(tmp_path: Path) -> None:
    """Resize takes its scales as float32 whatever the data's type."""
    net = Tiny()
    net.constant("scales", [1, 1, 2, 2])
    net.op("Resize", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16), "", "scales"], "y", mode="linear")
    proto, result = halved(net.save(tmp_path, "y"))
    assert result.converted == ("conv", "y")
    (resize,) = [node for node in proto.graph.node if node.op_type == "Resize"]
    assert resize.input[2] == "scales"


def test_one_cast_per_tensor_and_one_copy_per_constant(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.weights("w", 16, 16, 3, 3)
    a, b = (net.op("Conv", [x, "w"], name, pads=[1] * 4) for name in "ab")
    net.op("Exp", [a], "ea")
    net.op("Log", [a], "la")
    net.op("Relu", [b], "y")
    proto, result = halved(net.save(tmp_path, "ea", "la", "y"))
    assert result.casts == 3
    halves = [tensor.name for tensor in proto.graph.initializer if tensor.data_type == TensorProto.FLOAT16]
    assert halves == ["w_fp16"]


def test_integer_core_is_left_alone(quantised: Callable[[str], Quantised]) -> None:
    """A network that is INT8 throughout does not change."""
    model = load_graph(quantised("resnet18").int8)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert to_half(model) == HalfResult()
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("name", ["mobilenetv3", "lstm", "minilm", "ocr-recogniser"])
def test_networks_with_a_float_part(
    name: str,
    quantised: Callable[[str], Quantised],
    rtx_int8_nodes: Callable[[str], frozenset[str]],
    tmp_path: Path,
) -> None:
    """Numbers, names, and the INT8 layers in a TensorRT-RTX engine are those of the FP32 remainder."""
    found = quantised(name)
    proto, result = halved(found.int8)
    assert result.converted
    before = onnx.load(found.int8)
    assert {node.name for node in before.graph.node} <= {node.name for node in proto.graph.node}
    assert {value for node in before.graph.node for value in node.output} <= {
        value for node in proto.graph.node for value in node.output
    }
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale = next(item for item in proto.graph.initializer if item.name == node.input[1])
            assert scale.data_type == TensorProto.FLOAT
    feeds = found.model.feeds(seed=99)
    fp32 = make_session(found.fp32).run(None, feeds)[0]
    int8, half = (make_session(item, optimise=False).run(None, feeds)[0] for item in (found.int8, proto))
    own = np.linalg.norm(int8 - fp32)
    assert np.linalg.norm(half - fp32) < 1.2 * own + 1e-3 * np.linalg.norm(fp32)

    pytest.importorskip("tensorrt_rtx")
    onnx.save(proto, tmp_path / "half.onnx")
    rtx_engine(tmp_path / "half.onnx", found.model, tmp_path)
    wanted = {item.node for item in found.plan.decisions if item.quantized and item.op in ("Conv", "MatMul", "Gemm")}
    assert rtx_int8_nodes(name) & wanted == int8_nodes(tmp_path) & wanted == wanted
