"""Insertion of the pairs: names, types, attributes, and what must not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from pipeline.config import PlacementConfig
from pipeline.core.errors import InputError
from pipeline.placement import PlacementPlan, make_plan
from pipeline.placement.graph import GraphView, load_graph
from pipeline.placement.insert import insert_pairs
from pipeline.placement.weights import weight_amax, weight_scales
from tests.placement.tiny import Tiny


def inserted(path: Path, plan: PlacementPlan, weights: str = "float") -> onnx.ModelProto:
    import onnx_ir as ir

    graph = GraphView(load_graph(path))
    scales = {point.tensor: np.float32(0.01) for point in plan.activations}
    weight = {}
    for point in plan.weights:
        array = graph.array(graph.by_name[point.node].inputs[point.input_index])
        assert array is not None
        weight[point.node, point.input_index] = weight_scales(weight_amax(array, point.axis))
    insert_pairs(graph, plan, scales, weight, weights=weights)  # type: ignore[arg-type]
    model = ir.to_proto(graph.model)
    onnx.checker.check_model(model, full_check=True)
    return model


def residual() -> Tiny:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.conv(net.op("Add", [net.conv(x, "conv", 16, 16), x], "add"), "y", 16, 16)
    return net


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_form_of_the_pairs(tmp_path: Path, weights: str) -> None:
    path = residual().save(tmp_path, "y")
    before = onnx.load(path)
    after = inserted(path, make_plan(path, PlacementConfig()), weights)
    constants = {tensor.name: tensor for tensor in after.graph.initializer}
    nodes = {node.name: node for node in after.graph.node}
    assert [o.version for o in after.opset_import] == [17]
    assert after.ir_version <= 9
    assert {node.name for node in before.graph.node} <= set(nodes)
    assert [node.output for node in before.graph.node] == [nodes[node.name].output for node in before.graph.node]
    for node in after.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale, zero = constants[node.input[1]], constants[node.input[2]]
        assert scale.data_type == TensorProto.FLOAT
        assert zero.data_type == TensorProto.INT8
        assert list(scale.dims) == list(zero.dims)
        assert not numpy_helper.to_array(zero).any()
        assert (numpy_helper.to_array(scale) > 0).all()
        axes = [attribute.i for attribute in node.attribute if attribute.name == "axis"]
        assert axes == ([0] if scale.dims else [])
    assert list(nodes["conv"].input) == ["x_dq", "conv.weight_dq", "conv.bias"]
    assert list(nodes["add"].input) == ["conv", "x_dq"]
    assert [node.op_type for node in after.graph.node].count("QuantizeLinear") == (2 if weights == "int8" else 4)
    if weights == "int8":
        assert "conv.weight" not in constants
        assert constants["conv.weight_q"].data_type == TensorProto.INT8
    else:
        grid = numpy_helper.to_array(constants["conv.weight"])
        steps = grid / numpy_helper.to_array(constants["conv.weight_scale"])[:, None, None, None]
        assert np.abs(steps - np.rint(steps)).max() < 1e-4
        assert np.abs(steps).max() < 127.5


def test_both_forms_of_weights_compute_the_same(tmp_path: Path) -> None:
    from pipeline.core.ort import make_session

    path = residual().save(tmp_path, "y")
    plan = make_plan(path, PlacementConfig())
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    results = [
        make_session(inserted(path, plan, form), optimise=False).run(None, feeds)[0] for form in ("float", "int8")
    ]
    assert np.array_equal(*results)


def test_graph_input_and_output_keep_their_names_and_types(tmp_path: Path) -> None:
    net = Tiny()
    x = net.conv(net.input("x", "n", 16, 8, 8), "y", 16, 16)
    net.conv(x, "z", 16, 16)
    path = net.save(tmp_path, "y", "z")
    after = inserted(path, make_plan(path, PlacementConfig()))
    assert [value.name for value in after.graph.output] == ["y", "z"]
    assert [value.type.tensor_type.elem_type for value in after.graph.output] == [TensorProto.FLOAT] * 2
    producers = {output: node.op_type for node in after.graph.node for output in node.output}
    assert producers["y"] == producers["z"] == "Conv"


def test_taken_names_are_avoided(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.op("Relu", [x], "x_q")
    net.op("Relu", [x], "x_scale")
    net.constant("x_zero_point", 1.0)
    net.conv(x, "y", 16, 16)
    path = net.save(tmp_path, "y", "x_q", "x_scale")
    after = inserted(path, make_plan(path, PlacementConfig()))
    (quantize,) = [node for node in after.graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "x"]
    assert list(quantize.input) == ["x", "x_scale_1", "x_zero_point_1"]
    assert list(quantize.output) == ["x_q_1"]


def test_weights_that_two_nodes_read(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 32, 32)
    x = net.input("x", "n", 32)
    a = net.op("Gemm", [x, "w"], "a", transB=1)
    b = net.op("Gemm", [x, "w"], "b", transB=0)
    net.op("Mul", [net.op("Add", [a, b], "sum"), net.op("ReduceMax", ["w"], "top")], "y")
    path = net.save(tmp_path, "y")
    after = inserted(path, make_plan(path, PlacementConfig()))
    axes = {
        node.output[0]: attribute.i
        for node in after.graph.node
        if node.op_type == "QuantizeLinear"
        for attribute in node.attribute
    }
    assert sorted(axes.values()) == [0, 1]
    original = numpy_helper.to_array(next(t for t in onnx.load(path).graph.initializer if t.name == "w"))
    kept = numpy_helper.to_array(next(t for t in after.graph.initializer if t.name == "w"))
    assert np.array_equal(original, kept)


def test_weights_in_a_constant_node(tmp_path: Path) -> None:
    net = Tiny()
    tensor = numpy_helper.from_array(net.random.standard_normal((32, 32)).astype(np.float32), "w")
    net.op("Constant", [], "w", value=tensor)
    net.op("MatMul", [net.input("x", "n", 32), "w"], "y")
    path = net.save(tmp_path, "y")
    for form in ("float", "int8"):
        after = inserted(path, make_plan(path, PlacementConfig()), form)
        (product,) = [node for node in after.graph.node if node.op_type == "MatMul"]
        assert product.input[1] == ("w_grid_dq" if form == "float" else "w_dq")


def test_opset_below_13_is_refused(tmp_path: Path) -> None:
    net = Tiny()
    net.conv(net.input("x", "n", 16, 8, 8), "y", 16, 16)
    path = net.save(tmp_path, "y", opset=11)
    with pytest.raises(InputError, match="the model has opset 11; per-channel Q/DQ nodes exist from opset 13 on"):
        inserted(path, make_plan(path, PlacementConfig()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor": "gone"}, "names the tensor 'gone', which the graph lacks"),
        ({"consumers": (("gone", 0),)}, "lets input 0 of node 'gone' read 'x', but it does not exist"),
        ({"consumers": (("y", 2),)}, "lets input 2 of node 'y' read 'x', but it reads 'y.bias'"),
    ],
)
def test_plan_of_another_graph(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = residual().save(tmp_path, "y")
    plan = make_plan(path, PlacementConfig())
    points = (plan.activations[0].model_copy(update=change), *plan.activations[1:])
    with pytest.raises(InputError) as caught:
        inserted(path, plan.model_copy(update={"activations": points}))
    assert words in str(caught.value)
