"""What `quantize explain` says is true: copies that commute and those that do not, kernels, GELU, normalisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from pipeline.placement import PlacementPlan
from pipeline.placement.rule import FIXED
from tests.placement.numbers import assert_numbers
from tests.placement.tiny import Tiny, decision, groups, pairs

COMMUTES = "TensorRT moves the Q in front"


def reason(plan: PlacementPlan, node: str) -> str:
    (found,) = [item for item in plan.decisions if item.node == node]
    return found.reason


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def stem(net: Tiny) -> str:
    return net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "relu")


# --- copies


@pytest.mark.parametrize(("value", "words"), [(-5.0, "-5"), (-np.inf, "-inf"), (None, "a computed value")])
def test_a_pad_of_other_values_than_zero_has_its_pair_behind(tmp_path: Path, value: float | None, words: str) -> None:
    net = Tiny()
    net.constant("pads", [0, 0, 1, 1, 0, 0, 1, 1], "int64")
    filling = net.input("filling") if value is None else net.constant("filling", value)
    net.conv(net.op("Pad", [stem(net), "pads", filling], "padded"), "y", 16, 16, pads=[0] * 4)
    plan = net.plan(tmp_path, "y")
    assert set(pairs(plan)) == {"x", "padded"}
    assert decision(plan, "padded") == (False, "copy")
    assert reason(plan, "padded").startswith(f"pads float values with {words}, which INT8 steps of the data do not")
    assert COMMUTES not in reason(plan, "padded")
    assert reason(plan, "relu").endswith("whose output stays float")
    if value == -5.0:
        assert_numbers(tmp_path / "tiny.onnx", tmp_path, {"x": noise(2, 16, 8, 8)})


def test_a_pad_of_minus_infinity_stays_float_and_the_max_pool_behind_it_commutes(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("pads", [0, 0, 1, 1, 0, 0, 1, 1], "int64")
    padded = net.op("Pad", [stem(net), "pads", net.constant("lowest", -np.inf)], "padded")
    net.conv(net.op("MaxPool", [padded], "pool", kernel_shape=[3, 3], strides=[2, 2]), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert set(pairs(plan)) == {"x", "pool"}
    assert COMMUTES not in reason(plan, "padded")
    assert COMMUTES in reason(plan, "pool")
    assert_numbers(tmp_path / "tiny.onnx", tmp_path, {"x": noise(2, 16, 8, 8)})


@pytest.mark.parametrize("off", [(), ("pad",)])
def test_a_pad_of_zeros_commutes(tmp_path: Path, off: tuple[str, ...]) -> None:
    net = Tiny()
    net.constant("pads", [0, 0, 1, 1, 0, 0, 1, 1], "int64")
    net.conv(net.op("Pad", [stem(net), "pads"], "padded"), "y", 16, 16, pads=[0] * 4)
    plan = net.plan(tmp_path, "y", rules_off=off)
    assert decision(plan, "padded") == ((False, "copy") if off else (True, "pad"))
    assert (COMMUTES in reason(plan, "padded")) is bool(off)


def test_interpolation_does_not_commute(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("scales", [1, 1, 2, 2])
    net.conv(net.op("Resize", [stem(net), "", "scales"], "up", mode="linear"), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert reason(plan, "up") == "computes new float values between those it reads: the pair behind it quantises them"


@pytest.mark.parametrize("outside", [0.0, 100.0])
def test_a_nearest_resize_that_fills_the_outside_shares_no_scale(tmp_path: Path, outside: float) -> None:
    """tf_crop_and_resize writes a constant outside of the image, which may be beyond its range."""
    net = Tiny()
    net.constant("roi", [0, 0, 0, 0, 1, 1, 1.5, 1.5])
    net.constant("sizes", [2, 16, 16, 16], "int64")
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": outside}
    x = net.op("Relu", [net.conv(net.input("x", 2, 16, 8, 8), "conv", 16, 16)], "relu")
    net.conv(net.op("Resize", [x, "roi", "", "sizes"], "up", mode="nearest", **crop), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert groups(plan) == ([] if outside else [{"relu", "up"}])
    assert ("up" in plan.tensors) is bool(outside), "calibrated by itself where it has values of its own"
    if outside:
        assert_numbers(tmp_path / "tiny.onnx", tmp_path, {"x": noise(2, 16, 8, 8)})


def test_a_cast_is_no_copy(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("Cast", [net.input("x", "n", 16, 8, 8, dtype=TensorProto.UINT8)], "cast", to=TensorProto.FLOAT)
    net.conv(x, "y", 16, 16)
    assert reason(net.plan(tmp_path, "y"), "cast") == "makes floats of another type: the pair behind it quantises them"


def test_float_copies_say_so(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("Transpose", [net.input("x", "n", 16, 8, 8)], "t", perm=[0, 2, 3, 1])
    net.op("Cast", [net.op("Resize", [x, "", net.constant("s", [1, 2, 2, 1])], "up", mode="linear")], "y", to=1)
    plan = net.plan(tmp_path, "y")
    assert reason(plan, "t") == "copies float values for float readers"
    assert reason(plan, "up") == "computes float values for float readers"
    assert reason(plan, "y") == "changes the type, for float readers"


# --- pools


@pytest.mark.parametrize(
    ("op", "conv", "reader", "words"),
    [
        ("GlobalMaxPool", True, True, "reduces the float output of a convolution: only what it leaves is quantised"),
        ("GlobalMaxPool", False, True, "reduces float values that no INT8 convolution writes"),
        ("GlobalMaxPool", True, False, "reduces float values for float readers"),
        ("GlobalAveragePool", False, True, "reduces float values that no INT8 convolution writes"),
    ],
)
def test_pools(tmp_path: Path, op: str, conv: bool, reader: bool, words: str) -> None:
    net = Tiny()
    x = stem(net) if conv else net.op("Tanh", [net.op("Sin", [net.input("x", "n", 16, 8, 8)], "sin")], "tanh")
    net.weights("w", 16, 32)
    flat = net.op("Flatten", [net.op(op, [x], "pool")], "flat")
    out = net.op("MatMul", [flat, "w"], "y") if reader else net.op("Sin", [flat], "y")
    assert reason(net.plan(tmp_path, out), "pool").startswith(words)


def test_a_max_pool_whose_indices_are_read_does_not_commute(tmp_path: Path) -> None:
    net = Tiny()
    net.op("MaxPool", [stem(net)], "pool", "indices", kernel_shape=[2, 2])
    net.op("Cast", ["indices"], "places", to=TensorProto.FLOAT)
    net.conv("pool", "y", 16, 16)
    assert COMMUTES not in reason(net.plan(tmp_path, "y", "places"), "pool")


# --- kernels


def residual(tmp_path: Path, **config: tuple[str, ...]) -> PlacementPlan:
    net = Tiny()
    x = stem(net)
    added = net.op("Add", [net.conv(x, "inner", 16, 16), x], "add")
    net.conv(net.op("Relu", [added], "out"), "y", 16, 16)
    return net.plan(tmp_path, "y", **config)


def test_what_reads_a_float_skip_is_not_written_as_int8(tmp_path: Path) -> None:
    plan = residual(tmp_path)
    assert decision(plan, "add") == (True, "residual-add")
    assert reason(plan, "out") == "runs in the kernel of inner, before its result is rounded to INT8"
    plan = residual(tmp_path, rules_off=("residual-add",))
    for node in ("add", "out"):
        assert decision(plan, node) == (False, "epilogue")
        assert reason(plan, node) == (
            "runs in the kernel of inner, which reads relu in float as well and so writes float: the pair behind it "
            "rounds that to INT8"
        )
    plan = residual(tmp_path, exclude=("add",))
    assert reason(plan, "out").startswith("runs in the kernel of inner, which reads relu in float as well")


def test_a_projection_that_takes_the_add_is_the_kernel(tmp_path: Path) -> None:
    """The first block of a ResNet-50: the projection writes more than it reads, so the other side is the skip."""
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.conv(net.op("Relu", [net.conv(x, "conv1", 16, 32)], "relu1"), "conv2", 32, 32)
    net.conv(x, "projection", 16, 32, 1)
    net.conv(net.op("Relu", [net.op("Add", ["conv2", "projection"], "add")], "out"), "y", 32, 32)
    plan = net.plan(tmp_path, "y")
    assert pairs(plan)["conv2"] == {("add", 0)}
    assert reason(plan, "out") == "runs in the kernel of projection, before its result is rounded to INT8"


def test_a_result_that_others_read_too_is_written_before_the_activation(tmp_path: Path) -> None:
    net = Tiny()
    x = net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)
    net.conv(net.op("Relu", [x], "relu"), "y", 16, 16)
    net.conv(x, "z", 16, 16)
    plan = net.plan(tmp_path, "y", "z")
    assert decision(plan, "relu") == (False, "element-wise")
    assert reason(plan, "relu") == (
        "element by element on float values: the kernel of conv has to write conv for its other readers"
    )


def test_why_an_add_is_no_residual(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.conv(net.op("Add", [net.op("Sin", [x], "sin"), net.op("Cos", [x], "cos")], "add"), "y", 16, 16)
    assert reason(net.plan(tmp_path, "y"), "add") == (
        "adds two float tensors: no INT8 convolution of the same shape directly before it to fuse with"
    )


# --- products


@pytest.mark.parametrize(
    ("rule", "node"), [("conv", "conv"), ("gemm", "gemm"), ("matmul", "matmul"), ("matmul-activations", "product")]
)
def test_a_rule_that_is_off_is_named(tmp_path: Path, rule: str, node: str) -> None:
    net = Tiny()
    flat = net.op("Flatten", [stem(net)], "flat")
    for name, op in (("matmul", "MatMul"), ("gemm", "Gemm")):
        net.weights(f"{name}.weight", 1024, 1024)
        net.op(op, [flat, f"{name}.weight"], name)
    net.op("MatMul", ["matmul", net.op("Transpose", ["gemm"], "turned")], "product")
    plan = net.plan(tmp_path, "product", rules_off=(rule,))
    assert decision(plan, node) == (False, "not-quantizable")
    assert reason(plan, node) == f"its rule {rule} is switched off"


def test_an_operand_of_another_type_is_named(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("Cast", [net.input("x", "n", 32)], "half", to=TensorProto.FLOAT16)
    net.constant("w", np.ones((32, 32)), np.float16)
    net.op("Cast", [net.op("MatMul", [x, "w"], "m")], "wide", to=TensorProto.FLOAT)
    net.constant("z", np.ones((32, 32)), np.float64)
    double = net.op("MatMul", [net.op("Cast", ["wide"], "long", to=TensorProto.DOUBLE), "z"], "d")
    net.op("Cast", [double], "y", to=TensorProto.FLOAT)
    plan = net.plan(tmp_path, "y")
    assert reason(plan, "m") == "its data input half is float16: only float32 tensors are quantised"
    assert reason(plan, "d") == "its data input long is double: only float32 tensors are quantised"


@pytest.mark.parametrize(("off", "node"), [("computed-weights", "a"), ("left-operand", "b")])
def test_operands_without_int8_form_are_named_when_the_rule_about_them_is_off(
    tmp_path: Path, off: str, node: str
) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.op("Conv", [x, net.input("w", 16, 16, 1, 1)], "a")
    net.op("MatMul", [net.weights("left", 32, 32), net.input("z", 32, 32)], "b")
    plan = net.plan(tmp_path, "a", "b", rules_off=(off,))
    words = {"a": "its weights w are computed, not constant", "b": "its data input left is a constant"}
    assert reason(plan, node) == words[node]


# --- compounds


def gelu(net: Tiny, x: str, form: str) -> set[str]:
    """GELU of ``x`` called ``gelu``; returns its nodes."""
    for name, value in {"three": 3.0, "cubic": 0.044715, "root": 0.7978846, "one": 1.0, "half": 0.5, "q": 1.702,
                        "sqrt2": 1.4142135, "two": 2.0}.items():  # fmt: skip
        net.constant(name, value)
    before = len(net.nodes)
    if form == "sigmoid":
        net.op("Mul", [x, net.op("Sigmoid", [net.op("Mul", ["q", x], "g.scaled")], "g.sigmoid")], "gelu")
    elif form == "erf":
        erf = net.op("Erf", [net.op("Div", [x, "sqrt2"], "g.div")], "g.erf")
        net.op("Mul", [net.op("Mul", [x, net.op("Add", [erf, "one"], "g.add")], "g.mul"), "half"], "gelu")
    elif form == "erf-halves":  # x * (0.5 + 0.5 erf)
        erf = net.op("Mul", [net.op("Erf", [net.op("Div", [x, "sqrt2"], "g.div")], "g.erf"), "half"], "g.halved")
        net.op("Mul", [net.op("Add", [erf, "half"], "g.add"), x], "gelu")
    else:
        if form == "tanh":
            cube = net.op("Pow", [x, "three"], "g.pow")
        else:
            cube = net.op("Mul", [net.op("Mul", [x, x], "g.square"), x], "g.cube")
        inner = net.op("Add", [x, net.op("Mul", ["cubic", cube], "g.inner")], "g.sum")
        if form == "tanh-sigmoid":  # x * sigmoid(2 y), which is x * (1 + tanh y) / 2
            factor = net.op("Mul", [net.op("Mul", [inner, "root"], "g.root"), "two"], "g.twice")
            net.op("Mul", [x, net.op("Sigmoid", [factor], "g.sigmoid")], "gelu")
        else:
            tanh = net.op("Tanh", [net.op("Mul", [inner, "root"], "g.root")], "g.tanh")
            halved = net.op("Mul", [x, "half"], "g.half")
            net.op("Mul", [halved, net.op("Add", [tanh, "one"], "g.add")], "gelu")
    return {node.name for node in net.nodes[before:]}


@pytest.mark.parametrize("form", ["erf", "erf-halves", "tanh", "tanh-products", "tanh-sigmoid", "sigmoid"])
@pytest.mark.parametrize("behind", ["MatMul", "Sin"])
def test_gelu_in_every_form(tmp_path: Path, form: str, behind: str) -> None:
    net = Tiny()
    net.weights("w1", 32, 128)
    net.weights("w2", 128, 32)
    x = net.input("x", "n", 24, 32)
    x = net.op("MatMul", [x, "w1"], "m1") if behind == "MatMul" else net.op("Sin", [net.input("z", 24, 128)], "sin")
    biased = net.op("Add", [x, net.weights("b", 128)], "biased")
    nodes = gelu(net, biased, form)
    net.op("MatMul", ["gelu", "w2"], "y")
    plan = net.plan(tmp_path, "y")
    assert {item.node for item in plan.decisions if item.rule == "gelu"} == nodes
    assert decision(plan, "biased") == (False, "epilogue" if behind == "MatMul" else "element-wise")
    sigmoid = form in ("sigmoid", "tanh-sigmoid")
    assert {("sigmoid form" in reason(plan, node)) for node in nodes} == {sigmoid}


@pytest.mark.parametrize("form", ["silu", "mish", "beta"])
def test_other_activations_are_no_gelu(tmp_path: Path, form: str) -> None:
    net = Tiny()
    x = net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)
    if form == "silu":
        gate = net.op("Sigmoid", [x], "gate")
    elif form == "mish":
        gate = net.op("Tanh", [net.op("Softplus", [x], "softplus")], "gate")
    else:
        gate = net.op("Sigmoid", [net.op("Mul", [x, net.constant("beta", 1.2)], "scaled")], "gate")
    net.conv(net.op("Mul", [x, gate], "act"), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert decision(plan, "gate") == decision(plan, "act") == (False, "epilogue")


def normalise(net: Tiny, x: str, form: str) -> set[str]:
    for name, value in (("two", 2.0), ("eps", 1e-5), ("inverse", -0.5), ("root", 0.5), ("unit", 1.0)):
        net.constant(name, value)
    before = len(net.nodes)
    if form == "l2":
        norm = net.op("Clip", [net.op("ReduceL2", [x], "l2", axes=[-1]), "eps"], "clipped")
        net.op("Div", [x, net.op("Expand", [norm, net.constant("shape", [1, 24, 32], "int64")], "wide")], "normal")
        return {node.name for node in net.nodes[before:]}
    if form == "layer":
        x = net.op("Sub", [x, net.op("ReduceMean", [x], "mean", axes=[-1])], "centred")
    square = net.op("Mul", [x, x], "square") if form == "rms" else net.op("Pow", [x, "two"], "square")
    variance = net.op("Add", [net.op("ReduceMean", [square], "variance", axes=[-1]), "eps"], "shifted")
    if form == "power":
        net.op("Mul", [x, net.op("Pow", [variance, "inverse"], "rsqrt")], "normal")
    elif form == "reciprocal":
        net.op("Mul", [x, net.op("Reciprocal", [net.op("Sqrt", [variance], "sqrt")], "rsqrt")], "normal")
    elif form == "quotient":
        net.op("Mul", [net.op("Div", ["unit", net.op("Sqrt", [variance], "sqrt")], "rsqrt"), x], "normal")
    else:
        net.op("Div", [x, net.op("Pow", [variance, "root"], "sqrt")], "normal")
    return {node.name for node in net.nodes[before:]}


@pytest.mark.parametrize("form", ["layer", "rms", "power", "reciprocal", "quotient", "l2"])
def test_normalisation_in_every_form(tmp_path: Path, form: str) -> None:
    net = Tiny()
    net.weights("w", 32, 32)
    nodes = normalise(net, net.op("Sin", [net.input("x", "n", 24, 32)], "sin"), form)
    net.op("MatMul", ["normal", "w"], "y")
    plan = net.plan(tmp_path, "y")
    assert {item.node for item in plan.decisions if item.rule == "normalisation"} == nodes


def test_powers_roots_and_means_of_other_purposes_are_no_normalisation(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 32, 32)
    cube = net.op("Pow", [net.input("x", "n", 24, 32), net.constant("three", 3.0)], "cube")
    mean = net.op("ReduceMean", [net.op("Sqrt", [cube], "sqrt")], "mean", axes=[1], keepdims=0)
    net.op("MatMul", [net.op("Mul", [mean, net.constant("two", 2.0)], "twice"), "w"], "y")
    plan = net.plan(tmp_path, "y")
    for node, rule in (("cube", "element-wise"), ("sqrt", "element-wise"), ("mean", "pooling")):
        assert decision(plan, node) == (False, rule)


def test_every_name_that_a_decision_gives_is_explained_by_quantize_rules(tmp_path: Path) -> None:
    from pipeline.placement.registry import all_rules
    from tests.placement.test_existing import network

    net = Tiny()
    net.conv(net.op("Sin", [net.input("x", "n", 16, 8, 8)], "sin"), "y", 16, 16)
    (tmp_path / "qdq").mkdir()
    plans = [net.plan(tmp_path, "y", exclude=("y",)), network().plan(tmp_path / "qdq", "y")]
    found = {item.rule for plan in plans for item in plan.decisions}
    assert found == {fixed.name for fixed in FIXED}
    assert found.isdisjoint(rule.name for rule in all_rules())
