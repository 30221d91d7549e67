"""Rules for the operands of convolutions and matrix products, and those that leave them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.placement.tiny import Tiny, decision, pairs


def axes(plan) -> dict[str, int | None]:  # type: ignore[no-untyped-def]
    return {weight.tensor: weight.axis for weight in plan.weights}


def test_conv_quantises_input_and_weights_but_not_bias_or_output(tmp_path: Path) -> None:
    net = Tiny()
    net.conv(net.input("x", "n", 16, 8, 8), "y", 16, 32)
    plan = net.plan(tmp_path, "y")
    assert pairs(plan) == {"x": {("y", 0)}}
    assert axes(plan) == {"y.weight": 0}
    assert plan.tensors == ("x",)
    assert decision(plan, "y") == (True, "conv")


@pytest.mark.parametrize(("group", "axis"), [(1, 1), (2, None)])
def test_conv_transpose_axis(tmp_path: Path, group: int, axis: int | None) -> None:
    net = Tiny()
    net.weights("w", 32, 32 // group, 2, 2)
    net.op("ConvTranspose", [net.input("x", "n", 32, 8, 8), "w"], "y", strides=[2, 2], group=group)
    assert axes(net.plan(tmp_path, "y")) == {"w": axis}


@pytest.mark.parametrize(("flip", "axis"), [(1, 0), (0, 1)])
def test_gemm_axis_follows_transB(tmp_path: Path, flip: int, axis: int) -> None:
    net = Tiny()
    net.weights("w", *((48, 32) if flip else (32, 48)))
    net.op("Gemm", [net.input("x", "n", 32), "w"], "y", transB=flip)
    plan = net.plan(tmp_path, "y")
    assert axes(plan) == {"w": axis}
    assert decision(plan, "y") == (True, "gemm")


def test_matmul_weights_axis_1_and_stacked_weights_one_scale(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 32, 48)
    net.weights("v", 3, 48, 32)
    net.op("MatMul", [net.op("MatMul", [net.input("x", 3, "n", 32), "w"], "y"), "v"], "z")
    assert axes(net.plan(tmp_path, "z")) == {"w": 1, "v": None}


def test_product_of_two_activations_quantises_both(tmp_path: Path) -> None:
    net = Tiny()
    net.op("MatMul", [net.input("a", "n", 8, 32), net.input("b", "n", 32, 16)], "y")
    plan = net.plan(tmp_path, "y")
    assert pairs(plan) == {"a": {("y", 0)}, "b": {("y", 1)}}
    assert decision(plan, "y") == (True, "matmul-activations")


def test_one_pair_however_many_readers(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.op("Concat", [net.conv(x, "a", 16, 16), net.conv(x, "b", 16, 16), net.op("Relu", [x], "c")], "y", axis=1)
    assert pairs(net.plan(tmp_path, "y")) == {"x": {("a", 0), ("b", 0)}}


def test_weights_and_activations_of_other_types_stay(tmp_path: Path) -> None:
    from onnx import TensorProto

    net = Tiny()
    net.constant("w", net.random.standard_normal((32, 16)), "float16")
    net.op("Cast", [net.op("MatMul", [net.input("x", "n", 32, dtype=TensorProto.FLOAT16), "w"], "h")], "y", to=1)
    plan = net.plan(tmp_path, "y")
    assert pairs(plan) == {}
    assert decision(plan, "h") == (False, "not-quantizable")


@pytest.mark.parametrize(
    ("inputs", "outputs", "first", "rule"),
    [(16, 8, False, "tiny-channels"), (8, 16, False, "tiny-channels"), (3, 16, True, "conv"), (16, 16, False, "conv")],
)
def test_tiny_channels(tmp_path: Path, inputs: int, outputs: int, first: bool, rule: str) -> None:
    net = Tiny()
    x = net.input("x", "n", 3, 8, 8)
    if not first:
        x = net.conv(x, "stem", 3, inputs)
    net.conv(x, "y", inputs, outputs)
    assert decision(net.plan(tmp_path, "y"), "y")[1] == rule


def test_first_convolution_behind_padding_and_normalisation_is_still_the_first(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("mean", 127.0)
    net.constant("pads", [0, 0, 0, 0, 0, 0, 1, 1], "int64")
    x = net.op("Sub", [net.input("x", "n", 3, 8, 8), "mean"], "centred")
    net.conv(net.op("Pad", [x, "pads"], "padded"), "y", 3, 16, pads=[0] * 4)
    assert decision(net.plan(tmp_path, "y"), "y") == (True, "conv")


def test_single_pixel_convolution_stays_float(tmp_path: Path) -> None:
    net = Tiny()
    pooled = net.op("GlobalAveragePool", [net.conv(net.input("x", "n", 32, 8, 8), "c", 32, 32)], "pooled")
    net.conv(pooled, "y", 32, 32, 1, pads=[0] * 4)
    assert decision(net.plan(tmp_path, "y"), "y") == (False, "single-pixel")


@pytest.mark.parametrize(
    ("x", "w", "rule"),
    [
        ((1, 32), (32, 48), "matrix-vector"),
        (("n", 32), (32, 1), "matrix-vector"),
        (("n", 8), (8, 48), "tiny-product"),
        (("n", 32), (32, 10), "tiny-product"),
        (("n", 32), (32, 48), "matmul"),
    ],
)
def test_small_products_stay_float(tmp_path: Path, x: tuple[int | str, ...], w: tuple[int, int], rule: str) -> None:
    net = Tiny()
    net.weights("w", *w)
    net.op("MatMul", [net.input("x", *x), "w"], "y")
    assert decision(net.plan(tmp_path, "y"), "y") == (rule == "matmul", rule)


def test_computed_weights_and_constant_left_operand_stay_float(tmp_path: Path) -> None:
    net = Tiny()
    net.op("Conv", [net.input("x", "n", 16, 8, 8), net.input("w", 16, 16, 1, 1)], "y")
    net.weights("left", 32, 32)
    net.op("MatMul", ["left", net.input("z", 32, "m")], "v")
    plan = net.plan(tmp_path, "y", "v")
    assert decision(plan, "y") == (False, "computed-weights")
    assert decision(plan, "v") == (False, "left-operand")


def attention(masked: bool, length: int = 24) -> Tiny:
    net = Tiny()
    query, key, value = (net.input(name, "n", 4, length, 32) for name in ("q", "k", "v"))
    scores = net.op("MatMul", [query, net.op("Transpose", [key], "kt", perm=[0, 1, 3, 2])], "scores")
    net.constant("factor", 0.17)
    scores = net.op("Mul", [scores, "factor"], "scaled")
    if masked:
        scores = net.op("Add", [scores, net.input("mask", "n", 1, 1, length)], "masked")
    net.op("MatMul", [net.op("Softmax", [scores], "weights", axis=-1), value], "y")
    return net


def test_attention_without_mask_is_int8_and_its_inside_float(tmp_path: Path) -> None:
    plan = attention(masked=False).plan(tmp_path, "y")
    assert set(pairs(plan)) == {"q", "kt", "v", "weights"}
    assert decision(plan, "weights") == (False, "softmax")
    assert decision(plan, "scaled") == (False, "softmax")
    (point,) = [point for point in plan.activations if point.tensor == "weights"]
    assert point.known_amax == 1.0


def test_attention_with_mask_stays_float(tmp_path: Path) -> None:
    plan = attention(masked=True).plan(tmp_path, "y")
    assert pairs(plan) == {}
    assert decision(plan, "scores") == (False, "masked-attention")
    assert decision(plan, "y") == (False, "masked-attention")
    assert decision(plan, "masked") == (False, "softmax")


def test_attention_with_mask_is_int8_when_the_rule_is_off_or_the_user_asks(tmp_path: Path) -> None:
    net = attention(masked=True)
    assert "weights" in pairs(net.plan(tmp_path, "y", rules_off=("masked-attention",)))
    assert set(pairs(net.plan(tmp_path, "y", include=("scores",)))) == {"q", "kt"}


def test_long_attention_stays_float(tmp_path: Path) -> None:
    assert decision(attention(masked=False, length=640).plan(tmp_path, "y"), "scores") == (False, "long-attention")
