from __future__ import annotations

import itertools
import re

import numpy as np
import onnx
import pytest

from pipeline.core.errors import InputError
from pipeline.errors.attribution import FACTORS, attribute, shapley
from pipeline.errors.capture import OrtReading
from pipeline.errors.graphs import Graph
from pipeline.errors.hybrid import hybrid, quantisation_of
from pipeline.errors.matching import match_nodes
from tests.errors.networks import almost_zero, batches, chain, network

ptq = network()
fp32 = Graph(ptq.fp32)


def _renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Another exporter's names for nodes and tensors; inputs and outputs stay."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    keep = {"x", "logits"}
    new = {
        name: f"t{i}" for i, name in enumerate({n for node in model.graph.node for n in (*node.input, *node.output)})
    }
    for i, node in enumerate(copy.graph.node):
        node.name = f"op_{i}"
        node.input[:] = [name if name in keep else new[name] for name in node.input]
        node.output[:] = [name if name in keep else new[name] for name in node.output]
    for tensor in copy.graph.initializer:
        tensor.name = new[tensor.name]
    return copy


def _set_scale(model: onnx.ModelProto, name: str, factor: float) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = next(t for t in copy.graph.initializer if t.name == name)
    values = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(values, np.float32), name))
    return copy


def _without_pair(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in list(copy.graph.node):
        if node.name in (f"{tensor}_Q", f"{tensor}_DQ"):
            copy.graph.node.remove(node)
        else:
            node.input[:] = [tensor if name == f"{tensor}_dq" else name for name in node.input]
    return copy


def _logits(model):
    return OrtReading(model, ["logits"], label="", optimise=False)(batches()[0])["logits"]


def test_hybrid_of_one_graph_computes_the_same():
    own = quantisation_of(Graph(ptq.int8))
    mixed = hybrid(fp32, placement=own, ranges=own, weights=own)
    np.testing.assert_allclose(_logits(mixed), _logits(ptq.int8), rtol=1e-4, atol=1e-5)


def test_attribution_is_exact_when_one_thing_differs():
    narrow = _set_scale(ptq.int8, "relu_scale", 0.25)
    found = attribute(fp32, Graph(ptq.int8), Graph(narrow), batches())
    before, after = found.figures["relative L2"]
    assert after > before
    assert found.parts["relative L2"]["ranges"] == pytest.approx(after - before)
    assert found.parts["relative L2"]["weights"] == pytest.approx(0, abs=1e-12)
    assert found.parts["relative L2"]["placement"] == pytest.approx(0, abs=1e-12)
    by_node = {layer.node: layer for layer in found.layers}
    assert by_node["branch_conv"].range_ratio == pytest.approx(0.25, rel=1e-6)
    assert by_node["branch_conv"].weights_change == 0.0
    assert by_node["stem_conv"].range_ratio == pytest.approx(1.0)
    assert {layer.placement for layer in found.layers} == {"both"}


def test_weights():
    trained = network(weight_scale=3.0)
    found = attribute(fp32, Graph(ptq.int8), Graph(trained.int8), batches(), labels=dict.fromkeys(range(10, 16), 2))
    before, after = found.figures["relative L2"]
    assert found.parts["relative L2"]["weights"] == pytest.approx(after - before)
    by_node = {layer.node: layer for layer in found.layers}
    assert by_node["branch_conv"].weights_change == pytest.approx(2.0, rel=0.02)
    assert by_node["add_node"].weights_change is None
    assert set(found.figures) == {"relative L2", "agreement", "top-1"}


def test_an_output_that_is_almost_zero_is_attributed_by_its_absolute_error():
    def low(model):
        return Graph(almost_zero(model))

    found = attribute(low(ptq.fp32), low(ptq.int8), low(_set_scale(ptq.int8, "relu_scale", 0.25)), batches())
    assert set(found.figures) == {"largest absolute error"}
    before, after = found.figures["largest absolute error"]
    assert sum(found.parts["largest absolute error"].values()) == pytest.approx(after - before)
    assert re.match(r"largest absolute error: PTQ \d\S*e-\d\d, QAT ", found.sentences()[0])


def test_placement():
    lighter = _without_pair(ptq.int8, "sum")
    found = attribute(fp32, Graph(ptq.int8), Graph(lighter), batches())
    before, after = found.figures["relative L2"]
    assert found.parts["relative L2"]["placement"] == pytest.approx(after - before)
    by_node = {layer.node: layer for layer in found.layers}
    assert by_node["pad_node"].placement == "PTQ only"
    assert by_node["stem_conv"].placement == "both"


def test_parts_add_up_when_everything_differs():
    other = _without_pair(_set_scale(network(weight_scale=1.2).int8, "x_scale", 2.0), "sum")
    found = attribute(fp32, Graph(ptq.int8), Graph(other), batches())
    for name, (before, after) in found.figures.items():
        assert sum(found.parts[name].values()) == pytest.approx(after - before, abs=1e-12)
    assert "difference" in found.sentences()[0]
    assert found.figures["relative L2"][1] == pytest.approx(
        np.mean([np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(_all(ptq.fp32), _all(other), strict=True)]),
        rel=1e-3,
    )


def _all(model):
    feeds = np.concatenate([batch.feeds["x"] for batch in batches()])
    return OrtReading(model, ["logits"], label="", optimise=False).run({"x": feeds})["logits"]


def test_names_of_another_exporter_do_not_matter():
    qat = Graph(_renamed(_set_scale(ptq.int8, "relu_scale", 2.0)))
    names = match_nodes(fp32, qat)
    assert set(names.values()) >= {"stem_conv", "branch_conv", "last_conv", "fc_node", "add_node"}
    found = attribute(fp32, Graph(ptq.int8), qat, batches())
    before, after = found.figures["relative L2"]
    assert found.parts["relative L2"]["ranges"] == pytest.approx(after - before)


def test_weights_behind_a_transpose():
    """Gemm exported with its weight transposed after the DQ."""
    model = onnx.ModelProto()
    model.CopyFrom(ptq.int8)
    fc = next(node for node in model.graph.node if node.name == "fc_node")
    at = list(model.graph.node).index(fc)
    make = onnx.helper.make_node
    del model.graph.node[at]
    model.graph.node.insert(at, make("Gemm", ["flat_dq", "turned"], ["logits"], "fc_node"))
    model.graph.node.insert(at, make("Transpose", ["w_fc_dq"], ["turned"], "turn", perm=[1, 0]))
    read = quantisation_of(Graph(model))
    np.testing.assert_array_equal(read.weights["fc_node", 1], quantisation_of(Graph(ptq.int8)).weights["fc_node", 1].T)


def test_shapley_shares_out_the_whole_difference():
    rng = np.random.default_rng(0)
    subsets = [frozenset(part) for size in range(4) for part in itertools.combinations(FACTORS, size)]
    values = {part: float(value) for part, value in zip(subsets, rng.normal(size=8), strict=True)}
    parts = shapley(values)
    assert sum(parts.values()) == pytest.approx(values[frozenset(FACTORS)] - values[frozenset()])


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_graph_without_qdq_is_refused():
    with pytest.raises(InputError, match="the QAT graph has no Q/DQ nodes"):
        attribute(fp32, Graph(ptq.int8), fp32, batches())


def test_another_network_is_refused():
    with pytest.raises(InputError, match=r"not the same network: 3 nodes of type Conv with weights against 2"):
        match_nodes(fp32, Graph(chain(2).int8))


def test_other_shapes_are_refused():
    with pytest.raises(InputError, match=r"not the same network: Conv 'last_conv' with weights \(6, 4, 3, 3\) against"):
        match_nodes(fp32, Graph(_renamed(chain(3).int8)))


def test_no_samples():
    with pytest.raises(InputError, match="no samples to compare on"):
        attribute(fp32, Graph(ptq.int8), Graph(ptq.int8), [])


def test_scale_that_is_computed():
    model = onnx.ModelProto()
    model.CopyFrom(ptq.int8)
    scale = next(t for t in model.graph.initializer if t.name == "relu_scale")
    model.graph.initializer.remove(scale)
    model.graph.node.insert(0, onnx.helper.make_node("ReduceMax", ["x"], ["relu_scale"], "m", keepdims=0))
    with pytest.raises(InputError, match="the scale 'relu_scale' of 'relu_DQ' must be one constant"):
        quantisation_of(Graph(model))
