"""Equalisation: the float graph computes the same bits, and INT8 computes something better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import calibrators
from calibrators import TensorStatistics
from calibrators.accumulate import add_batch
from pipeline import quantize
from pipeline.config import PlacementConfig
from pipeline.core.ort import make_session
from pipeline.data import Batch
from pipeline.placement import make_plan
from pipeline.placement.equalise import EqualiseResult, factors, run
from pipeline.placement.graph import GraphView, load_graph
from pipeline.placement.scaling import candidates
from tests.placement.conftest import Quantised, int8_nodes, rtx_engine
from tests.placement.test_zoo import FLOAT_IN_RTX, WEIGHTED
from tests.placement.tiny import Tiny

CONFIG = PlacementConfig()
Feeds = dict[str, np.ndarray]


def equalised(model: Path, feeds: list[Feeds], folder: Path) -> EqualiseResult:
    return run(model, [Batch(i, (i,), feed) for i, feed in enumerate(feeds)], folder=folder, config=CONFIG)


def outputs(model: Path, feeds: Feeds) -> list[np.ndarray]:
    return make_session(model, optimise=False).run(None, feeds)


def int8_error(model: Path, feeds: list[Feeds], folder: Path) -> float:
    """Relative L2 error of the INT8 graph, minmax on ``feeds``."""
    return distance(outputs(model, feeds[0])[0], outputs(int8_graph(model, feeds, folder), feeds[0])[0])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def int8_graph(model: Path, feeds: list[Feeds], folder: Path) -> Path:
    """Minmax on ``feeds``."""
    plan = make_plan(model, CONFIG)
    session = make_session(model, capture=plan.tensors)
    statistics = {name: TensorStatistics() for name in plan.tensors}
    for index, feed in enumerate(feeds):
        for name, value in zip(plan.tensors, session.run(list(plan.tensors), feed), strict=True):
            add_batch(statistics[name], value, index)
    minmax = calibrators.get("minmax")
    return quantize.run(model, plan, statistics, minmax, folder=folder, config=CONFIG).model_path


def images(count: int = 3, channels: int = 16) -> list[Feeds]:
    random = np.random.default_rng(7)
    return [{"x": random.standard_normal((2, channels, 8, 8)).astype(np.float32)} for _ in range(count)]


def depthwise(activation: str | None, shared: bool = False) -> Tiny:
    """1x1 convolution with channels of very different size, activation, depthwise convolution."""
    net = Tiny()
    y = net.conv(net.input("x", "n", 16, 8, 8), "expand", 16, 32, 1, pads=[0] * 4)
    weights = onnx.numpy_helper.to_array(net.constants["expand.weight"])
    net.constant("expand.weight", weights * np.exp2(np.linspace(-5, 1, 32)).reshape(-1, 1, 1, 1))
    net.constant("expand.bias", np.zeros(32))
    if activation is not None:
        y = net.op(activation, [y], "act")
    z = net.conv(y, "dw", 32, 32, group=32)
    weights = onnx.numpy_helper.to_array(net.constants["dw.weight"])
    net.constant("dw.weight", weights / np.exp2(np.linspace(-5, 1, 32)).reshape(-1, 1, 1, 1))
    net.op("Add", [z, net.op("Neg", [y], "neg")] if shared else [z, z], "y")
    return net


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", None])
def test_depthwise_pair(tmp_path: Path, activation: str | None) -> None:
    model = depthwise(activation).save(tmp_path, "y")
    feeds = images()
    result = equalised(model, feeds, tmp_path / "equal")
    (tensor,) = result.tensors
    assert tensor.way == "weights"
    assert tensor.readers == ("dw",)
    assert tensor.spread_after < 0.35 * tensor.spread_before
    assert all(
        np.array_equal(*pair)
        for pair in zip(outputs(model, feeds[0]), outputs(result.model_path, feeds[0]), strict=True)
    )
    before, after = (int8_error(path, feeds, tmp_path / path.parent.name / "q") for path in (model, result.model_path))
    assert after < 0.5 * before
    assert [node.name for node in onnx.load(model).graph.node] == [
        node.name for node in onnx.load(result.model_path).graph.node
    ]


@pytest.mark.parametrize(("activation", "shared"), [("HardSwish", False), ("Relu", True)])
def test_what_cannot_be_scaled_exactly_is_no_candidate(tmp_path: Path, activation: str, shared: bool) -> None:
    model = depthwise(activation, shared).save(tmp_path, "y")
    assert candidates(GraphView(load_graph(model)), make_plan(model, CONFIG)) == []


def transformer(residual: bool) -> Tiny:
    """LayerNorm with a few wide channels, two products; with ``residual`` something else reads the LayerNorm too."""
    net = Tiny()
    gamma = np.ones(64)
    gamma[[3, 40]] = 40.0
    net.constant("gamma", gamma)
    net.weights("beta", 64)
    norm = net.op("LayerNormalization", [net.input("x", "n", 10, 64), "gamma", "beta"], "norm", axis=-1)
    for name in ("w1", "w2"):
        net.weights(name, 64, 64)
        net.constant(name, onnx.numpy_helper.to_array(net.constants[name]) / gamma.reshape(-1, 1))
    parts = [net.op("MatMul", [norm, "w1"], "a"), net.op("MatMul", [norm, "w2"], "b")]
    net.op("Concat", [*parts, norm] if residual else parts, "y", axis=-1)
    return net


@pytest.mark.parametrize("residual", [False, True])
def test_layer_norm_and_products(tmp_path: Path, residual: bool) -> None:
    model = transformer(residual).save(tmp_path, "y")
    random = np.random.default_rng(8)
    feeds = [{"x": random.standard_normal((2, 10, 64)).astype(np.float32)} for _ in range(3)]
    result = equalised(model, feeds, tmp_path / "equal")
    (tensor,) = result.tensors
    assert tensor.way == ("multiply" if residual else "normalisation")
    assert tensor.readers == ("a", "b")
    assert all(
        np.array_equal(*pair)
        for pair in zip(outputs(model, feeds[0]), outputs(result.model_path, feeds[0]), strict=True)
    )
    names = [node.name for node in onnx.load(result.model_path).graph.node]
    assert ("norm_equalise" in names) is residual
    before, after = (int8_error(path, feeds, tmp_path / path.parent.name / "q") for path in (model, result.model_path))
    assert after < (0.5 if not residual else 0.6) * before


@pytest.mark.parametrize(("spread", "expected"), [(2.0, set()), (8.0, {"multiply"})])
def test_no_new_node_for_a_small_spread(tmp_path: Path, spread: float, expected: set[str]) -> None:
    net = Tiny()
    net.weights("w", 64, 32)
    net.op("MatMul", [net.input("x", "n", 10, 64), "w"], "y")
    model = net.save(tmp_path, "y")
    x = np.random.default_rng(0).uniform(-1, 1, (2, 10, 64)) * np.where(np.arange(64) == 5, spread, 1.0)
    feeds = [{"x": x.astype(np.float32)}]
    assert {tensor.way for tensor in equalised(model, feeds, tmp_path / "equal").tensors} == expected


def test_factors_are_powers_of_two_within_bounds() -> None:
    random = np.random.default_rng(9)
    found = factors(np.exp(random.standard_normal(200) * 6), np.exp(random.standard_normal(200)), 0.8)
    assert np.array_equal(found, np.exp2(np.round(np.log2(found))))
    assert found.max() / found.min() <= 2.0**8


def test_silent_channels_keep_their_size() -> None:
    found = factors(np.array([0.0, 1.0, 16.0, 4.0]), np.array([1.0, 1.0, 1.0, 0.0]), 1.0)
    assert found.tolist() == [1.0, 0.25, 4.0, 1.0]
    assert factors(np.zeros(3), np.ones(3), 1.0).tolist() == [1.0, 1.0, 1.0]


def test_a_network_without_candidates_is_passed_through(tmp_path: Path) -> None:
    net = Tiny()
    net.op("Relu", [net.input("x", "n", 16, 8, 8)], "y")
    model = net.save(tmp_path, "y")
    result = equalised(model, images(), tmp_path / "equal")
    assert result.tensors == ()
    assert np.array_equal(outputs(model, images()[0])[0], outputs(result.model_path, images()[0])[0])


def wide(channels: int) -> np.ndarray:
    """Factors of 2**-5 to 2."""
    return np.exp2(np.linspace(-5, 1, channels))


def unbalanced(net: Tiny, name: str, channels: int, axis: int) -> None:
    """Let the weights ``name`` undo :func:`wide` of the channels in front."""
    array = onnx.numpy_helper.to_array(net.constants[name])
    shape = [1] * array.ndim
    shape[axis] = channels
    net.constant(name, array / wide(channels).reshape(shape))


def scaled_by_constants() -> Tiny:
    """Convolution, HardSwish, Div and Add of constants (one number each), two full convolutions."""
    net = Tiny()
    y = net.conv(net.input("x", "n", 16, 8, 8), "a", 16, 32, 1, pads=[0] * 4)
    net.constant("a.weight", onnx.numpy_helper.to_array(net.constants["a.weight"]) * wide(32).reshape(-1, 1, 1, 1))
    y = net.op("Div", [net.op("HardSwish", [y], "act"), net.constant("six", 6.0)], "scaled")
    y = net.op("Add", [net.constant("shift", [0.01]), y], "shifted")
    for name in ("b", "c"):
        net.conv(y, name, 32, 32, 1, pads=[0] * 4)
        unbalanced(net, f"{name}.weight", 32, 1)
    net.op("Add", ["b", "c"], "y")
    return net


def full_convolutions() -> Tiny:
    net = Tiny()
    y = net.conv(net.input("x", "n", 16, 8, 8), "a", 16, 32)
    net.constant("a.weight", onnx.numpy_helper.to_array(net.constants["a.weight"]) * wide(32).reshape(-1, 1, 1, 1))
    net.constant("a.bias", np.zeros(32))
    net.conv(net.op("Relu", [y], "relu"), "y", 32, 16)
    unbalanced(net, "y.weight", 32, 1)
    return net


def linear(kind: str) -> Tiny:
    """Gemm (both layouts) or MatMul with an Add, Relu, a second one."""
    net = Tiny()
    x = net.op("Flatten", [net.input("x", "n", 16, 2, 2)], "flat")
    net.weights("w1", 48, 64) if kind == "Gemm" else net.weights("w1", 64, 48)
    w1 = onnx.numpy_helper.to_array(net.constants["w1"])
    net.constant("w1", w1 * (wide(48).reshape(-1, 1) if kind == "Gemm" else wide(48)))
    net.constant("b1", np.full(48, 0.01))
    if kind == "Gemm":
        y = net.op("Gemm", [x, "w1", "b1"], "a", transB=1)
    else:
        y = net.op("Add", [net.op("MatMul", [x, "w1"], "product"), "b1"], "a")
    net.weights("w2", 48, 32)
    unbalanced(net, "w2", 48, 0)
    net.op(kind, [net.op("Relu", [y], "relu"), "w2"], "y")
    return net


@pytest.mark.parametrize(
    ("make", "way", "readers"),
    [
        (scaled_by_constants, "constant", ("b", "c")),
        (full_convolutions, "weights", ("y",)),
        (lambda: linear("Gemm"), "weights", ("y",)),
        (lambda: linear("MatMul"), "weights", ("y",)),
    ],
)
def test_constants_in_front_take_the_factors(
    tmp_path: Path, make: Callable[[], Tiny], way: str, readers: tuple[str, ...]
) -> None:
    model = make().save(tmp_path, "y")
    feeds = images(channels=16)
    if way == "weights" and "flat" in {node.name for node in onnx.load(model).graph.node}:
        feeds = [{"x": feed["x"][:, :, :2, :2]} for feed in feeds]
    result = equalised(model, feeds, tmp_path / "equal")
    tensor = next(item for item in result.tensors if item.readers == readers)
    assert tensor.way == way
    assert tensor.spread_after < 0.8 * tensor.spread_before
    assert np.array_equal(outputs(model, feeds[0])[0], outputs(result.model_path, feeds[0])[0])
    graph = onnx.load(result.model_path).graph
    assert f"{tensor.tensor}_equalise" not in {node.name for node in graph.node}
    read = {name for node in graph.node for name in node.input}
    assert {value.name for value in graph.initializer} <= read  # scalars that became vectors are gone
    before, after = (int8_error(path, feeds, tmp_path / path.parent.name / "q") for path in (model, result.model_path))
    assert after < 0.8 * before


def test_a_constant_of_two_readers_is_copied(tmp_path: Path) -> None:
    net = scaled_by_constants()
    net.op("Mul", ["y", "six"], "z")
    model = net.save(tmp_path, "z")
    result = equalised(model, images(), tmp_path / "equal")
    assert len(result.tensors) == 1
    assert np.array_equal(outputs(model, images()[0])[0], outputs(result.model_path, images()[0])[0])


@pytest.mark.parametrize("name", ["vit", "minilm", "ocr-detector"])
def test_networks(name: str, quantised: Callable[[str], Quantised], tmp_path: Path) -> None:
    """The very same bits in float; every layer is still INT8 in a TensorRT-RTX engine."""
    found = quantised(name)
    feeds = [found.model.feeds(seed=index) for index in range(3)]
    result = equalised(found.fp32, feeds, tmp_path / "equal")
    assert len(result.tensors) > 5
    ways = {tensor.way for tensor in result.tensors}
    expected = {"vit": {"constant", "normalisation"}, "minilm": {"multiply", "constant"}}
    assert ways == expected.get(name, {"weights", "constant"})
    fp32 = outputs(found.fp32, feeds[0])[0]
    assert np.array_equal(fp32, outputs(result.model_path, feeds[0])[0])
    int8 = int8_graph(result.model_path, feeds, tmp_path / "q")
    before = outputs(found.int8, feeds[0])[0]  # minmax on the same feeds
    assert distance(fp32, outputs(int8, feeds[0])[0]) < 0.8 * distance(fp32, before)

    pytest.importorskip("tensorrt_rtx")
    rtx_engine(int8, found.model, tmp_path)
    wanted = {item.node for item in found.plan.decisions if item.quantized and item.op in WEIGHTED}
    assert len(wanted - int8_nodes(tmp_path)) == FLOAT_IN_RTX.get(name, 0)
