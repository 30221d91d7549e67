"""Targets, costs, repairs of weights and the memory of measurements."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.accuracy import Figures, Target
from pipeline.core.errors import InputError
from pipeline.data.batching import Batch
from pipeline.errors.graphs import Graph
from pipeline.mixed.cost import node_costs
from pipeline.mixed.evaluate import Memory
from pipeline.mixed.repairs import clipped, least_squares_thresholds
from pipeline.mixed.search import make_units
from tests.errors.networks import batches, network

FIGURES = Figures(sqnr_db=25.0, agreement=0.98, top1=0.70, top1_fp32=0.705, samples=200)


@pytest.mark.parametrize(
    ("kind", "text", "value", "met"),
    [
        ("max_drop", "0.5%", 0.005, True),
        ("max_drop", "0.4", 0.004, False),
        ("min_sqnr", "25dB", 25.0, True),
        ("min_sqnr", "25.5 db", 25.5, False),
        ("min_agreement", "98%", 0.98, True),
        ("min_agreement", "99", 0.99, False),
    ],
)
def test_target(kind, text, value, met):
    target = Target.parse(kind, text)
    assert target.value == pytest.approx(value)
    assert target.met(FIGURES) is met
    assert (target.shortfall(FIGURES) <= 0) is met
    assert target.describe(FIGURES)
    assert str(target)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("max_drop", "half", "--max-drop 'half' is not a number such as 0.5%"),
        ("max_drop", "20dB", "is not a number such as 0.5%"),
        ("min_sqnr", "20%", "--min-sqnr '20%' is not a number such as 20dB"),
        ("min_sqnr", "900", "out of range"),
        ("min_agreement", "101%", "--min-agreement '101%' is out of range"),
        ("min_agreement", "-3%", "is not a number such as 99%"),
        ("min_agreement", "0.99", "--min-agreement '0.99' would be 0.99 per cent"),
        ("min_agreement", "0", "--min-agreement '0' is met by every network; 99% is a usual value"),
        ("min_agreement", "0%", "--min-agreement '0%' is met by every network"),
    ],
)
def test_bad_target(kind, text, message):
    with pytest.raises(InputError, match=message):
        Target.parse(kind, text)


def test_target_about_a_figure_that_is_not_there():
    bare = Figures(sqnr_db=25.0, agreement=None, samples=4)
    with pytest.raises(InputError, match="--max-drop is about top-1, which needs labels"):
        Target.parse("max_drop", "1%").met(bare)
    with pytest.raises(InputError, match="no output of this network has class scores"):
        Target.parse("min_agreement", "99%").met(bare)


def test_multiply_accumulates():
    costs = node_costs(Graph(network().fp32), batches()[0])
    assert costs.macs == {
        "stem_conv": 4 * 8 * 8 * 27,
        "branch_conv": 4 * 8 * 8 * 36,
        "last_conv": 6 * 8 * 8 * 36,
        "fc_node": 30,
    }
    total = sum(costs.macs.values())
    assert costs.int8_share({"stem_conv", "branch_conv", "add_node"}) == pytest.approx(256 * 63 / total)
    assert costs.lost({"stem_conv", "fc_node"}) == 4 * 8 * 8 * 27 + 30
    assert costs.saved["add_node"] == 64 * 2 * 4 * 8 * 8


def _one_node(node, inputs, weights):
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize(
    ("node", "inputs", "weights", "expected"),
    [
        (
            helper.make_node("Conv", ["x", "w"], ["y"], "n", group=8),
            {"x": [1, 8, 6, 6]},
            {"w": (8, 1, 3, 3)},
            8 * 16 * 9,
        ),
        (
            helper.make_node("ConvTranspose", ["x", "w"], ["y"], "n", strides=[2, 2]),
            {"x": [1, 8, 6, 6]},
            {"w": (8, 4, 2, 2)},
            8 * 36 * 16,
        ),
        (helper.make_node("MatMul", ["x", "w"], ["y"], "n"), {"x": [1, 5, 8]}, {"w": (8, 3)}, 5 * 3 * 8),
        (helper.make_node("MatMul", ["x", "z"], ["y"], "n"), {"x": [1, 2, 5, 8], "z": [1, 2, 8, 5]}, {}, 2 * 25 * 8),
        (helper.make_node("Gemm", ["x", "w"], ["y"], "n", transA=1), {"x": [8, 1]}, {"w": (8, 3)}, 24),
    ],
)  # fmt: skip
def test_multiply_accumulates_by_operator(node, inputs, weights, expected):
    feeds = {name: np.ones(shape, np.float32) for name, shape in inputs.items()}
    samples = tuple(range(next(iter(inputs.values()))[0]))
    costs = node_costs(Graph(_one_node(node, inputs, weights)), Batch(0, samples, feeds))
    assert costs.macs == {"n": expected}


def test_measured_times_replace_multiply_accumulates():
    costs = node_costs(Graph(network().fp32), batches()[0], {"stem_conv": (0.2, 0.5), "add_node": (0.3, 0.1)})
    assert costs.unit == "ms"
    assert costs.saved == {"stem_conv": pytest.approx(0.3), "add_node": 0.0}
    units = make_units(["stem_conv", "add_node"], costs)
    assert [unit.cost for unit in units] == [pytest.approx(0.3), pytest.approx(0.3)]  # free ones count as the cheapest


def test_many_nodes_become_blocks():
    names = [f"n{i}" for i in range(250)]
    from pipeline.mixed.cost import Costs

    units = make_units(names, Costs({}, dict.fromkeys(names, 2.0), "MACs"))
    assert len(units) == 84
    assert [node for unit in units for node in unit.nodes] == names
    assert units[0].cost == 6.0
    assert units[0].name == "n0 .. n2"
    assert make_units([], Costs({}, {}, "MACs")) == []


def test_least_squares_thresholds():
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.1, (6, 40)).astype(np.float32)
    weights[2, 0] = 1.0  # an outlier stretches this channel's range
    weights[3] = 0.0
    found = least_squares_thresholds(weights, 0)
    largest = np.abs(weights).max(axis=1)
    assert found.shape == (6,)
    assert (found <= largest).all()
    assert found[3] == 0

    def error(row, threshold):
        scale = threshold / 127
        return np.square(row - np.clip(np.rint(row / scale), -127, 127) * scale).sum()

    for row in (0, 1, 2, 4, 5):
        grid = [error(weights[row], largest[row] * np.float32(1 - 0.02 * step)) for step in range(26)]
        assert error(weights[row], found[row]) == pytest.approx(min(grid), rel=1e-5)
    limited = clipped(weights, found, 0)
    np.testing.assert_array_equal(np.abs(limited).max(axis=1), found)
    np.testing.assert_array_equal(clipped(weights.T, found, 1), limited.T)
    assert least_squares_thresholds(weights, None).shape == ()


def test_damaged_memory(tmp_path):
    (tmp_path / "evaluations.json").write_text("{")
    for text in ("{", "[]", '{"figures": {}}'):
        (tmp_path / "evaluations.json").write_text(text)
        with pytest.raises(InputError, match=r"evaluations\.json is damaged"):
            Memory(tmp_path / "evaluations.json")


def test_memory_of_another_search(tmp_path):
    first = Memory(tmp_path / "first.json", "a")
    first.put("check:0", FIGURES)
    assert Memory(tmp_path / "first.json", "a").get("check:0") == FIGURES
    assert len(Memory(tmp_path / "first.json", "b")) == 0
    later = Memory(tmp_path / "later.json", "a", [tmp_path / "none.json", tmp_path / "first.json"])
    assert later.get("check:0") == FIGURES
    assert Memory(tmp_path / "later.json", "b", [tmp_path / "first.json"]).get("check:0") is None
    (tmp_path / "damaged.json").write_text('{"figures"')
    last = Memory(tmp_path / "last.json", "a", [tmp_path / "damaged.json", tmp_path / "first.json"])
    assert last.get("check:0") == FIGURES
    with pytest.raises(InputError, match=r"damaged\.json is damaged"):
        Memory(tmp_path / "damaged.json", "a")


def test_model_without_shapes_still_has_costs():
    model = onnx.ModelProto()
    model.CopyFrom(network().fp32)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    assert node_costs(Graph(model), batches()[0]).macs["fc_node"] == 30
