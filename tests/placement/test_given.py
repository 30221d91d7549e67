"""Rewrites of Q/DQ nodes that came with a model, one by one, and what is said of their placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from pipeline.config import PlacementConfig
from pipeline.core.errors import InputError
from pipeline.core.ort import make_session
from pipeline.placement import PlacementPlan, make_plan
from pipeline.placement.existing import has_quantizers, repair
from pipeline.placement.graph import GraphView, load_graph
from tests.placement.test_existing import ZERO, Quantized, network, repaired


def layer(net: Quantized, x: str, name: str, *, axis: int | None = 0, scales: int = 16) -> str:
    """Conv 16 -> 16 with stored INT8 weights on ``x``, which has a pair already or not."""
    values = net.random.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)
    scale = np.float32(0.002) if axis is None else net.random.uniform(0.001, 0.004, scales)
    weights = net.stored(f"{name}.w", values, scale, np.zeros(np.shape(scale), np.int8), axis=axis)
    return net.op("Conv", [x, weights], name, pads=[1] * 4)


def start() -> tuple[Quantized, str]:
    net = Quantized()
    return net, net.input("x", 2, 16, 8, 8)


def plan_of(net: Quantized, folder: Path, *outputs: str) -> PlacementPlan:
    return make_plan(net.save(folder, *(outputs or ("y",))), PlacementConfig())


def clipped(net: Quantized, x: str, scale: Any, zero: Any, low: int, high: int, axis: int | None = None) -> str:
    """A pair with a Clip of the integers between its nodes."""
    attributes = {} if axis is None else {"axis": axis}
    parameters = [net.constant(f"{x}.s", scale), net.constant(f"{x}.z", zero, np.asarray(zero).dtype)]
    ends = [net.constant(f"{x}.{end}", end, np.asarray(zero).dtype) for end in (low, high)]
    q = net.op("QuantizeLinear", [x, *parameters], f"{x}.q", **attributes)
    return net.op("DequantizeLinear", [net.op("Clip", [q, *ends], f"{x}.c"), *parameters], f"{x}.dq", **attributes)


@pytest.mark.parametrize(
    ("zero", "low", "high"),
    [
        (np.int8(0), -8, 7),
        (np.int8(0), -127, 127),
        (np.uint8(0), 0, 127),
        (np.uint8(64), 0, 127),
        (np.int8(-20), -100, 100),
    ],
)
def test_clip_between_the_nodes_of_a_pair(tmp_path: Path, zero: Any, low: int, high: int) -> None:
    """Narrow and low-bit ranges; also those of another type, whose steps fit int8."""
    net, x = start()
    layer(net, clipped(net, x, 0.0173, zero, low, high), "y")
    model, notes = repaired(net, tmp_path)
    assert [node.op_type for node in model.graph.node][:3] == ["Clip", "QuantizeLinear", "DequantizeLinear"]
    assert notes[0].startswith("a Clip between Q and DQ became a float Clip in front of Q (the same steps): x.c")
    types = {item.name: item.data_type for item in model.graph.initializer}
    assert {types[node.input[2]] for node in model.graph.node if "Linear" in node.op_type} == {onnx.TensorProto.INT8}


def test_clip_of_steps_that_do_not_fit(tmp_path: Path) -> None:
    net, x = start()
    layer(net, clipped(net, x, 0.0173, np.uint8(0), 0, 200), "y")
    with pytest.raises(InputError, match=r"QuantizeLinear 'x\.q' of 'x' writes uint8 that other operators than"):
        plan_of(net, tmp_path)


def test_clip_of_weights_per_channel(tmp_path: Path) -> None:
    """Stored in float: -128 becomes -127 in the constant itself."""
    net, x = start()
    net.weights("w", 16, 16, 3, 3)
    scales = np.full(16, 0.2 / 128)
    weights = clipped(net, "w", scales, np.zeros(16, np.int8), -127, 127, axis=0)
    net.op("Conv", [net.pair(x, 0.02, ZERO), weights], "y", pads=[1] * 4)
    model, _ = repaired(net, tmp_path)
    assert "Clip" not in {node.op_type for node in model.graph.node}
    assert plan_of(net, tmp_path).quantized_nodes == ("y",)


def test_equal_pairs_are_one(tmp_path: Path) -> None:
    net, x = start()
    parts = [layer(net, net.pair(x, 0.02, ZERO, name=f"p{i}"), f"c{i}") for i in range(3)]
    net.op("Sum", parts, "y")
    model, notes = repaired(net, tmp_path)
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == 1
    text = "a second QuantizeLinear of the same tensor with the same scale was merged into the first: p1.q, p2.q"
    assert text in notes


def test_unequal_pairs_stay_and_are_told(tmp_path: Path) -> None:
    net, x = start()
    parts = [layer(net, net.pair(x, 0.02 * (i + 1), ZERO, name=f"p{i}"), f"c{i}") for i in range(2)]
    net.op("Sum", parts, "y")
    model, notes = repaired(net, tmp_path)
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == 2
    assert notes == ("1 tensors are quantised more than once, with different scales, each by a kernel of its own: x",)


def product(*, weights: str, axis: int, scales: int = 12) -> Quantized:
    """MatMul of (2, 16, 8, 8) with weights (12, 8) behind a Transpose."""
    net, x = start()
    scale, zero = net.random.uniform(0.001, 0.004, scales), np.zeros(scales, np.int8)
    if weights == "int8":
        values = net.stored("w", net.random.integers(-127, 128, (12, 8)).astype(np.int8), scale, zero, axis=axis)
    else:
        values = net.pair(net.weights("w", 12, 8), scale, zero, axis=axis)
    net.op("MatMul", [net.pair(x, 0.02, ZERO), net.op("Transpose", [values], "t", perm=[1, 0])], "y")
    return net


@pytest.mark.parametrize("weights", ["int8", "float"])
@pytest.mark.parametrize("axis", [0, -2])
def test_weights_behind_a_transpose(tmp_path: Path, weights: str, axis: int) -> None:
    net = product(weights=weights, axis=axis)
    model, notes = repaired(net, tmp_path)
    assert "Transpose" not in {node.op_type for node in model.graph.node}
    axes = {node.name: [item.i for item in node.attribute] for node in model.graph.node}
    assert axes["w.dq"] == [1]
    assert notes == ("quantised weights behind a Transpose were stored transposed: t",)
    assert plan_of(net, tmp_path).quantized_nodes == ("y",)


@pytest.mark.parametrize("weights", ["int8", "float"])
def test_weights_that_others_read_too(tmp_path: Path, weights: str) -> None:
    """Each product gets its own; whoever reads them as they are keeps them."""
    net = product(weights=weights, axis=0)
    net.op("MatMul", ["x.dq", net.op("Transpose", ["w.dq"], "t2", perm=[1, 0])], "z")
    net.op("Relu", ["w.dq"], "r")
    path = net.save(tmp_path, "y", "z", "r")
    x = {"x": np.random.default_rng(5).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    before = make_session(path, optimise=False).run(None, x)
    model = load_graph(path)
    notes = repair(model)
    assert notes == ("quantised weights behind a Transpose were stored transposed: t, t2",)
    after = make_session(ir.to_proto(model), optimise=False).run(None, x)
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert {"y", "z"} < set(make_plan(path, PlacementConfig()).quantized_nodes)


def test_constants_of_no_product(tmp_path: Path) -> None:
    """A bias and a scalar whose integers do not even fit int8; a table with rows stays INT8 where it fits."""
    net, x = start()
    y = layer(net, net.pair(x, 0.02, ZERO), "c")
    y = net.op("Add", [y, net.stored("b", np.array([[[200]]] * 16, np.uint8), 0.01, np.uint8(3))], "a")
    y = net.op("Mul", [y, net.stored("k", np.array(7, np.int8), 0.01, np.int8(0))], "m")
    net.op("Add", [y, net.stored("t", np.ones((16, 8, 8), np.int8), 0.01, np.int8(0))], "y")
    model, notes = repaired(net, tmp_path)
    text = "constants of no product behind a DequantizeLinear (biases) became float constants: b.dq, k.dq"
    assert text in notes
    assert "t.dq" in {node.name for node in model.graph.node}


def test_operators_of_onnxruntime_become_those_of_onnx(tmp_path: Path) -> None:
    model = network().model("y")
    for node in model.graph.node:
        if node.op_type.endswith("Linear"):
            node.domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "contrib.onnx")
    loaded = load_graph(tmp_path / "contrib.onnx")
    assert has_quantizers(GraphView(loaded)), "not to be quantised a second time"
    notes = repair(loaded)
    assert notes[0].startswith("QuantizeLinear and DequantizeLinear of com.microsoft became ONNX's own")
    assert {node.domain for node in loaded.graph} == {""}


# --- what is said of the placement


def test_layers_without_a_pair(tmp_path: Path) -> None:
    net, x = start()
    y = layer(net, net.pair(x, 0.02, ZERO), "c")
    net.conv(y, "y", 16, 16)
    assert plan_of(net, tmp_path).notes == ("1 layers with weights have no Q/DQ pair and run in float: y",)


def residual(*, skip: bool, inner: bool = False) -> Quantized:
    net, x = start()
    first = net.pair(x, 0.02, ZERO)
    y = layer(net, first, "c")
    y = net.pair(y, 0.02, ZERO) if inner else y
    net.op("Add", [y, first if skip else x], "y")
    return net


def test_a_float_skip_input_of_add(tmp_path: Path) -> None:
    (note,) = plan_of(residual(skip=False), tmp_path).notes
    assert note.startswith("1 Adds take their skip input in float, so that the convolution fused with each writes")
    assert note.endswith(": y")


def test_a_quantised_skip_input_is_right(tmp_path: Path) -> None:
    plan = plan_of(residual(skip=True), tmp_path)
    assert plan.notes == ()
    assert plan.quantized_nodes == ("c", "y")


def test_a_pair_between_convolution_and_add(tmp_path: Path) -> None:
    (note,) = plan_of(residual(skip=True, inner=True), tmp_path).notes
    assert note == "1 pairs stand between a layer and the activation or Add that TensorRT would fuse into it: c.q"


@pytest.mark.parametrize("main", [False, True])
def test_a_projection_as_skip_input(tmp_path: Path, main: bool) -> None:
    """Its pair is right; one on the longer way to Add as well (``main``) parts that way's convolution from Add."""
    net, x = start()
    first = net.pair(x, 0.02, ZERO)
    skip = net.pair(layer(net, first, "projection"), 0.02, ZERO)
    y = layer(net, net.pair(layer(net, first, "c1"), 0.02, ZERO), "c2")
    net.op("Add", [skip, net.pair(y, 0.02, ZERO) if main else y], "y")
    text = "1 pairs stand between a layer and the activation or Add that TensorRT would fuse into it: c2.q"
    assert plan_of(net, tmp_path).notes == ((text,) if main else ())


