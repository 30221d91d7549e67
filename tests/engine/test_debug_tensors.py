"""Unfused debug tensors: names, copies, the listener as TensorRT calls it, and the capture that uses them.

TensorRT from 10.12 on has not run here: a fake card stands in for it, shaped by the signatures of 10.16, 11.4 and RTX.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.config import Profile
from pipeline.core.errors import InputError, ToolError
from pipeline.engine import capture, runner
from pipeline.engine.capture import Capture
from pipeline.engine.compat import Api
from pipeline.engine.cuda import open_device
from pipeline.engine.debug_tensors import Watched, Watcher, fused_ends, watched_names
from pipeline.engine.onnx_wire import read_model
from pipeline.engine.runner import Runner
from tests.engine.fakes import fake_tensorrt, plan
from tests.engine.test_compat import api as listed_api

SCALE = 0.5
Card = SimpleNamespace


def model(path: Path) -> Path:
    """x -> a -> Relu r -> Q/DQ -> b (read by two) -> Clip c -> y; the Q of b has a zero point of 3, that of r 0."""
    constants = {
        "s": np.float32(SCALE),
        "two": np.array([SCALE, SCALE], np.float32),
        "zero": np.int8(0),
        "three": np.int8(3),
        "w": np.ones(3, np.float32),
    }
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "s", "zero"], ["r_q"]),
        helper.make_node("DequantizeLinear", ["r_q", "s", "zero"], ["r_dq"]),
        helper.make_node("Mul", ["r_dq", "w"], ["b"]),
        helper.make_node("QuantizeLinear", ["b", "s", "three"], ["b_q"]),
        helper.make_node("DequantizeLinear", ["b_q", "s", "three"], ["b_dq"]),
        helper.make_node("Clip", ["b"], ["c"]),
        helper.make_node("Add", ["b_dq", "c"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [value("x", TensorProto.FLOAT, ["N", 3])],
        [value("y", TensorProto.FLOAT, ["N", 3])],
        initializer=[numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_names_that_stand_for_a_tensor(tmp_path: Path) -> None:
    graph = read_model(model(tmp_path / "m.onnx")).graph
    assert watched_names(graph, ["a", "r", "b"]) == {
        "a": Watched("a"),
        "r": Watched("r"),
        "r_q": Watched("r", SCALE),
        "b": Watched("b"),
    }, "the INT8 form with a zero point of 3 cannot be turned back by its scale alone"


def test_a_layer_fused_with_its_activation_has_another_end(tmp_path: Path) -> None:
    graph = read_model(model(tmp_path / "m.onnx")).graph
    assert fused_ends(graph, ["a", "b", "r", "y"]) == {"a": "r"}, "b is read by a quantiser too"


# -- copying -----------------------------------------------------------------------------------------------------------


def watcher(card: Card, wanted: dict[str, Watched]) -> Watcher:
    return Watcher(card.api, open_device(), wanted)


def report(watching: Watcher, values: np.ndarray, name: str, *, location: str = "device", stream: int = 7) -> bool:
    kept = values.copy()
    answer = watching.listener.process_debug_tensor(
        kept.ctypes.data, location, kept.dtype.name, kept.shape, name, stream
    )
    kept[:] = 99  # what TensorRT does with its memory afterwards
    return bool(answer)


def test_values_are_copied_while_they_are_valid(card: Card) -> None:
    watching = watcher(card, {"a": Watched("a"), "r_q": Watched("r", SCALE)})
    codes, floats = np.array([[-128, 0, 127]], np.int8), np.array([[1.5, -2, 0]], np.float32)
    watching.begin()
    assert report(watching, floats, "a")
    assert report(watching, codes, "r_q", stream=0)
    assert report(watching, floats, "__myln_k_arg__bb1_3_myl4")
    values, scales = watching.values()
    np.testing.assert_array_equal(values["a"], floats)
    np.testing.assert_array_equal(values["r"], codes.astype(np.float32) * SCALE)
    assert scales == {"r": SCALE}
    assert watching.others == {"__myln_k_arg__bb1_3_myl4"}
    assert card.graphs.synchronized == [7, None], "the stream that TensorRT names, before each copy"


def test_host_memory_is_copied_without_the_card(card: Card) -> None:
    watching = watcher(card, {"a": Watched("a")})
    watching.begin()
    assert report(watching, np.arange(6, dtype=np.float32).reshape(2, 3), "a", location="host")
    np.testing.assert_array_equal(watching.values()[0]["a"], np.arange(6).reshape(2, 3))
    assert card.graphs.synchronized == []


def test_the_float_form_counts_before_the_int8_form(card: Card) -> None:
    for order in (("r", "r_q"), ("r_q", "r")):
        watching = watcher(card, {"r": Watched("r"), "r_q": Watched("r", SCALE)})
        watching.begin()
        for name in order:
            report(watching, np.ones(2, np.int8 if name == "r_q" else np.float16), name)
        values, scales = watching.values()
        assert values["r"].dtype == np.float16
        assert scales == {}


def test_tensors_of_later_profiles_have_a_longer_name(card: Card) -> None:
    watching = watcher(card, {"a": Watched("a")})
    watching.begin()
    report(watching, np.ones(2, np.float32), "a [profile 1]")
    assert set(watching.values()[0]) == {"a"}


def test_memory_holds_one_run(card: Card) -> None:
    watching = watcher(card, {"a": Watched("a")})
    watching.begin()
    report(watching, np.ones(2, np.float32), "a")
    watching.begin()
    assert watching.values() == ({}, {})


def test_what_cannot_be_copied_is_said(card: Card) -> None:
    watching = watcher(card, {"a": Watched("a"), "b": Watched("b"), "r_q": Watched("r", SCALE)})
    watching.begin()
    watching.receive(0, "device", "bfloat16", (2,), "a", 0)
    report(watching, np.ones(2, np.int8), "b")
    report(watching, np.ones(2, np.float32), "r_q")
    assert watching.values() == ({}, {})
    assert "has type bfloat16, which numpy lacks" in watching.skipped["a"]
    assert watching.skipped["b"] == "'b' is reported as int8, expected floating point"
    assert watching.skipped["r"] == "'r_q' is reported as float32, expected int8"


def test_an_address_may_come_as_a_capsule(card: Card) -> None:
    """The documented signature says so; the bindings hand over a number."""
    watching = watcher(card, {"a": Watched("a")})
    values = np.array([1.0, 2.0], np.float32)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    watching.begin()
    watching.receive(new(values.ctypes.data, None, None), "host", "float32", (2,), "a", 0)
    np.testing.assert_array_equal(watching.values()[0]["a"], values)


def test_an_error_in_the_listener_is_raised_after_the_run(card: Card) -> None:
    watching = watcher(card, {"a": Watched("a")})
    watching.begin()
    assert not watching.listener.process_debug_tensor(0, "device", "float32", None, "a", 0)
    with pytest.raises(ToolError, match="a debug tensor could not be copied: 'NoneType'"):
        watching.values()
    watching.begin()
    assert watching.values() == ({}, {})


# -- against the real classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["10.16", "11.4", "rtx-1.7"])
def test_versions_with_debug_tensors(version: str) -> None:
    one = listed_api(version)
    assert one.debug_tensors
    one.require_debug_tensors()


def test_8_6_has_none_and_names_the_version_that_does() -> None:
    with pytest.raises(
        InputError, match=r"TensorRT 8\.6\.0 has no unfused debug tensors: they take TensorRT 10\.12"
    ) as e:
        listed_api("8.6").require_debug_tensors()
    assert "--engine-capture marked-outputs" in str(e.value.remedy)


def test_a_context_that_refuses_is_noticed() -> None:
    class Deaf:
        unfused_tensors_debug_state = property(lambda self: False, lambda self, value: None)

        def set_debug_listener(self, listener: Any) -> bool:
            return True

    assert not Api.watch_unfused(Deaf(), None)
    assert not Api.watch_unfused(SimpleNamespace(set_debug_listener=lambda listener: False), None)


def test_the_listener_has_the_arguments_of_the_real_class() -> None:
    rtx = pytest.importorskip("tensorrt_rtx")
    signature = rtx.IDebugListener.process_debug_tensor.__doc__.strip().splitlines()[0]
    assert re.findall(r"(\w+): ", signature) == ["self", "addr", "location", "type", "shape", "name", "stream"]
    names = Watcher(Api(trt=rtx, rtx=True, version="1.7.1"), SimpleNamespace(), {}).listener.process_debug_tensor
    assert names.__code__.co_varnames[:7] == ("self", "addr", "location", "type", "shape", "name", "stream")


def test_the_real_class_calls_the_listener() -> None:
    """As TensorRT does: through the C++ virtual table of RTX's own class, here with host memory."""
    rtx = pytest.importorskip("tensorrt_rtx")
    wanted = {"a": Watched("a"), "r_q": Watched("r", SCALE)}
    watching = Watcher(Api(trt=rtx, rtx=True, version="1.7.1"), SimpleNamespace(), wanted)

    class Dims(ctypes.Structure):
        _fields_ = [("count", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8)]

    this = ctypes.c_void_p.from_address(id(watching.listener) + 16).value  # behind Python's object head
    assert this is not None
    table = ctypes.c_void_p.from_address(this).value
    assert table is not None
    slot = ctypes.c_void_p.from_address(table + 4 * ctypes.sizeof(ctypes.c_void_p)).value
    assert slot is not None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    kind = ctypes.CFUNCTYPE(ctypes.c_bool, pointer, pointer, integer, integer, pointer, ctypes.c_char_p, pointer)
    for name, values in (("a", np.arange(6, dtype=np.float32)), ("r_q", np.arange(-3, 3, dtype=np.int8))):
        dims = Dims(2, (ctypes.c_int64 * 8)(2, 3))
        dtype = rtx.DataType.FLOAT if values.dtype == np.float32 else rtx.DataType.INT8
        host = int(rtx.TensorLocation.HOST)
        address = ctypes.addressof(dims)
        assert kind(slot)(this, values.ctypes.data, host, int(dtype), address, name.encode(), 5)
        values[:] = 0
    found, scales = watching.values()
    np.testing.assert_array_equal(found["a"], np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(found["r"], SCALE * np.arange(-3, 3).reshape(2, 3))
    assert scales == {"r": SCALE}


# -- the capture -------------------------------------------------------------------------------------------------------

DEBUG = (("r_q", "int8", 2), ("b", "float32", 3), ("__myln_1", "float32", 1))
RANGE = (((1, 3), (4, 3), (8, 3)),)


@pytest.fixture
def tensorrt(card: Card, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version of the fake TensorRT and what its engines do; returns what was built and warned."""
    seen = SimpleNamespace(built=[], warned=[], debug=DEBUG, profiles=RANGE, failures=[], operation="double")

    def build(path: Any, tensors: Any, profiles: Any, *, plan_path: Path, **rest: Any) -> Any:
        seen.built.append((rest["recorded"], rest["how"], tuple(map(str, profiles))))
        if seen.failures and seen.failures.pop(0):
            raise ToolError("TensorRT builds no engine:\n  assertIsValidSubscript")
        plan_path.write_bytes(plan(seen.operation, debug=seen.debug, profiles=seen.profiles))

    def use(version: str) -> Any:
        api = Api(trt=fake_tensorrt(card.graphs, version=version), rtx=False, version=version)
        monkeypatch.setattr(runner, "load_api", lambda target: api)
        monkeypatch.setattr(capture, "load_api", lambda target: api)
        return seen

    monkeypatch.setattr(capture, "build_capture", build)
    monkeypatch.setattr(capture, "no_device_reason", lambda: None)
    return use


def rows(count: int) -> np.ndarray:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


def test_debug_tensors_where_the_version_has_them(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    with Capture(model(tmp_path / "m.onnx"), ["a", "b"], warn=seen.warned.append) as captured:
        assert captured.ends == {"a": "r"}
        found = captured({"x": rows(2)})
    assert captured.recorded == "debug tensors"
    assert captured.scales == {"r": SCALE}
    assert set(found) == {"y", "r", "b"}, "a was fused and is not invented"
    np.testing.assert_array_equal(found["r"], rows(2) * 2 * SCALE)
    np.testing.assert_array_equal(found["b"], rows(2) * 3)
    assert seen.built == [("debug tensors", "itself", ("x=1x3,2x3,2x3",))]
    assert seen.warned == []


def test_marked_outputs_where_it_has_none(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    with Capture(model(tmp_path / "m.onnx"), ["y"], warn=seen.warned.append) as captured:
        assert captured.ends == {}
        np.testing.assert_array_equal(captured({"x": rows(2)})["y"], rows(2) * 2)
    assert captured.recorded == "marked outputs"
    assert seen.built == [("marked outputs", "itself", ("x=1x3,2x3,2x3",))]


def test_marked_outputs_can_be_asked_for(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    with Capture(model(tmp_path / "m.onnx"), ["a"], recorded="marked outputs") as captured:
        captured({"x": rows(1)})
    assert [kind for kind, *_ in seen.built] == ["marked outputs"]


def test_debug_tensors_asked_of_an_old_version(tensorrt: Any, tmp_path: Path) -> None:
    tensorrt("8.6.0")
    with pytest.raises(InputError, match=r"they take TensorRT 10\.12 or newer"):
        Capture(model(tmp_path / "m.onnx"), ["a"], recorded="debug tensors")


def test_without_a_card_nothing_is_built(tensorrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tensorrt("8.6.0")
    monkeypatch.setattr(capture, "no_device_reason", lambda: "no NVIDIA driver")
    with pytest.raises(ToolError, match="no engine can run here: no NVIDIA driver") as error:
        Capture(model(tmp_path / "m.onnx"), ["a"])
    assert "--engine-tensors" in str(error.value.remedy)
    assert seen.built == []


def test_internal_names_only_make_it_mark_outputs(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.debug = (("__myln_1", "float32", 1), ("__myln_2", "float32", 1))
    with Capture(model(tmp_path / "m.onnx"), ["a"], warn=seen.warned.append) as captured:
        assert set(captured({"x": rows(2)})) == {"y"}
        assert captured.ends == {}
    assert captured.recorded == "marked outputs"
    assert [kind for kind, *_ in seen.built] == ["debug tensors", "marked outputs"]
    assert "none of the graph's tensors, but 2 tensors, such as __myln_1, __myln_2" in seen.warned[0]


def test_internal_names_only_stay_when_debug_tensors_are_asked_for(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.debug = ()
    with Capture(model(tmp_path / "m.onnx"), ["a"], recorded="debug tensors") as captured:
        assert set(captured({"x": rows(2)})) == {"y"}
    assert captured.recorded == "debug tensors"


def test_a_failed_build_falls_back_unless_asked_for(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.failures = [True]
    with Capture(model(tmp_path / "m.onnx"), ["y"], warn=seen.warned.append) as captured:
        captured({"x": rows(1)})
    assert captured.recorded == "marked outputs"
    assert "assertIsValidSubscript" in seen.warned[0]
    seen.failures = [True]
    with (
        Capture(model(tmp_path / "m.onnx"), ["y"], recorded="debug tensors") as captured,
        pytest.raises(ToolError, match="assertIsValidSubscript"),
    ):
        captured({"x": rows(1)})


def test_an_engine_that_refuses_the_listener(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.operation = "mute"
    with (
        Capture(model(tmp_path / "m.onnx"), ["y"], recorded="debug tensors") as captured,
        pytest.raises(ToolError, match="hands out no debug tensors of this engine"),
    ):
        captured({"x": rows(1)})


def test_outputs_are_doubled_where_they_cannot_be_marked(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("8.6.0")
    seen.failures = [True]
    with Capture(model(tmp_path / "m.onnx"), ["y"], warn=seen.warned.append) as captured:
        captured({"x": rows(1)})
    assert [how for _, how, _ in seen.built] == ["itself", "doubled"]
    assert "assertIsValidSubscript; they are returned as doubled" in seen.warned[0]


def test_samples_in_numbers_that_no_profile_allows(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.profiles = (((4, 3), (4, 3), (4, 3)),)
    profile = Profile.parse("x=4x3,4x3,4x3")
    with Capture(model(tmp_path / "m.onnx"), ["a", "b"], profiles=[profile]) as captured:
        for count in (1, 3, 4, 5, 9):
            found = captured({"x": rows(count)})
            np.testing.assert_array_equal(found["y"], rows(count) * 2)
            np.testing.assert_array_equal(found["b"], rows(count) * 3)


def test_marked_outputs_are_built_for_as_many_samples_as_there_are(tensorrt: Any, tmp_path: Path) -> None:
    profiles = [Profile.parse(text) for text in ("x=1x3,8x3,64x3", "x=16x3,32x3,64x3", "x=4x3,4x3,4x3")]
    for version in ("8.6.0", "10.16.1"):
        seen = tensorrt(version)
        with Capture(model(tmp_path / "m.onnx"), ["y", "b"], profiles=profiles) as captured:
            captured({"x": rows(2)})
    narrow, whole = (tuple(built) for _, _, built in seen.built)
    assert narrow == ("x=1x3,2x3,2x3", "x=16x3,16x3,16x3", "x=4x3,4x3,4x3")
    assert whole == tuple(map(str, profiles)), "with debug tensors the engine is the one that serves"


def test_what_is_there_and_cannot_be_had_is_not_called_fused(tensorrt: Any, tmp_path: Path) -> None:
    seen = tensorrt("10.16.1")
    seen.debug = (("b", "bfloat16", 1), ("r_q", "int8", 1))
    with Capture(model(tmp_path / "m.onnx"), ["a", "b"]) as captured:
        assert set(captured({"x": rows(2)})) == {"r", "y"}
    assert set(captured.unshown) == {"b"}
    assert "bfloat16" in captured.unshown["b"]
    tensorrt("8.6.0")
    with Capture(model(tmp_path / "m.onnx"), ["y", "gone"]) as captured:
        captured({"x": rows(2)})
    assert captured.unshown == {"gone": "TensorRT's network has no tensor of that name"}


def test_other_shapes_stay_an_error(tensorrt: Any, tmp_path: Path) -> None:
    tensorrt("8.6.0")
    with Capture(model(tmp_path / "m.onnx"), ["a"], profiles=[Profile.parse("x=1x3,2x3,4x3")]) as captured:
        with pytest.raises(InputError, match="has shape"):
            captured({"x": np.zeros((2, 5), np.float32)})
        with pytest.raises(InputError, match="no input 'z'"):
            captured({"z": np.zeros((2, 3), np.float32)})


def test_a_closed_capture(tensorrt: Any, tmp_path: Path) -> None:
    tensorrt("8.6.0")
    captured = Capture(model(tmp_path / "m.onnx"), ["a"])
    with pytest.raises(InputError, match="the capture is not open"):
        captured({"x": rows(1)})


def test_a_listener_gets_nothing_unless_the_engine_is_watched(card: Card) -> None:
    with Runner(plan(debug=DEBUG)) as engine:
        np.testing.assert_array_equal(engine({"x": rows(2)})["y"], rows(2) * 2)
