"""The capture: which way it takes, what it refuses to report, and that names stand for the right tensors.

Two stand-ins for TensorRT: a fake card whose engines double their input, and onnxruntime on a Q/DQ graph that the
pipeline made (a mobile network with depthwise convolutions), which marks tensors as a builder would.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config import Profile
from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.core.ort import make_session
from pipeline.engine import capture, runner
from pipeline.engine.capture import Capture, build_capture
from pipeline.engine.compat import Api
from pipeline.engine.recorded import Samples, check_outputs
from pipeline.engine.records import BuildOptions
from pipeline.engine.ways import Way, ways_to_capture
from tests.engine.fakes import fake_tensorrt, plan
from tests.engine.gpu import DATA
from tests.engine.graphs import conv
from tests.engine.graphs import small_qdq as model

SCALE = 0.5
DEBUG = (("r_q", "int8", 2), ("b", "float32", 3), ("__myln_1", "float32", 1))
RANGE = (((1, 3), (4, 3), (8, 3)),)
MARKED = {"a": 5, "b": 3, "r": 1, "r_dq": 7}
"""Tensor of the fake network to its factor; the output y is x doubled."""
INT8_QUICK, INT8_OWN, INT8_AGAIN, FLOAT_OWN, FLOAT_DOUBLED = (
    Way("marked INT8 tensors", "doubled", 0),
    Way("marked INT8 tensors", "doubled"),
    Way("marked INT8 tensors", "dequantised again"),
    Way("marked outputs"),
    Way("marked outputs", "doubled"),
)
Card = SimpleNamespace


def rows(count: int) -> np.ndarray:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


def doubled(feeds: Mapping[str, np.ndarray]) -> Samples:
    """What the fake engines must give for two samples."""
    return Samples({"x": rows(2) + 1}, {"y": 2 * (rows(2) + 1)})


# -- the order ---------------------------------------------------------------------------------------------------------


def test_the_ways_of_a_quantised_graph() -> None:
    old = ways_to_capture(None, debug=False, int8=True, level=None)
    assert old == (INT8_QUICK, INT8_OWN, INT8_AGAIN, FLOAT_OWN, FLOAT_DOUBLED)
    assert [str(way) for way in old] == [
        "marked INT8 tensors, doubled, level 0",
        "marked INT8 tensors, doubled, TensorRT's own level",
        "marked INT8 tensors, dequantised again, TensorRT's own level",
        "marked outputs, TensorRT's own level",
        "marked outputs, doubled, TensorRT's own level",
    ]
    assert ways_to_capture(None, debug=True, int8=True, level=None) == (Way("debug tensors"), *old)
    assert ways_to_capture("marked outputs", debug=True, int8=True, level=None) == old
    assert ways_to_capture("debug tensors", debug=True, int8=True, level=None) == (Way("debug tensors"),)


def test_the_ways_of_a_graph_without_quantisers() -> None:
    found = ways_to_capture(None, debug=False, int8=False, level=None)
    assert found == (Way("marked outputs", level=0), Way("marked outputs", "doubled", 0), FLOAT_OWN, FLOAT_DOUBLED)


def test_a_level_that_was_asked_for_is_the_only_one() -> None:
    found = ways_to_capture(None, debug=True, int8=True, level=2)
    assert {way.level for way in found} == {2}
    assert len(found) == 5


def test_what_a_way_asks_of_the_builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[BuildOptions] = []
    monkeypatch.setattr(capture, "build_engine", lambda model, *, options, **rest: asked.append(options))
    for way in (INT8_QUICK, INT8_AGAIN, Way("debug tensors")):
        build_capture(tmp_path, ["a"], (), plan_path=tmp_path, way=way, options=BuildOptions(fp16=True))
    first, again, debug = asked
    assert (first.mark_outputs, first.mark_how, first.mark_strictly) == (("a",), "doubled", False)
    assert (first.optimization_level, first.fp16, first.watch_unfused) == (0, True, False)
    assert (again.mark_how, again.optimization_level) == ("dequantised again", None)
    assert (debug.mark_outputs, debug.watch_unfused, debug.optimization_level) == ((), True, None)


# -- a fake card -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tensorrt(card: Card, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version of the fake TensorRT and what its engines do; returns what was built and warned.

    ``failures`` and ``wrong`` are the ways that build no engine, and one that computes three times x.
    """
    seen = SimpleNamespace(
        built=[], warned=[], debug=DEBUG, profiles=RANGE, failures=[], wrong=[], operation="double", network=MARKED
    )

    def build(path: Any, tensors: Any, profiles: Any, *, plan_path: Path, way: Way, **rest: Any) -> Any:
        seen.built.append((way, tuple(map(str, profiles))))
        if way in seen.failures:
            raise ToolError("TensorRT builds no engine:\n  assertIsValidSubscript")
        debug = seen.debug if way.kind == "debug tensors" else ()
        double = way.how != "itself"
        marks = [
            (f"{name}::doubled" if double else name, seen.network[name] * (2 if double else 1))
            for name in ([] if way.kind == "debug tensors" else tensors)
            if name in seen.network
        ]
        operation = "triple" if way in seen.wrong else seen.operation
        plan_path.write_bytes(plan(operation, debug=debug, marks=marks, profiles=seen.profiles))

    def use(version: str) -> Any:
        api = Api(trt=fake_tensorrt(card.graphs, version=version), rtx=False, version=version)
        monkeypatch.setattr(runner, "load_api", lambda target: api)
        monkeypatch.setattr(capture, "load_api", lambda target: api)
        return seen

    monkeypatch.setattr(capture, "build_capture", build)
    monkeypatch.setattr(capture, "no_device_reason", lambda: None)
    return use


