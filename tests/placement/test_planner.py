"""The planner: include and exclude, rules off, rules of other distributions, graphs without names."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.config import PlacementConfig
from pipeline.core.errors import InputError
from pipeline.placement import PlacementPlan, make_plan, registry
from pipeline.placement.registry import all_rules
from pipeline.placement.rule import Rule, Stage
from tests.placement.tiny import Tiny, decision, pairs


def two_convs() -> Tiny:
    net = Tiny()
    x = net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "body/conv1", 16, 16)], "body/relu")
    net.conv(x, "head/conv2", 16, 16)
    return net


@pytest.mark.parametrize("entry", ["head/conv2", "head/*", "*/conv2"])
def test_exclude_by_name_and_pattern(tmp_path: Path, entry: str) -> None:
    plan = two_convs().plan(tmp_path, "head/conv2", exclude=(entry,))
    assert set(pairs(plan)) == {"x"}
    assert decision(plan, "head/conv2") == (False, "user")
    (found,) = [item for item in plan.decisions if item.node == "head/conv2"]
    assert found.reason == "excluded by the user"


def test_exclude_by_operator(tmp_path: Path) -> None:
    plan = two_convs().plan(tmp_path, "head/conv2", exclude=("Conv",))
    assert plan.activations == ()
    assert plan.weights == ()


def test_exclude_of_a_structural_operator_keeps_its_inputs_float(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.conv(net.op("Add", [net.conv(x, "conv", 16, 16), x], "add"), "y", 16, 16)
    assert pairs(net.plan(tmp_path, "y"))["x"] == {("conv", 0), ("add", 1)}
    assert pairs(net.plan(tmp_path, "y", exclude=("Add",)))["x"] == {("conv", 0)}


def test_include_overrules_the_rules_that_keep_nodes_float(tmp_path: Path) -> None:
    net = Tiny()
    net.conv(net.input("x", "n", 16, 8, 8), "y", 16, 4)
    assert decision(net.plan(tmp_path, "y"), "y") == (False, "tiny-channels")
    assert decision(net.plan(tmp_path, "y", include=("y",)), "y") == (True, "conv")


def test_include_of_an_operator_without_weights(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.op("Add", [net.op("Sigmoid", [x], "a"), net.op("Tanh", [x], "b")], "y")
    plan = net.plan(tmp_path, "y", include=("Add",))
    assert pairs(plan) == {"a": {("y", 0)}, "b": {("y", 1)}}
    assert decision(plan, "y") == (True, "user")


def test_the_more_specific_entry_wins(tmp_path: Path) -> None:
    net = two_convs()
    assert set(pairs(net.plan(tmp_path, "head/conv2", exclude=("Conv",), include=("head/*",)))) == {"body/relu"}
    assert set(pairs(net.plan(tmp_path, "head/conv2", exclude=("head/conv2",), include=("Conv",)))) == {"x"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"exclude": ("body/conv",)},
            ["exclude 'body/conv'", "nearest: 'body/conv1'", "operators of this graph: Conv, Relu"],
        ),
        ({"include": ("nothing*",)}, ["include 'nothing*' is no node name, pattern or operator"]),
        ({"include": ("Relux",)}, ["nearest: 'Relu'"]),
        (
            {"rules_off": ("residual",)},
            ["rules_off names the placement rule 'residual'", "did you mean 'residual-add'?"],
        ),
        ({"rules_off": ("existing",)}, ["rules_off names 'existing', which is no rule and cannot be switched off"]),
        (
            {"include": ("head/*",), "exclude": ("*/conv2",)},
            ["'head/conv2' is both included by 'head/*' and excluded by '*/conv2'"],
        ),
    ],
)
def test_entries_that_make_no_sense(tmp_path: Path, config: dict[str, tuple[str, ...]], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        two_convs().plan(tmp_path, "head/conv2", **config)
    for text in words:
        assert text in str(caught.value)


def test_include_of_an_operator_without_int8_form(tmp_path: Path) -> None:
    net = Tiny()
    net.op("Softmax", [net.input("x", "n", 32)], "y")
    with pytest.raises(InputError, match="include 'y' asks for Softmax node 'y', which TensorRT does not run on INT8"):
        net.plan(tmp_path, "y", include=("y",))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "its weights w are computed, not constant"),
        ({"include": ("half",)}, "its data input h is float16: only float32 tensors are quantised"),
        ({"include": ("sum",)}, "it has no computed float32 input"),
        ({"include": ("z",), "rules_off": ("conv",)}, "its rule conv is switched off"),
    ],
)
def test_include_that_cannot_be_int8(tmp_path: Path, config: dict[str, tuple[str, ...]], why: str) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.op("Conv", [x, net.input("w", 16, 16, 1, 1)], "y")
    net.conv(x, "z", 16, 16)
    net.op("Cast", [x], "h", to=onnx.TensorProto.FLOAT16)
    net.constant("half.weight", np.ones((16, 16, 1, 1)), np.float16)
    net.op("Cast", [net.op("Conv", ["h", "half.weight"], "half")], "wide", to=onnx.TensorProto.FLOAT)
    net.op("Cast", [net.op("Add", ["half", "h"], "sum")], "wide_sum", to=onnx.TensorProto.FLOAT)
    config = {"include": ("y",)} | config
    with pytest.raises(InputError) as caught:
        net.plan(tmp_path, "y", "z", "wide", "wide_sum", **config)
    (name,) = config["include"]
    assert f"node {name!r} is included but cannot be INT8: {why}" in str(caught.value)
    assert ("--rule-off" in str(caught.value)) is ("rules_off" in config)


def test_rules_off(tmp_path: Path) -> None:
    plan = two_convs().plan(tmp_path, "head/conv2", rules_off=("conv",))
    assert plan.activations == ()
    assert decision(plan, "head/conv2") == (False, "not-quantizable")


def test_every_rule_explains_itself() -> None:
    rules = all_rules()
    assert len({item.name for item in rules}) == len(rules)
    assert [item.stage for item in rules] == sorted(item.stage for item in rules)
    for item in rules:
        assert item.effect
        assert item.reason
        assert item.source
        assert item.ops


def test_every_node_has_a_decision_with_a_reason(tmp_path: Path) -> None:
    plan = two_convs().plan(tmp_path, "head/conv2")
    assert [item.node for item in plan.decisions] == ["body/conv1", "body/relu", "head/conv2"]
    assert plan.quantized_nodes == ("body/conv1", "head/conv2")
    assert all(item.reason for item in plan.decisions)
    assert PlacementPlan.model_validate_json(plan.model_dump_json()) == plan


def quantise_relu(draft, node) -> None:  # type: ignore[no-untyped-def]
    if draft.demand(node, 0):
        draft.decide(node, True, "because the test says so")


MINE = Rule("mine", Stage.STRUCTURE, ("Relu",), "quantises Relu", "a test", "this file", quantise_relu)
NOT_RULES = ["a string"]


def restless(draft, node) -> None:  # type: ignore[no-untyped-def]
    draft.revision += 1


RESTLESS = Rule("restless", Stage.STRUCTURE, ("Relu",), "never rests", "a test", "this file", restless)
RESERVED = Rule("user", Stage.KEEP, ("Conv",), "has a name that is no rule's", "a test", "this file", restless)
DOUBLE = Rule("conv", Stage.KEEP, ("Conv",), "has a taken name", "a test", "this file", restless)


def offer(monkeypatch: pytest.MonkeyPatch, attribute: str) -> None:
    point = EntryPoint("theirs", f"tests.placement.test_planner:{attribute}", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])


def test_rule_of_another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "MINE")
    plan = two_convs().plan(tmp_path, "head/conv2")
    assert pairs(plan)["body/conv1"] == {("body/relu", 0)}
    assert decision(plan, "body/relu") == (True, "mine")
    assert "body/conv1" not in pairs(two_convs().plan(tmp_path, "head/conv2", rules_off=("mine",)))


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("MISSING", "'theirs' (tests.placement.test_planner:MISSING) cannot be loaded"),
        ("NOT_RULES", "hold a str, expected Rule"),
        ("RESTLESS", "do not come to an end"),
        ("DOUBLE", "two placement rules are called 'conv'"),
        ("RESERVED", "two placement rules are called 'user'"),
    ],
)
def test_bad_rules_of_another_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, words: str
) -> None:
    offer(monkeypatch, attribute)
    with pytest.raises(InputError) as caught:
        two_convs().plan(tmp_path, "head/conv2")
    assert words in str(caught.value)


def test_graph_without_names_or_shapes(tmp_path: Path) -> None:
    net = two_convs()
    model = net.model("head/conv2")
    for node in model.graph.node:
        node.name = ""
    del model.graph.value_info[:]
    path = tmp_path / "bare.onnx"
    onnx.save(model, path)
    plan = make_plan(path, PlacementConfig())
    assert pairs(plan) == {"x": {("Conv_0", 0)}, "body/relu": {("Conv_2", 0)}}
    assert plan == make_plan(path, PlacementConfig())


def test_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    model = two_convs().model("head/conv2")
    for node in model.graph.node:
        node.name = "same"
    onnx.save(model, tmp_path / "same.onnx")
    names = [item.node for item in make_plan(tmp_path / "same.onnx", PlacementConfig()).decisions]
    assert names[0] == "same"
    assert len(set(names)) == 3


def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        make_plan(tmp_path / "none.onnx", PlacementConfig())
