"""Layer times of engines, shared among the nodes that the layers are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import InputError
from pipeline.engine.inspect import EngineLayer
from pipeline.engine.view import EngineView
from pipeline.mixed.times import layer_times, node_times, shared


def write(path: Path, layers: dict[str, float | None], metadata: dict[str, str] | None = None) -> Path:
    """What `quantize inspect --engine --batch --json` prints for these layers."""
    view = EngineView(
        target="tensorrt",
        tensorrt="8.6.0",
        built_on="a card",
        layers=tuple(
            EngineLayer(name=name, kind="Conv", operation="Convolution", metadata=(metadata or {}).get(name, ""))
            for name in layers
        ),
        times_ms={name: time for name, time in layers.items() if time is not None},
        shapes={"x": (8, 3, 16, 16)},
        findings=(),
    )  # fmt: skip
    path.write_text(json.dumps(view.model_dump(mode="json"), indent=2, sort_keys=True))
    return path


def test_times_by_node(tmp_path: Path) -> None:
    int8 = write(
        tmp_path / "int8.json",
        {"/a/Conv + /a/Relu": 0.2, "/b/Conv": 0.3, "Reformatting CopyNode": 0.05, "noop": None},
        {"/b/Conv": "[ONNX Layer: /b/Conv][ONNX Layer: /b/Add][ONNX Layer: x_QuantizeLinear]"},
    )
    float_ = write(tmp_path / "float.json", {"/a/Conv + /a/Relu": 0.5, "/b/Conv": 0.4, "/b/Add": 0.1})
    assert layer_times(int8)[0] == (("/a/Conv", "/a/Relu"), 0.2)
    times = node_times(int8, float_)
    assert times == {
        "/a/Conv": (pytest.approx(0.1), pytest.approx(0.25)),
        "/a/Relu": (pytest.approx(0.1), pytest.approx(0.25)),
        "/b/Conv": (pytest.approx(0.15), pytest.approx(0.4)),
        "/b/Add": (pytest.approx(0.15), pytest.approx(0.1)),
    }
    assert node_times(int8, float_, {"/a/Conv", "/b/Conv", "/c/Conv"}) == {
        "/a/Conv": (pytest.approx(0.2), pytest.approx(0.5)),
        "/b/Conv": (pytest.approx(0.3), pytest.approx(0.4)),
    }, "a fused activation goes with its convolution"
    with pytest.raises(InputError, match="no node in common"):
        node_times(int8, float_, {"/c/Conv"})


def test_a_node_in_several_layers_gets_their_sum() -> None:
    table = [(("a", "b"), 1.0), (("a",), 0.5), (("c",), 9.0)]
    assert shared(table, {"a", "b"}) == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "layer times .*int8.json do not exist"),
        ("{", "int8.json is no table of layer times"),
        ("[]", "int8.json is no table of layer times"),
        ('{"layers": []}', "is no table of layer times: it has no 'times_ms'"),
        ('{"layers": [{"nam": "a"}], "times_ms": {"a": 1}}', "is no table of layer times"),
        ('{"layers": [], "times_ms": {}}', "int8.json has layers but no times"),
    ],
)
def test_files_that_are_no_layer_times(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "int8.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        layer_times(path)
    assert "quantize inspect ARTIFACT --engine" in str(caught.value)


def test_engines_of_different_networks(tmp_path: Path) -> None:
    paths: list[Any] = [write(tmp_path / f"{name}.json", {name: 1.0}) for name in ("a", "b")]
    with pytest.raises(InputError, match="have no node in common"):
        node_times(*paths)


def test_the_same_table_twice_and_times_that_are_none(tmp_path: Path) -> None:
    table = write(tmp_path / "a.json", {"/a/Conv": 0.2})
    with pytest.raises(InputError, match="are the same table"):
        node_times(table, table)
    for time_ms in (float("nan"), float("inf"), -1.0):
        path = write(tmp_path / "b.json", {"/a/Conv": time_ms})
        with pytest.raises(InputError, match="layer /a/Conv has the time"):
            layer_times(path)
