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
