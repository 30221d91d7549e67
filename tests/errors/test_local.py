"""Local errors against the same layers computed by PyTorch from the definition of fake quantisation."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from pipeline.core.errors import InputError
from pipeline.errors.capture import OrtReading
from pipeline.errors.graphs import Graph, float_graph, without_qdq
from pipeline.errors.layers import Layer, layers_of_graph, layers_of_plan
from pipeline.errors.local import cut_layer
from tests.errors.networks import batches, fake_quantised, network, quantised_weight

net = network()
fp32, int8 = Graph(net.fp32), Graph(net.int8)
layers = {layer.node: layer for layer in layers_of_graph(int8)}
FEEDS = ["x", "relu", "branch", "sum", "flat", "stem", "last", "logits", "padded"]


@pytest.fixture(scope="module")
def tensors():
    return OrtReading(net.fp32, FEEDS, label="fp32", optimise=False)(batches()[0])


def _conv(x, w, padding=0, bias=None):
    tensor = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), bias, padding=padding)
    return tensor.numpy()


def _q(tensors, name):
    return fake_quantised(tensors[name], np.float32(net.amax[name] / 127))


def _expected(node, tensors, *, weights: bool, activations: bool):
    def w(name):
        return quantised_weight(net.weights[name]) if weights else net.weights[name]

    def a(name):
        return _q(tensors, name) if activations else tensors[name]

    bias = torch.from_numpy(onnx.numpy_helper.to_array(fp32.initializer("b_stem")).copy())
    if node == "stem_conv":
        return _conv(a("x"), w("w_stem"), 1, bias)
    if node == "branch_conv":
        return _conv(a("relu"), w("w_branch"), 1)
    if node == "add_node":
        return tensors["branch"] + a("relu")
    if node == "last_conv":
        return _conv(np.pad(a("sum"), ((0, 0), (0, 0), (1, 1), (1, 1))), w("w_last"))
    if node == "pad_node":
        return np.pad(a("sum"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    return a("flat") @ w("w_fc").T


@pytest.mark.parametrize("node", ["stem_conv", "branch_conv", "last_conv", "fc_node"])
def test_weighted_layer_alone(node, tensors):
    cut = cut_layer(layers[node], fp32, int8)
    assert cut.variants == ("local", "weights", "activations")
    assert cut.quantised_weights
    values = cut.run(tensors)
    for name, weights, activations in (("local", True, True), ("weights", True, False), ("activations", False, True)):
        expected = _expected(node, tensors, weights=weights, activations=activations)
        np.testing.assert_allclose(values[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("node", ["add_node", "pad_node"])
def test_layer_without_weights(node, tensors):
    cut = cut_layer(layers[node], fp32, int8)
    assert cut.variants == ("local",)
    assert not cut.quantised_weights
    expected = _expected(node, tensors, weights=False, activations=True)
    np.testing.assert_allclose(cut.run(tensors)["local"], expected, rtol=1e-5, atol=1e-6)


def test_only_the_quantised_input_of_the_add_is_named():
    cut = cut_layer(layers["add_node"], fp32, int8)
    assert [point.tensor for point in cut.inputs] == ["relu"]
    assert cut.inputs[0].amax == pytest.approx(3.0, rel=1e-6)
    assert set(cut.feeds) == {"branch", "relu"}


def test_pair_in_front_of_a_pad_counts_for_the_convolution_behind():
    cut = cut_layer(layers["last_conv"], fp32, int8)
    assert cut.feeds == ("sum",)
    assert [point.tensor for point in cut.inputs] == ["sum"]


def test_layers_of_plan_and_of_graph_agree():
    assert layers_of_plan(net.plan, fp32) == layers_of_graph(int8)


def test_plan_of_another_model_is_refused():
    decision = net.plan.decisions[0].model_copy(update={"node": "elsewhere"})
    plan = net.plan.model_copy(update={"decisions": (*net.plan.decisions, decision)})
    with pytest.raises(InputError, match="'elsewhere', which the FP32 graph lacks"):
        layers_of_plan(plan, fp32)


def test_layer_that_does_not_exist():
    with pytest.raises(InputError, match="layer 'nowhere' does not exist in the FP32 graph"):
        cut_layer(Layer(tensor="t", node="nowhere", op="Conv"), fp32, int8)


def test_scale_per_channel_on_an_activation_is_refused():
    model = onnx.ModelProto()
    model.CopyFrom(net.int8)
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == "relu_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.full(4, 0.1, np.float32), "relu_scale"))
    with pytest.raises(InputError, match=r"scale 'relu_scale' of activation 'relu' must be one constant"):
        cut_layer(layers["add_node"], fp32, Graph(model))


def test_float_half_in_fp16_is_fed_through_casts(tensors):
    """The float part of the INT8 graph in FP16: the layer runs in the type the graph has, fed with FP32 tensors."""
    model = onnx.ModelProto()
    model.CopyFrom(net.int8)
    half = onnx.TensorProto.FLOAT16
    for node in model.graph.node:
        if node.name == "add_node":
            node.input[:] = ["branch16", "relu16"]
            node.output[:] = ["sum16"]
    at = next(i for i, node in enumerate(model.graph.node) if node.name == "add_node")
    make = onnx.helper.make_node
    model.graph.node.insert(at + 1, make("Cast", ["sum16"], ["sum"], "cast_sum", to=onnx.TensorProto.FLOAT))
    model.graph.node.insert(at, make("Cast", ["branch"], ["branch16"], "cast_branch", to=half))
    model.graph.node.insert(at, make("Cast", ["relu_dq"], ["relu16"], "cast_relu", to=half))
    cut = cut_layer(Layer(tensor="sum16", node="add_node", op="Add"), fp32, Graph(model))
    expected = _expected("add_node", tensors, weights=False, activations=True)
    np.testing.assert_allclose(cut.run(tensors)["local"], expected, rtol=2e-3, atol=2e-3)


def test_graph_without_qdq_computes_the_float_network():
    stripped = without_qdq(int8)
    assert not Graph(stripped).has_qdq
    feeds = batches()[0]
    got = OrtReading(stripped, ["logits"], label="stripped", optimise=True)(feeds)["logits"]
    want = OrtReading(net.fp32, ["logits"], label="fp32", optimise=True)(feeds)["logits"]
    # Weights exist in INT8 only and stay so: off by their rounding, nothing else.
    assert 0 < np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_graph_without_qdq_gives_back_float_weights_behind_a_quantiser():
    model = onnx.ModelProto()
    model.CopyFrom(net.int8)
    for name, weight in net.weights.items():
        scale, zero = f"{name}_scale", f"{name}_zero"
        node = onnx.helper.make_node("QuantizeLinear", [name, scale, zero], [f"{name}_q"], f"{name}_Q", axis=0)
        model.graph.node.insert(0, node)
        codes = next(t for t in model.graph.initializer if t.name == f"{name}_q")
        model.graph.initializer.remove(codes)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    feeds = batches()[0]
    graph = float_graph(model)
    got = OrtReading(graph.proto, ["logits"], label="stripped", optimise=True)(feeds)["logits"]
    want = OrtReading(net.fp32, ["logits"], label="fp32", optimise=True)(feeds)["logits"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert float_graph(net.fp32).proto is net.fp32


def test_layer_that_reads_two_outputs_of_one_split():
    """The Split stands between the pair and the layer, and comes into the one-layer graph once."""
    nodes = [
        onnx.helper.make_node("Split", ["x"], ["a", "b"], "split", axis=1, num_outputs=2),
        onnx.helper.make_node("Mul", ["a", "b"], ["y"], "mul"),
    ]
    pair = [
        onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "q_node"),
        onnx.helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "dq_node"),
    ]
    scale = np.float32(0.05)
    constants = [onnx.numpy_helper.from_array(scale, "s"), onnx.numpy_helper.from_array(np.int8(0), "z")]
    info = [onnx.helper.make_tensor_value_info(name, 1, ["N", size]) for name, size in (("x", 8), ("y", 4))]
    opset = [onnx.helper.make_opsetid("", 18)]
    split = onnx.NodeProto()
    split.CopyFrom(nodes[0])
    split.input[0] = "d"
    plain, quantised = (
        Graph(
            onnx.helper.make_model(
                onnx.helper.make_graph(chosen, "g", info[:1], info[1:], initializer=constants[: 2 * (len(chosen) - 2)]),
                opset_imports=opset,
                ir_version=9,
            )
        )
        for chosen in (nodes, [*pair, split, nodes[1]])
    )
    cut = cut_layer(Layer(tensor="y", node="mul", op="Mul"), plain, quantised)
    x = np.random.default_rng(3).normal(0, 1, (2, 8)).astype(np.float32)
    expected = fake_quantised(x, scale)
    np.testing.assert_array_equal(cut.run({"x": x})["local"], expected[:, :4] * expected[:, 4:])
