"""Activation layers are found, and noise reaches every reader of their outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from pipeline.compare.activations import NOISE_PREFIX, activation_outputs, add_noise_inputs
from pipeline.core.errors import InputError
from pipeline.core.ort import make_session
from tests.compare.networks import classifier, graph

SHAPE = ["N", 4]
C = {
    "one": np.float32(1.0),
    "half": np.float32(0.5),
    "three": np.float32(3.0),
    "zero": np.float32(0.0),
    "six": np.float32(6.0),
    "root2": np.float32(np.sqrt(2.0)),
}


def node(op: str, inputs: list[str], output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=f"{op}_{output}", **attributes)


def outputs_of(nodes: list[onnx.NodeProto], last: str) -> tuple[str, ...]:
    """Activation outputs of ``nodes`` followed by an addition that reads ``last``."""
    tail = node("Add", [last, "one"], "y")
    return activation_outputs(ir.from_proto(graph([*nodes, tail], {"x": SHAPE}, {"y": SHAPE}, C)))


def test_single_operators() -> None:
    nodes = [
        node("Relu", ["x"], "a"),
        node("Clip", ["a", "zero", "six"], "b"),
        node("HardSwish", ["b"], "c"),
        node("Sigmoid", ["c"], "d"),
        node("Add", ["d", "one"], "e"),
        node("Tanh", ["e"], "f"),
    ]
    assert outputs_of(nodes, "f") == ("a", "b", "c", "d", "f")


def test_silu_is_one_layer() -> None:
    assert outputs_of([node("Sigmoid", ["x"], "s"), node("Mul", ["x", "s"], "m")], "m") == ("m",)
    assert outputs_of([node("Sigmoid", ["x"], "s"), node("Mul", ["s", "x"], "m")], "m") == ("m",)


def test_hard_swish_in_pieces_is_one_layer() -> None:
    nodes = [
        node("Add", ["x", "three"], "a"),
        node("Clip", ["a", "zero", "six"], "b"),
        node("Mul", ["x", "b"], "c"),
        node("Div", ["c", "six"], "d"),
    ]
    assert outputs_of(nodes, "d") == ("d",)


def test_mish_in_pieces_is_one_layer() -> None:
    nodes = [node("Softplus", ["x"], "a"), node("Tanh", ["a"], "b"), node("Mul", ["x", "b"], "c")]
    assert outputs_of(nodes, "c") == ("c",)


@pytest.mark.parametrize("scaled_first", [True, False])
def test_gelu_in_pieces_is_one_layer(scaled_first: bool) -> None:
    gate = [node("Div", ["x", "root2"], "a"), node("Erf", ["a"], "b"), node("Add", ["b", "one"], "c")]
    if scaled_first:
        nodes = [*gate, node("Mul", ["x", "half"], "h"), node("Mul", ["h", "c"], "d")]
        assert outputs_of(nodes, "d") == ("d",)
    else:
        nodes = [*gate, node("Mul", ["x", "c"], "d"), node("Mul", ["d", "half"], "e")]
        assert outputs_of(nodes, "e") == ("e",)


def test_a_gate_from_elsewhere_is_a_layer_of_its_own() -> None:
    """Squeeze-and-excitation: the factor does not come from the value itself alone."""
    nodes = [
        node("ReduceMean", ["x"], "p", axes=[1], keepdims=1),
        node("Sigmoid", ["p"], "s"),
        node("Mul", ["x", "s"], "m"),
    ]
    assert outputs_of(nodes, "m") == ("s",)


def test_a_product_of_two_activations_is_no_layer() -> None:
    nodes = [node("Relu", ["x"], "a"), node("Sigmoid", ["x"], "b"), node("Mul", ["a", "b"], "m")]
    assert outputs_of(nodes, "m") == ("a", "b")


def test_outputs_nobody_reads_and_integers_are_left_out() -> None:
    ints = helper.make_graph(
        [node("Clip", ["n"], "k"), node("Neg", ["k"], "out"), node("Relu", ["x"], "y")],
        "ints",
        [
            helper.make_tensor_value_info("n", TensorProto.INT64, [2]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        ],
        [
            helper.make_tensor_value_info("out", TensorProto.INT64, [2]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [2]),
        ],
    )
    model = onnx.shape_inference.infer_shapes(helper.make_model(ints, opset_imports=[helper.make_opsetid("", 17)]))
    assert activation_outputs(ir.from_proto(model)) == ()


def noisy(path: Path, tensors: tuple[str, ...]) -> object:
    model = ir.load(path)
    add_noise_inputs(model, tensors)
    return make_session(ir.to_proto(model), optimise=False)


def test_zero_noise_changes_nothing_and_other_noise_is_added(tmp_path: Path) -> None:
    path = classifier(tmp_path / "model.onnx")
    tensors = activation_outputs(ir.load(path))
    assert tensors == ("r1", "r2")
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    plain = make_session(path, capture=["r2"], optimise=False)
    expected, r2 = plain.run(["scores", "r2"], {"x": x})
    session = noisy(path, tensors)
    zeros = {f"{NOISE_PREFIX}r1": np.zeros((2, 16, 8, 8), np.float32), f"{NOISE_PREFIX}r2": np.zeros_like(r2)}
    assert np.array_equal(session.run(["scores"], {"x": x, **zeros})[0], expected)
    zeros[f"{NOISE_PREFIX}r2"] += 0.5
    moved = session.run(["scores"], {"x": x, **zeros})[0]
    weights = onnx.numpy_helper.to_array(next(t for t in onnx.load(path).graph.initializer if t.name == "w3"))
    assert np.allclose(moved - expected, 0.5 * weights.sum(axis=1), atol=1e-4)


def test_a_graph_output_leaves_without_noise_but_its_readers_get_it() -> None:
    nodes = [node("Relu", ["x"], "a"), node("Add", ["a", "one"], "y")]
    model = ir.from_proto(graph(nodes, {"x": SHAPE}, {"a": SHAPE, "y": SHAPE}, C))
    add_noise_inputs(model, ["a"])
    session = make_session(ir.to_proto(model), optimise=False)
    x = np.ones((1, 4), np.float32)
    a, y = session.run(["a", "y"], {"x": x, f"{NOISE_PREFIX}a": np.full((1, 4), 0.25, np.float32)})
    assert np.array_equal(a, x)
    assert np.array_equal(y, x + 1.25)


def test_half_precision_activations_get_the_noise_cast() -> None:
    half = helper.make_graph(
        [node("Relu", ["x"], "a"), node("Neg", ["a"], "y")],
        "half",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [2])],
    )
    model = ir.from_proto(
        onnx.shape_inference.infer_shapes(
            helper.make_model(half, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        )
    )
    add_noise_inputs(model, ["a"])
    session = make_session(ir.to_proto(model), optimise=False)
    (y,) = session.run(["y"], {"x": np.ones(2, np.float16), f"{NOISE_PREFIX}a": np.full(2, 0.5, np.float32)})
    assert y.dtype == np.float16
    assert y.tolist() == [-1.5, -1.5]


def test_a_tensor_that_the_graph_lacks_is_named(tmp_path: Path) -> None:
    model = ir.load(classifier(tmp_path / "model.onnx"))
    with pytest.raises(InputError, match="the graph has no tensor 'gone', an activation layer's output"):
        add_noise_inputs(model, ["gone"])
