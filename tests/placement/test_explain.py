"""`quantize explain` on a real result: scales, shared scales, filters, ONNX files, broken files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import package
from pipeline.cli import main
from pipeline.core.errors import InputError
from pipeline.placement.explain import explain_nodes, load_explained, select_nodes
from tests.placement.tiny import Tiny
from tests.test_package import manifest
from tests.test_quantize import joined, quantise


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["explain", *arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def artifact(tmp_path: Path) -> str:
    result, _ = quantise(tmp_path / "made")
    files = {name: result.folder / name for name in ("placement.json", "scales.json")}
    return str(package.run(files, manifest(), folder=tmp_path / "net").folder)


def test_one_node_in_full(artifact: str) -> None:
    code, output = run(artifact, "cat")
    assert code == 0
    scale = json.loads((Path(artifact) / "scales.json").read_text())["tensors"]["r0"]["scale"]
    assert "cat  Concat, INT8, rule concat" in output
    assert f"r0: scale {scale:.6g} (minmax), shared with r1, cat" in output
    code, output = run(artifact, "c0")
    assert "c0.weight: scale" in output
    assert "(16 channels, axis 0)" in output


def test_filters(artifact: str) -> None:
    for option, quantized in (("--float", False), ("--int8", True)):
        code, output = run(artifact, option, "--json")
        assert code == 0
        assert {entry["quantized"] for entry in json.loads(output)} == {quantized}
    code, output = run(artifact, "c*", "Add", "--json")
    assert [entry["node"] for entry in json.loads(output)] == ["c0", "c1", "cat", "c2", "add"]


def test_an_onnx_file_is_planned(tmp_path: Path) -> None:
    code, output = run(str(joined().save(tmp_path, "y")), "add")
    assert code == 0
    assert "add  Add, INT8, rule residual-add" in output
    assert "x: activation" in output


def test_an_onnx_file_is_planned_as_a_build_prepares_it(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("Pad", [net.input("x", "n", 16, 8, 8), net.constant("pads", [0, 0, 1, 1, 0, 0, 1, 1], "int64")], "pad")
    net.conv(net.conv(x, "c0", 16, 16, pads=[0, 0, 0, 0]), "y", 16, 16)
    code, output = run(str(net.save(tmp_path, "y")), "--json")
    assert code == 0
    assert [entry["node"] for entry in json.loads(output)] == ["c0", "y"], "the Pad is folded into the convolution"


def test_stored_weights_behind_a_computation_are_taken_as_a_build_takes_them(tmp_path: Path) -> None:
    """As Brevitas writes them: INT8 weights pass a Clip of constants before their DequantizeLinear."""
    import numpy as np

    from tests.placement.test_existing import network

    net = network()
    limits = [net.constant(name, value, np.int8) for name, value in (("low", -127), ("high", 127))]
    stored = next(node for node in net.nodes if node.op_type == "DequantizeLinear" and node.input[0] in net.constants)
    net.op("Clip", [stored.input[0], *limits], "clipped")
    stored.input[0] = "clipped"
    net.nodes.insert(0, net.nodes.pop())
    code, output = run(str(net.save(tmp_path, "y")), "Conv", "--json")
    assert code == 0, output
    assert [entry["quantized"] for entry in json.loads(output)] == [True]


def test_notes_are_shown(tmp_path: Path) -> None:
    import numpy as np

    from tests.placement.test_existing import network

    code, output = run(str(network(zero=np.uint8(128)).save(tmp_path, "y")))
    assert code == 0
    assert "note: uint8 with zero point 128 became int8" in output


def test_selection_prefers_names_to_patterns_to_operators(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("Relu", [net.input("x", "n", 16)], "Conv")
    net.op("Relu", [x], "y")
    nodes = explain_nodes(net.plan(tmp_path, "y"), {})
    assert [item.decision.node for item in select_nodes(nodes, "Conv")] == ["Conv"]
    assert len(select_nodes(nodes, "?*")) == 2
    assert len(select_nodes(nodes, "Relu")) == 2
    with pytest.raises(InputError, match=r"no node is called or matched by 'Con'; did you mean 'Conv'"):
        select_nodes(nodes, "Con")


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text("{}")
    with pytest.raises(InputError, match=r"scales.json cannot be read: No such file"):
        load_explained(tmp_path / "placement.json", tmp_path / "scales.json")
    (tmp_path / "scales.json").write_text("{}")
    (tmp_path / "placement.json").write_text('{"activations": 3}')
    with pytest.raises(InputError, match="was not written by this program"):
        load_explained(tmp_path / "placement.json", tmp_path / "scales.json")