def ways(seen: Any) -> list[Way]:
    return [way for way, _ in seen.built]


def captured_by(seen: Any, folder: Path, tensors: list[str], **options: Any) -> Capture:
    return Capture(model(folder / "m.onnx"), tensors, reference=doubled, warn=seen.warned.append, **options)


def test_debug_tensors_where_the_version_has_them(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    with captured_by(seen, tmp_path, ["a", "b"]) as captured:
        assert captured.ends == {"a": "r"}
        found = captured({"x": rows(2)})
    assert captured.recorded == "debug tensors"
    assert captured.scales == {"r": SCALE}
    assert set(found) == {"y", "r", "b"}, "a was fused and is not invented"
    np.testing.assert_array_equal(found["r"], rows(2) * 2 * SCALE)
    np.testing.assert_array_equal(found["b"], rows(2) * 3)
    assert seen.built == [(Way("debug tensors"), ("x=1x3,2x3,2x3",))]
    assert seen.warned == []


def test_marked_int8_tensors_where_it_has_none(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    with captured_by(seen, tmp_path, ["a", "b", "y"]) as captured:
        found = captured({"x": rows(2)})
    assert set(found) == {"r", "y"}, "the tensor behind a's activation; b is not quantised and fused"
    np.testing.assert_array_equal(found["r"], rows(2) * 7)
    np.testing.assert_array_equal(found["y"], rows(2) * 2)
    assert captured.ends == {"a": "r"}
    assert captured.scales == {"r": SCALE}
    assert captured.unshown == {}
    assert captured.recorded == "marked INT8 tensors, doubled, level 0"
    assert captured.check is not None
    assert captured.check.relative_l2 == {"y": 0.0}
    assert captured.check.samples == 2
    assert seen.built == [(INT8_QUICK, ("x=1x3,2x3,2x3",))]
    assert seen.warned == []


def test_without_quantisers_the_tensors_themselves(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    seen.network = {"c": 4}
    with Capture(conv(tmp_path / "m.onnx"), ["c", "gone"], reference=doubled) as captured:
        found = captured({"x": rows(2)})
    np.testing.assert_array_equal(found["c"], rows(2) * 4)
    assert captured.recorded == "marked outputs, level 0"
    assert captured.scales == captured.ends == {}
    assert captured.unshown == {"gone": "TensorRT's network has no tensor of that name"}


def test_an_engine_that_computes_something_else_makes_room_for_the_next(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    seen.wrong = [INT8_QUICK, INT8_OWN]
    with captured_by(seen, tmp_path, ["a"]) as captured:
        found = captured({"x": rows(2)})
        captured({"x": rows(2)})
    assert ways(seen) == [INT8_QUICK, INT8_OWN, INT8_AGAIN], "and no further one at the second call"
    np.testing.assert_array_equal(found["r"], rows(2) * 7)
    assert captured.recorded == "marked INT8 tensors, dequantised again, TensorRT's own level"
    reason = "output 'y' of the engine differs from the recorded one by 0.5 (relative L2), allowed is 0.1"
    assert seen.warned == [
        f"not recorded as {INT8_QUICK}: {reason}; next: {INT8_OWN}",
        f"not recorded as {INT8_OWN}: {reason}; next: {INT8_AGAIN}",
    ]


def test_float_tensors_are_the_last_resort(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    seen.wrong, seen.failures = [INT8_QUICK, INT8_OWN, INT8_AGAIN], [FLOAT_OWN]
    with captured_by(seen, tmp_path, ["a", "b", "gone"]) as captured:
        found = captured({"x": rows(1)})
    assert ways(seen) == [INT8_QUICK, INT8_OWN, INT8_AGAIN, FLOAT_OWN, FLOAT_DOUBLED]
    assert set(found) == {"a", "b", "y"}
    np.testing.assert_array_equal(found["a"], rows(1) * 5)
    assert captured.ends == captured.scales == {}
    assert captured.unshown == {"gone": "TensorRT's network has no tensor of that name"}
    assert "not recorded as marked outputs, TensorRT's own level: assertIsValidSubscript; next" in seen.warned[-1]


def test_when_all_engines_are_wrong_nothing_is_reported(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.operation, seen.failures = "triple", [INT8_OWN]
    with captured_by(seen, tmp_path, ["a"]) as captured, pytest.raises(CheckFailed) as error:
        captured({"x": rows(2)})
    assert error.value.exit_code == 1
    first, *lines = error.value.message.splitlines()
    assert first == (
        "TensorRT 10.16.1 builds no engine of m.onnx that shows its tensors and gives its outputs; nothing of these "
        "engines is reported:"
    )
    wrong = "output 'y' of the engine differs from the recorded one by 0.5 (relative L2), allowed is 0.1"
    every = [Way("debug tensors"), INT8_QUICK, INT8_OWN, INT8_AGAIN, FLOAT_OWN, FLOAT_DOUBLED]
    assert lines == [f"  {way}: {'assertIsValidSubscript' if way == INT8_OWN else wrong}" for way in every]
    assert "quantize verify ARTIFACT --on-device" in str(error.value.remedy)
    assert [entry["way"] for entry in error.value.figures["ways"]] == [str(way) for way in every]
    assert error.value.figures["ways"][0]["check"]["relative_l2"]["y"] == pytest.approx(0.5)
    assert len(seen.warned) == 5


def test_debug_tensors_are_checked_too(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.wrong = [Way("debug tensors")]
    with captured_by(seen, tmp_path, ["a"]) as captured:
        assert set(captured({"x": rows(2)})) == {"r", "y"}
    assert captured.recorded == str(INT8_QUICK)
    with (
        captured_by(seen, tmp_path, ["a"], recorded="debug tensors") as captured,
        pytest.raises(CheckFailed, match="debug tensors: output 'y' of the engine differs"),
    ):
        captured({"x": rows(2)})


def test_the_limit_of_the_check(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    seen.wrong = [INT8_QUICK]
    with captured_by(seen, tmp_path, ["a"], tolerance=0.6) as captured:
        captured({"x": rows(2)})
    assert captured.recorded == str(INT8_QUICK)


def test_an_output_that_the_engine_lacks(tensorrt: Any, tmp_path: Path) -> None:
    tensorrt("8.6.0")

    def more(feeds: Mapping[str, np.ndarray]) -> Samples:
        return Samples({"x": rows(2)}, {"y": 2 * rows(2), "z": rows(2)})

    with (
        Capture(model(tmp_path / "m.onnx"), ["a"], reference=more) as captured,
        pytest.raises(CheckFailed, match="the engine has no output 'z'; it has y"),
    ):
        captured({"x": rows(2)})


def test_an_output_without_axes_is_compared() -> None:
    one, two = {"s": np.array(1.0)}, {"s": np.array(2.0)}
    assert check_outputs(one, one, 4, 0.1).relative_l2 == {"s": 0.0}
    with pytest.raises(CheckFailed, match=r"output 's' of the engine differs from the recorded one by 0\.5"):
        check_outputs(one, two, 4, 0.1)


def test_outputs_whose_samples_cannot_be_told_apart(
    tensorrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples go in two runs of two: outputs that have no row for each sample cannot be put together."""
    tensorrt("8.6.0")
    whole = runner.Runner.__call__
    flat = lambda self, feeds: {name: values.sum(keepdims=True)[0] for name, values in whole(self, feeds).items()}  # noqa: E731
    monkeypatch.setattr(runner.Runner, "__call__", flat)
    with (
        Capture(
            model(tmp_path / "m.onnx"), ["a"], reference=lambda _: Samples({"x": rows(9)}, {"y": rows(9)})
        ) as captured,
        pytest.raises(CheckFailed, match="no output has an axis for the samples"),
    ):
        captured({"x": rows(2)})


def test_marked_outputs_can_be_asked_for(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    with captured_by(seen, tmp_path, ["a"], recorded="marked outputs") as captured:
        captured({"x": rows(1)})
    assert ways(seen) == [INT8_QUICK]


def test_debug_tensors_asked_of_an_old_version(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    with pytest.raises(InputError, match=r"they take TensorRT 10\.12 or newer"):
        captured_by(seen, tmp_path, ["a"], recorded="debug tensors")


def test_without_a_card_nothing_is_built(tensorrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tensorrt("8.6.0")
    monkeypatch.setattr(capture, "no_device_reason", lambda: "no NVIDIA driver")
    with pytest.raises(ToolError, match="no engine can run here: no NVIDIA driver") as error:
        captured_by(seen, tmp_path, ["a"])
    assert "--engine-tensors" in str(error.value.remedy)
    assert seen.built == []


def test_internal_names_only_make_it_mark_tensors(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.debug = (("__myln_1", "float32", 1), ("__myln_2", "float32", 1))
    with captured_by(seen, tmp_path, ["a"]) as captured:
        assert set(captured({"x": rows(2)})) == {"r", "y"}
    assert ways(seen) == [Way("debug tensors"), INT8_QUICK]
    assert "none of the graph's tensors, but 2 tensors, such as __myln_1, __myln_2" in seen.warned[0]


def test_a_network_without_the_int8_tensors(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    seen.network = {"a": 5}
    with captured_by(seen, tmp_path, ["a"]) as captured:
        assert set(captured({"x": rows(2)})) == {"a", "y"}
    assert ways(seen) == [INT8_QUICK, INT8_OWN, INT8_AGAIN, FLOAT_OWN]
    assert "TensorRT reports none of the graph's tensors, but no tensor at all" in seen.warned[0]


def test_internal_names_only_stay_when_debug_tensors_are_asked_for(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.debug = ()
    with captured_by(seen, tmp_path, ["a"], recorded="debug tensors") as captured:
        assert set(captured({"x": rows(2)})) == {"y"}
    assert captured.recorded == "debug tensors"


def test_a_failed_build_falls_back_unless_asked_for(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.failures = [Way("debug tensors")]
    with captured_by(seen, tmp_path, ["y", "a"]) as captured:
        captured({"x": rows(1)})
    assert captured.recorded == str(INT8_QUICK)
    assert "assertIsValidSubscript" in seen.warned[0]
    with (
        captured_by(seen, tmp_path, ["y"], recorded="debug tensors") as captured,
        pytest.raises(ToolError, match="assertIsValidSubscript"),
    ):
        captured({"x": rows(1)})


def test_an_engine_that_refuses_the_listener(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.operation = "mute"
    with (
        captured_by(seen, tmp_path, ["y"], recorded="debug tensors") as captured,
        pytest.raises(ToolError, match="hands out no debug tensors of this engine"),
    ):
        captured({"x": rows(1)})


def test_samples_in_numbers_that_no_profile_allows(tensorrt: Any, tmp_path: Path) -> None:
    profile = Profile.parse("x=4x3,4x3,4x3")
    for version, name, factor in (("10.16.1", "b", 3), ("8.6.0", "r", 7)):
        seen = tensorrt(version)
        seen.profiles = (((4, 3), (4, 3), (4, 3)),)
        with captured_by(seen, tmp_path, ["a", "b"], profiles=[profile]) as captured:
            for count in (1, 3, 4, 5, 9):
                found = captured({"x": rows(count)})
                np.testing.assert_array_equal(found["y"], rows(count) * 2)
                np.testing.assert_array_equal(found[name], rows(count) * factor)
        assert captured.unshown == {}


def test_marked_tensors_are_built_for_as_many_samples_as_there_are(tensorrt: Any, tmp_path: Path) -> None:
    profiles = [Profile.parse(text) for text in ("x=1x3,8x3,64x3", "x=16x3,32x3,64x3", "x=4x3,4x3,4x3")]
    for version in ("8.6.0", "10.16.1"):
        seen = tensorrt(version)
        with captured_by(seen, tmp_path, ["y", "a", "b"], profiles=profiles) as captured:
            captured({"x": rows(2)})
    narrow, whole = (tuple(built) for _, built in seen.built)
    assert narrow == ("x=1x3,2x3,2x3", "x=16x3,16x3,16x3", "x=4x3,4x3,4x3")
    assert whole == tuple(map(str, profiles)), "with debug tensors the engine is the one that serves"


def test_what_is_there_and_cannot_be_had_is_not_called_fused(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.debug = (("b", "bfloat16", 1), ("r_q", "int8", 1))
    with captured_by(seen, tmp_path, ["a", "b"]) as captured:
        assert set(captured({"x": rows(2)})) == {"r", "y"}
    assert set(captured.unshown) == {"b"}
    assert "bfloat16" in captured.unshown["b"]


def test_other_shapes_stay_an_error(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    with captured_by(seen, tmp_path, ["a"], profiles=[Profile.parse("x=1x3,2x3,4x3")]) as captured:
        with pytest.raises(InputError, match="has shape"):
            captured({"x": np.zeros((2, 5), np.float32)})
        with pytest.raises(InputError, match="no input 'z'"):
            captured({"z": np.zeros((2, 3), np.float32)})


def test_a_closed_capture(tensorrt: Any, tmp_path: Path) -> None:
    captured = captured_by(tensorrt("8.6.0"), tmp_path, ["a"])
    with pytest.raises(InputError, match="the capture is not open"):
        captured({"x": rows(1)})


# -- onnxruntime as the engine of a mobile network ---------------------------------------------------------------------

MOBILE = DATA / "depthwise_qdq.onnx"


def recorded_values() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    with np.load(DATA / "depthwise_qdq.npz") as file:
        feeds = {"x": file["inputs/x"]}
        return feeds, {n.removeprefix("outputs/"): file[n] for n in file.files if n.startswith("outputs/")}


@pytest.fixture
def onnxruntime_engine(card: Card, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Marks tensors of the mobile network; ``wrong`` ways double the input of the first depthwise convolution."""
    seen = SimpleNamespace(ways=[], wrong=())

    def build(path: Path, tensors: Any, profiles: Any, *, plan_path: Path, way: Way, **rest: Any) -> None:
        seen.ways.append(way)
        seen.tensors, seen.profiles = tuple(tensors), profiles

    class Stand:
        def __init__(self, plan: Path, *, target: str, record: Any) -> None:
            self.profiles, self.inputs = seen.profiles, [SimpleNamespace(name="x")]
            self.way, self.tensors = seen.ways[-1], seen.tensors
            self.session = make_session(MOBILE, capture=["y", *self.tensors], optimise=False)

        def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            fault = np.float32(2 if self.way in seen.wrong else 1)
            names = list(dict.fromkeys(["y", *self.tensors]))
            values = dict(zip(names, self.session.run(names, {"x": feeds["x"] * fault}), strict=True))
            if self.way.how == "itself":
                return values
            return {"y": values.pop("y"), **{f"{name}::doubled": 2 * array for name, array in values.items()}}

        def taken(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            return feeds

        def close(self) -> None:
            """Nothing to free."""

    monkeypatch.setattr(capture, "build_capture", build)
    monkeypatch.setattr(capture, "Runner", Stand)
    monkeypatch.setattr(capture, "load_api", lambda target: card.api)
    monkeypatch.setattr(capture, "no_device_reason", lambda: None)
    return seen


def test_the_int8_tensors_of_a_mobile_network(onnxruntime_engine: SimpleNamespace) -> None:
    """By which tensor each layer is shown, and that its values are those of that tensor after its quantiser."""
    feeds, expected = recorded_values()
    with Capture(MOBILE, list(expected), reference=lambda _: Samples(feeds, {"y": expected["y"]})) as captured:
        found = captured(feeds)
    assert onnxruntime_engine.ways == [INT8_QUICK]
    clipped = [layer for layer in expected if layer == "stem" or layer.endswith(("_expand", "_deep"))]
    assert captured.ends == {layer: f"{layer}_r" for layer in clipped}
    assert set(found) == {*captured.ends.values(), "b0_sum", "b1_project", "y"}
    assert set(expected) - set(found) - set(captured.ends) == {"b0_project", "b2_project", "b2_sum"}, "fused"
    assert set(captured.scales) == set(found) - {"y"}
    for name, scale in captured.scales.items():
        values = expected[name] if name in expected else np.clip(expected[name.removesuffix("_r")], 0, 6)
        codes = np.clip(np.rint(values / np.float32(scale)), -128, 127)
        np.testing.assert_allclose(found[name], codes * np.float32(scale), rtol=1e-6, atol=0, err_msg=name)
    np.testing.assert_array_equal(found["y"], expected["y"])


def test_a_mobile_network_that_is_computed_wrongly(onnxruntime_engine: SimpleNamespace) -> None:
    feeds, expected = recorded_values()
    onnxruntime_engine.wrong = (INT8_QUICK, INT8_OWN, INT8_AGAIN)
    with Capture(MOBILE, list(expected), reference=lambda _: Samples(feeds, {"y": expected["y"]})) as captured:
        found = captured(feeds)
    assert captured.way == FLOAT_OWN
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