@pytest.mark.parametrize("norm", [False, True])
def test_a_pair_between_convolution_and_activation(tmp_path: Path, norm: bool) -> None:
    net, x = start()
    y = layer(net, net.pair(x, 0.02, ZERO), "c")
    if norm:
        ones = [net.constant(name, np.ones(16)) for name in ("gamma", "beta", "mean", "variance")]
        y = net.op("BatchNormalization", [y, *ones], "bn")
    y = net.op("Relu", [net.pair(y, 0.02, ZERO)], "r")
    layer(net, net.pair(y, 0.02, ZERO), "y")
    (note,) = plan_of(net, tmp_path).notes
    assert note.endswith(f"that TensorRT would fuse into it: {'bn' if norm else 'c'}.q")


def test_scales_along_the_wrong_axis_of_weights(tmp_path: Path) -> None:
    net, x = start()
    layer(net, net.pair(x, 0.02, ZERO), "y", axis=1)
    plan = plan_of(net, tmp_path)
    assert plan.quantized_nodes == ()
    assert plan.decisions[0].reason == (
        "its weights have scales along axis 1; TensorRT takes axis 0, else it runs in float"
    )
    assert plan.notes == ("1 nodes have per-channel scales where TensorRT takes none, and run in float: y",)


def test_activation_with_a_scale_per_channel(tmp_path: Path) -> None:
    net, x = start()
    layer(net, net.pair(x, np.full(16, 0.02), np.zeros(16, np.int8), axis=1), "y")
    plan = plan_of(net, tmp_path)
    assert plan.quantized_nodes == ()
    assert plan.decisions[0].reason.startswith("activation 0 has 16 scales; TensorRT takes one")


