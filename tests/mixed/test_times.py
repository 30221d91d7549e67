"""Layer times of engines, shared among the nodes that the layers are made of."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import InputError
from pipeline.engine.inspect import EngineLayer
from pipeline.engine.view import EngineView
from pipeline.mixed.times import doubts, layer_times, node_times, shared

MEASURED = Path(__file__).resolve().parents[2] / "scripts" / "experiments" / "data"


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
        ('{"layers": []}', "is no table of layer times: times_ms: Field required, got"),
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
    for time_ms in (float("nan"), float("inf"), -1.0, 1e308):
        path = write(tmp_path / "b.json", {"/a/Conv": time_ms})
        with pytest.raises(InputError, match=r"layer /a/Conv has the time .* ms, expected 0 to 3\.6e\+06"):
            layer_times(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shapes": "abc"}, "shapes: Input should be .*, got 'abc'"),
        ({"shapes": [1, 2]}, r"shapes: Input should be .*, got \[1, 2\]"),
        ({"shapes": {"x": "abc"}}, r"shapes\.x: Input should be a valid .*, got 'abc'"),
        ({"shapes": {"x": [8, "3"]}}, r"shapes\.x\.1: Input should be a valid integer, got '3'"),
        ({"shapes": {"x": [8, 0]}}, r"shapes\.x\.1: Input should be greater than or equal to 1, got 0"),
        ({"shapes": {"x": [-8, 3]}}, r"shapes\.x\.0: Input should be greater than or equal to 1, got -8"),
        ({"shapes": {"x": [10**30]}}, r"shapes\.x\.0: .*"),
        ({"shapes": {"x": [1e300]}}, r"shapes\.x\.0: Input should be a valid integer, got 1e\+300"),
        ({"shapes": {"x": None}}, r"shapes\.x: .*, got None"),
        ({"times_ms": {"/a/Conv": 10**400}}, r"times_ms\./a/Conv: .*|layer /a/Conv has the time inf ms"),
        ({"times_ms": {"/a/Conv": "0.1"}}, r"times_ms\./a/Conv: Input should be a valid number, got '0\.1'"),
        ({"times_ms": {"/a/Conv": None}}, r"times_ms\./a/Conv: Input should be a valid number, got None"),
        ({"times_ms": [1]}, r"times_ms: Input should be .*, got \[1\]"),
        ({"layers": {}}, r"layers: Input should be a valid .*, got \{\}"),
        ({"target": [1]}, r"target: Input should be a valid string, got \[1\]"),
    ],
)
def test_fields_that_hold_something_else(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "int8.json", {"/a/Conv": 0.2})
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InputError, match=f"int8.json.*{message}") as caught:
        layer_times(path)
    assert "quantize inspect ARTIFACT --engine" in str(caught.value)


@pytest.mark.parametrize("shapes", [None, {}])
def test_shapes_that_are_not_told(tmp_path: Path, shapes: Any) -> None:
    path = write(tmp_path / "int8.json", {"/a/Conv": 0.2})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shapes": shapes}))
    assert layer_times(path) == [(("/a/Conv",), 0.2)]


# -- which of the two is INT8 ----------------------------------------------------------------------------------------


def typed(
    path: Path, dtype: str | None, time_ms: float, *, tactic: str = "", name: str = "/a/Conv", **view: Any
) -> Path:
    """A table of one convolution that computes in ``dtype``; None: the engine does not say."""
    write(path, {name: time_ms})
    content = json.loads(path.read_text()) | view
    content["layers"][0] |= {"weights_dtype": dtype, "tactic": tactic}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("float_type", ["float16", "float32"])
def test_swapped_tables_are_refused(float_type: str, tmp_path: Path) -> None:
    int8, float_ = typed(tmp_path / "int8.json", "int8", 0.1), typed(tmp_path / "float.json", float_type, 0.3)
    assert node_times(int8, float_) == {"/a/Conv": (0.1, 0.3)}
    assert doubts(int8, float_) == ()
    with pytest.raises(InputError, match=r"wrong order: .*int8\.json has layers in INT8, and .*float\.json has none"):
        node_times(float_, int8)


@pytest.mark.parametrize(
    ("name", "tactic"),
    [("/a/Conv", "sm80_xmma_fprop_implicit_gemm_i8i8_i8i32_f32"), ("w + w_QuantizeLinear + /a/Conv", "")],
)
def test_names_of_kernels_and_layers_tell_as_well(name: str, tactic: str, tmp_path: Path) -> None:
    int8 = typed(tmp_path / "int8.json", None, 0.1, name=name, tactic=tactic)
    silent = typed(tmp_path / "silent.json", None, 0.3)
    assert node_times(int8, silent) == {"/a/Conv": (pytest.approx(0.1), pytest.approx(0.3))}
    with pytest.raises(InputError, match=r"int8\.json is given as the layer times in float, and layers in it are"):
        node_times(silent, int8)
    float_ = typed(tmp_path / "float.json", "float16", 0.3)
    with pytest.raises(InputError, match=r"float\.json is given as the layer times in INT8, and no layer in it is"):
        node_times(float_, silent)


def test_a_node_may_be_called_what_it_likes(tmp_path: Path) -> None:
    int8 = typed(tmp_path / "int8.json", "int8", 0.1, name="/int8_head/Conv")
    float_ = typed(tmp_path / "float.json", "float16", 0.3, name="/int8_head/Conv")
    assert node_times(int8, float_) == {"/int8_head/Conv": (0.1, 0.3)}


def test_tables_that_do_not_tell_are_doubted_where_int8_is_slower(tmp_path: Path) -> None:
    slow, fast = typed(tmp_path / "slow.json", None, 0.3), typed(tmp_path / "fast.json", None, 0.1)
    assert doubts(fast, slow) == ()
    (text,) = doubts(slow, fast)
    assert text.startswith("INT8 is slower than float in the layer times, 0.3 against 0.1 ms in all; the tables do not")
    sure = typed(tmp_path / "int8.json", "int8", 0.3), typed(tmp_path / "float.json", "float16", 0.1)
    assert doubts(*sure) == ()  # that is how it was measured


def test_tables_of_other_machines_and_shapes(tmp_path: Path) -> None:
    int8 = typed(tmp_path / "int8.json", "int8", 0.1)
    other = typed(tmp_path / "float.json", "float16", 0.3, built_on="another card", tensorrt="10.1")
    assert [text.partition(" are of different ")[2] for text in doubts(int8, other)] == [
        "versions of TensorRT: 8.6.0 and 10.1", "cards: a card and another card",
    ]  # fmt: skip
    larger = typed(tmp_path / "larger.json", "float16", 0.3, shapes={"x": [64, 3, 16, 16]})
    with pytest.raises(InputError, match="were measured at different shapes"):
        node_times(int8, larger)


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables are not here")
def test_measured_tables(tmp_path: Path) -> None:
    paths = []
    for kind in ("int8", "fp16"):
        packed = MEASURED / f"layer-times-efficientnet-lite0-{kind}-64.json.xz"
        paths.append(tmp_path / f"{kind}.json")
        paths[-1].write_bytes(lzma.decompress(packed.read_bytes()))
    assert len(node_times(*paths)) > 40
    assert doubts(*paths) == ()
    with pytest.raises(InputError, match="wrong order"):
        node_times(*reversed(paths))
