"""`quantize rules` and `quantize explain`."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from pipeline import package
from pipeline.cli import main
from pipeline.placement.registry import all_rules
from pipeline.placement.rule import FIXED
from tests.test_package import manifest

PLACEMENT = {
    "activations": [{"tensor": "x", "consumers": [["conv", 0]], "rule": "conv", "group": None, "known_amax": None}],
    "weights": [{"tensor": "w", "node": "conv", "input_index": 1, "axis": 0, "rule": "conv"}],
    "decisions": [
        {
            "node": "conv",
            "op": "Conv",
            "outputs": ["y"],
            "quantized": True,
            "rule": "conv",
            "reason": "because [it] can",
        },
        {"node": "act", "op": "Clip", "outputs": ["z"], "quantized": False, "rule": "epilogue", "reason": "fused"},
    ],
}
SCALES = {
    "tensors": {"x": {"scale": 0.5, "calibrator": "minmax"}},
    "weights": {"w": {"scale": [0.25, 0.125], "axis": 0}},
}


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def artifact(tmp_path: Path) -> str:
    (tmp_path / "p").write_text(json.dumps(PLACEMENT))
    (tmp_path / "s").write_text(json.dumps(SCALES))
    files = {"placement.json": tmp_path / "p", "scales.json": tmp_path / "s"}
    return str(package.run(files, manifest(), folder=tmp_path / "net").folder)


def test_rules_lists_every_rule_and_shows_one_in_full() -> None:
    code, output = run("rules", "--json")
    assert code == 0
    listed = json.loads(output)
    assert [entry["name"] for entry in listed] == [
        *(rule.name for rule in all_rules()),
        *(fixed.name for fixed in FIXED),
    ]
    assert all(entry["reason"] and entry["source"] for entry in listed)
    code, output = run("rules", "conv")
    assert code == 0
    assert "source" in output
    code, output = run("rules", "existing", "--json")
    assert code == 0
    (fixed,) = json.loads(output)
    assert (fixed["stage"], fixed["operators"]) == ("fixed", "all, and cannot be switched off")
    assert "second quantisation" in fixed["reason"]
    code, output = run("rules", "convv")
    assert code == 2
    assert "did you mean 'conv'" in output


def test_explain_gives_rule_reason_and_scales(artifact: str) -> None:
    code, output = run("explain", artifact)
    assert code == 0
    assert "1 of 2 nodes quantised" in output
    assert "because [it] can" in output
    assert "x: scale 0.5 (minmax)" in output
    assert "0.125 to 0.25 (2 channels, axis 0)" in output
    for choice in (["Clip"], ["--float"], ["Conv", "--float"]):
        shown = 0 if "Conv" in choice else 1
        assert f"1 of 2 nodes quantised; {shown} shown" in run("explain", artifact, *choice)[1], choice
    code, output = run("explain", artifact, "Clip", "--json")
    assert [entry["node"] for entry in json.loads(output)] == ["act"]


def test_explain_refuses_an_unknown_node(artifact: str) -> None:
    code, output = run("explain", artifact, "conf")
    assert code == 2
    assert "'conf'" in output
    assert "'conv'" in output


def test_explain_refuses_what_a_build_refuses(tmp_path: Path) -> None:
    """A plan of a graph that is none would be one."""
    shape = [1, 3, 8, 8]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Add", ["x", "a"], ["b"])],
        "cycle",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, shape)],
    )
    path = tmp_path / "cycle.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    code, output = run("explain", str(path))
    assert code == 2
    assert f"{path} is not a valid ONNX model: Nodes in a graph must be topologically sorted" in output