def test_an_operator_without_an_int8_form(tmp_path: Path) -> None:
    net, x = start()
    net.op("Softmax", [net.pair(x, 0.02, ZERO)], "y", axis=-1)
    (decision,) = plan_of(net, tmp_path).decisions
    assert not decision.quantized
    assert decision.reason == (
        "input 0 (scale 0.02) is rounded by pairs that came with the model; TensorRT has no INT8 form of Softmax"
    )


@pytest.mark.parametrize(("trans", "axis"), [(1, 0), (0, 1)])
def test_gemm_takes_the_axis_of_its_outputs(tmp_path: Path, trans: int, axis: int) -> None:
    net = Quantized()
    x = net.pair(net.input("x", "n", 16), 0.02, ZERO)
    values = net.random.integers(-127, 128, (16, 16)).astype(np.int8)
    weights = net.stored("w", values, np.full(16, 0.01), np.zeros(16, np.int8), axis=axis)
    net.op("Gemm", [x, weights], "y", transB=trans)
    path = net.save(tmp_path, "y")
    assert make_plan(path, PlacementConfig()).quantized_nodes == ("y",)
    assert make_session(path, optimise=False).run(None, {"x": np.zeros((1, 16), np.float32)})[0].shape == (1, 16)


# --- integers outside of a plain pair


