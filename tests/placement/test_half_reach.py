"""What reaches beyond FP16 stays float32, as measured and by constants; onnx's evaluator is the honest FP16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper

from pipeline import magnitudes
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.placement import PlacementPlan
from pipeline.placement.graph import load_graph
from pipeline.placement.half import HalfResult, half_tensors, to_half
from tests.honest import evaluate
from tests.placement.tiny import Tiny

FEEDS = {
    "x": np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32),
    "m": np.array([[[1.0] * 8], [[0.0] * 8]], np.float32),  # the second sample is masked throughout
}


def halved(path: Path, largest: dict[str, float] | None = None) -> tuple[onnx.ModelProto, HalfResult]:
    model = load_graph(path)
    result = to_half(model, largest=largest)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto, result


def measured(path: Path, feeds: dict[str, Any], folder: Path) -> dict[str, float]:
    batch = Batch(0, tuple(range(len(next(iter(feeds.values()))))), feeds)
    return magnitudes.run(path, half_tensors(path, PlacementPlan()), [batch], folder=folder).largest


def attention(mask: Callable[[Tiny, str], str]) -> Tiny:
    """One head of 16 channels; ``mask`` makes what is added to the scores from m, which is 1 where there is a word."""
    net = Tiny()
    x, m = net.input("x", "n", 8, 16), net.input("m", "n", 1, 8)
    for name in "qkv":
        net.weights(f"{name}.weight", 16, 16)
        net.op("MatMul", [x, f"{name}.weight"], name)
    net.op("MatMul", ["q", net.op("Transpose", ["k"], "kt", perm=[0, 2, 1])], "scores")
    net.op("Add", ["scores", mask(net, m)], "masked")
    net.op("MatMul", [net.op("Softmax", ["masked"], "p", axis=-1), "v"], "y")
    return net


def by_product(value: float) -> Callable[[Tiny, str], str]:
    def mask(net: Tiny, m: str) -> str:
        net.constant("one", 1.0)
        net.constant("far", value)
        return net.op("Mul", [net.op("Sub", ["one", m], "inverse"), "far"], "mask")

    return mask


def by_choice(net: Tiny, m: str) -> str:
    net.constant("zero", 0.0)
    net.constant("far", -1e9)
    return net.op("Where", [net.op("Cast", [m], "words", to=TensorProto.BOOL), "zero", "far"], "mask")


def by_shapes(net: Tiny, m: str) -> str:
    """A filled tensor, brought into shape, divided and selected from."""
    net.constant("shape", [1], np.int64)
    net.constant("axes", [0], np.int64)
    net.constant("two", 2.0)
    value = numpy_helper.from_array(np.array([-1e9], np.float32))
    filled = net.op("ConstantOfShape", ["shape"], "filled", value=value)
    filled = net.op("Div", [net.op("Unsqueeze", [filled, "axes"], "wide"), "two"], "half")
    words = net.op("Cast", [m], "words", to=TensorProto.BOOL)
    return net.op("Neg", [net.op("Neg", [net.op("Where", [words, "two", filled], "where")], "minus")], "mask")


MASKS = {
    "product": by_product(-1e9),
    "lowest": by_product(float(np.finfo(np.float32).min)),
    "end of fp16": by_product(-65504.0),
    "choice": by_choice,
    "shapes": by_shapes,
}


@pytest.mark.parametrize("ranges", ["none", "without a masked word", "with masked words"])
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_stays_float32_up_to_the_softmax(tmp_path: Path, kind: str, ranges: str) -> None:
    path = attention(MASKS[kind]).save(tmp_path, "y")
    feeds = {**FEEDS, "m": np.ones((2, 1, 8), np.float32)} if "without" in ranges else FEEDS
    largest = None if ranges == "none" else measured(path, feeds, tmp_path)
    proto, result = halved(path, largest)
    assert {"q", "k", "v", "kt", "scores", "y"} <= set(result.converted)
    assert not {"mask", "masked", "p"} & set(result.converted)
    assert "FP16 ends at 65504" in result.kept["p"] or "too near to FP16's end at 65504" in result.kept["p"]
    assert "'masked' reaches " in result.kept["p"]
    (wanted,) = make_session(path).run(None, FEEDS)
    (found,) = evaluate(proto, FEEDS)
    np.testing.assert_allclose(found, wanted, atol=5e-3)
    casts = {node.input[0] for node in proto.graph.node if node.op_type == "Cast" and node.attribute[0].i == 10}
    assert not casts & {"mask", "masked", "where", "minus", "filled", "half"}


def test_a_mask_within_fp16_does_not(tmp_path: Path) -> None:
    path = attention(by_product(-10000.0)).save(tmp_path, "y")
    for largest in (None, measured(path, FEEDS, tmp_path)):
        proto, result = halved(path, largest)
        assert {"masked", "p"} <= set(result.converted)
        (wanted,) = make_session(path).run(None, FEEDS)
        (found,) = evaluate(proto, FEEDS)
        np.testing.assert_allclose(found[0], wanted[0], atol=5e-3)
        assert np.isfinite(found).all()


def test_a_mask_of_true_infinities_is_measured_without_them(tmp_path: Path) -> None:
    net = attention(lambda net, m: m)
    path = net.save(tmp_path, "y")
    some = np.zeros((2, 1, 8), np.float32)
    some[:, :, 5:] = -np.inf
    feeds = {"x": FEEDS["x"], "m": some}
    largest = measured(path, feeds, tmp_path)
    assert largest["m"] == 0.0
    assert largest["masked"] == largest["scores"] < 100.0 or largest["masked"] < largest["scores"]
    proto, result = halved(path, largest)
    assert {"masked", "p"} <= set(result.converted)
    (wanted,) = make_session(path).run(None, feeds)
    np.testing.assert_allclose(evaluate(proto, feeds)[0], wanted, atol=5e-3)


def test_an_additive_mask_as_input_is_known_by_data_alone(tmp_path: Path) -> None:
    path = attention(lambda net, m: m).save(tmp_path, "y")
    feeds = {"x": FEEDS["x"], "m": (FEEDS["m"] - 1) * np.float32(1e9)}
    _, result = halved(path, measured(path, feeds, tmp_path))
    assert result.kept["masked"] == "'m' reaches 1e+09, FP16 ends at 65504"
    assert result.kept["p"] == "'masked' reaches 1e+09, FP16 ends at 65504"


def large(factor: float) -> Tiny:
    net = Tiny()
    y = net.conv(net.input("x", "n", 16, 8, 8), "small", 16, 8)
    net.constant("w", np.abs(net.random.standard_normal((8, 8, 3, 3))) * factor)
    z = net.op("Relu", [net.op("Conv", [y, "w"], "large", pads=[1] * 4)], "relu")
    net.constant("w2", net.random.standard_normal((8, 8, 1, 1)) / factor)
    z = net.op("Conv", [z, "w2"], "back", pads=[0] * 4)
    net.conv(z, "y", 8, 8)
    return net


@pytest.mark.parametrize(("factor", "text"), [(3e3, "FP16 ends at 65504"), (3e2, "too near to FP16's end at 65504")])
def test_layers_that_reach_beyond_fp16_on_data(tmp_path: Path, factor: float, text: str) -> None:
    path = large(factor).save(tmp_path, "y")
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 16, 8, 8)).astype(np.float32) * 3}
    proto, result = halved(path, measured(path, feeds, tmp_path))
    assert (result.converted, set(result.kept)) == (("small", "y"), {"large", "relu", "back"})
    (top,) = make_session(path, capture=["large"]).run(["large"], feeds)
    assert result.kept["large"] == f"'large' reaches {np.abs(top).max():.3g}, {text}"
    assert result.kept["back"].startswith("'relu' reaches ")
    (wanted,) = make_session(path).run(None, feeds)
    (found,) = evaluate(proto, feeds)
    assert np.linalg.norm(found - wanted) < 5e-3 * np.linalg.norm(wanted)
    blind, _ = halved(path)
    if factor > 1e3:  # what the ranges are for
        assert not np.isfinite(evaluate(blind, feeds)[0]).all()


@pytest.mark.parametrize(
    ("value", "converted"),
    [(16376.0, ("conv", "y")), (16377.0, ()), (1e6, ())],
    ids=["at the margin", "past the margin", "beyond"],
)
def test_the_margin(tmp_path: Path, value: float, converted: tuple[str, ...]) -> None:
    net = Tiny()
    net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "y")
    _, result = halved(net.save(tmp_path, "y"), {"conv": value})
    assert result.converted == converted


@pytest.mark.parametrize(
    ("op", "constants", "goes_on"),
    [("Sigmoid", [], False), ("Clip", [-6.0, 6.0], False), ("Mul", [1e-5], False), ("Max", [5.0], True),
     ("Relu", [], True), ("Add", [1.0], True)],
)  # fmt: skip
def test_where_what_constants_make_ends(tmp_path: Path, op: str, constants: list[float], goes_on: bool) -> None:
    """A convolution behind an operator that reads x + 1e6."""
    net = Tiny()
    net.constant("far", 1e6)
    y = net.op("Add", [net.input("x", "n", 16, 8, 8), "far"], "sum")
    names = [net.constant(f"c{number}", value) for number, value in enumerate(constants)]
    net.conv(net.op(op, [y, *names], "next"), "y", 16, 16)
    _, result = halved(net.save(tmp_path, "y"))
    assert result.kept["next"] == "'sum' reaches 1e+06 by the graph's constants, FP16 ends at 65504"
    assert ("y" in result.kept) is goes_on


def test_tensors_that_fp16_may_touch(tmp_path: Path) -> None:
    """Not the readers of INT8, constants, integers, or what stays float32 anyway."""
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    ids = net.input("ids", "n", dtype=TensorProto.INT64)
    net.op("Exp", [net.op("Relu", [net.conv(net.conv(x, "c1", 16, 16), "c2", 16, 16)], "relu")], "y")
    net.op("Neg", [net.op("Cast", [ids], "floats", to=TensorProto.FLOAT)], "z")
    path = net.save(tmp_path, "y", "z")
    assert half_tensors(path, PlacementPlan()) == ("x", "c1", "c2", "relu", "floats", "z")
    plan = net.plan(tmp_path, "y", "z")
    assert {node for point in plan.activations for node, _ in point.consumers} == {"c1", "c2"}
    assert half_tensors(path, plan) == ("c2", "relu", "floats", "z")