def test_type_in_output_dtype(tmp_path: Path) -> None:
    """Opset 21: the type of a QuantizeLinear without zero point, also of constants."""
    net, x = start()
    net.weights("w", 16, 16, 3, 3)
    operands = []
    for name, attributes in ((x, {}), ("w", {"axis": 0})):
        scale = net.constant(f"{name}.s", np.full(16, 0.005) if attributes else 0.03)
        q = net.op("QuantizeLinear", [name, scale], f"{name}.q", output_dtype=onnx.TensorProto.INT8, **attributes)
        operands.append(net.op("DequantizeLinear", [q, scale], f"{name}.dq", **attributes))
    net.op("Conv", operands, "y", pads=[1] * 4)
    path = net.save(tmp_path, "y", opset=21)
    x_value = {"x": np.random.default_rng(5).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    model = load_graph(path)
    notes = repair(model)
    assert notes[0].startswith("the type in the attribute output_dtype was written as a zero point of 0")
    runs = [make_session(each, optimise=False).run(None, x_value)[0] for each in (path, ir.to_proto(model))]
    assert np.array_equal(*runs)
    assert make_plan(path, PlacementConfig()).quantized_nodes == ("y",)


def test_uint8_that_is_an_output_is_refused(tmp_path: Path) -> None:
    net, x = start()
    layer(net, net.pair(x, 0.02, np.uint8(128)), "y")
    proto = net.model("y")
    proto.graph.output.append(helper.make_tensor_value_info("x.q", onnx.TensorProto.UINT8, [2, 16, 8, 8]))
    onnx.save(proto, tmp_path / "out.onnx")
    with pytest.raises(InputError, match=r"writes the model's output 'x\.q' as uint8; in int8 its numbers would be"):
        make_plan(tmp_path / "out.onnx", PlacementConfig())


def table(form: str) -> Quantized:
    """Rows of an int8 or uint8 table looked up, then dequantised: one scale, one per column, or one per row."""
    net = Quantized()
    ids = net.input("ids", *((5,) if form == "row" else (2, 5)), dtype=onnx.TensorProto.INT64)
    uint8 = form == "uint8"
    net.constant("t", net.random.integers(1, 255, (20, 8)) - (0 if uint8 else 128), np.uint8 if uint8 else np.int8)
    size = {"row": 20, "column": 8, "made": 5}.get(form)
    scale = net.constant("s", 0.01 if size is None else net.random.uniform(0.01, 0.02, size))
    zero = net.constant("z", 128 if uint8 else 0 if size is None else np.zeros(size), np.uint8 if uint8 else np.int8)
    if form == "row":
        scale, zero = (net.op("Gather", [name, ids], f"{name}.row") for name in (scale, zero))
    axis = {"row": {"axis": 0}, "column": {"axis": -1}, "made": {"axis": 1}}.get(form, {})
    net.op("DequantizeLinear", [net.op("Gather", ["t", ids], "g"), scale, zero], "y", **axis)
    return net


@pytest.mark.parametrize("form", ["int8", "uint8", "column", "row"])
def test_a_table_is_dequantised_before_the_look_up(tmp_path: Path, form: str) -> None:
    path = table(form).save(tmp_path, "y")
    model = load_graph(path)
    notes = repair(model)
    assert notes[0].startswith("a DequantizeLinear behind a look-up in constants came in front of it")
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.graph.node[-1].op_type == "Gather"
    ids = {"ids": np.arange(5) * 3 if form == "row" else np.arange(10).reshape(2, 5)}
    runs = [make_session(each, optimise=False).run(["y"], ids)[0] for each in (path, proto)]
    assert np.array_equal(*runs)


def test_a_table_with_scales_per_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'y' of 'g' reads what is looked up in int8 constants and cannot come in"):
        make_plan(table("made").save(tmp_path, "y"), PlacementConfig())


def test_a_transpose_between_the_nodes_of_a_pair_is_int8(tmp_path: Path) -> None:
    net = Quantized()
    x, s, z = net.input("x", 2, 8, 8, 16), net.constant("s", 0.03), net.constant("z", 0, np.int8)
    moved = net.op("Transpose", [net.op("QuantizeLinear", [x, s, z], "q")], "t", perm=[0, 3, 1, 2])
    layer(net, net.op("DequantizeLinear", [moved, s, z], "dq"), "y")
    plan = plan_of(net, tmp_path)
    assert plan.quantized_nodes == ("t", "y")
    assert plan.decisions[0].reason == "reads the INT8 tensor of QuantizeLinear 'q' itself, between the nodes of a pair"


def test_pairs_in_a_body_alone_are_seen_and_left(tmp_path: Path) -> None:
    net, x = start()
    net.conv(x, "c", 16, 16)
    inner = [net.constant("s", 0.05), net.constant("z", 0, np.int8)]
    bodies = {}
    for branch in ("then_branch", "else_branch"):
        nodes = [
            helper.make_node("QuantizeLinear", ["c", *inner], [f"{branch}.i"], f"{branch}.q"),
            helper.make_node("DequantizeLinear", [f"{branch}.i", *inner], [f"{branch}.o"], f"{branch}.dq"),
        ]
        out = helper.make_tensor_value_info(f"{branch}.o", onnx.TensorProto.FLOAT, [2, 16, 8, 8])
        bodies[branch] = helper.make_graph(nodes, branch, [], [out])
    net.op("If", [net.input("cond", dtype=onnx.TensorProto.BOOL)], "y", **bodies)
    plan = plan_of(net, tmp_path)
    assert plan.prequantized
    assert plan.notes[0].startswith("4 Q/DQ nodes in the body of an If, Loop or Scan are left as they are, neither")
