"""Unfused debug tensors: names, copies, and the listener as TensorRT calls it. The capture: ``test_capture.py``.

TensorRT from 10.12 on has not run here: a fake card stands in for it, shaped by the signatures of 10.16, 11.4 and RTX.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from pipeline.core.errors import InputError, ToolError
from pipeline.engine.compat import Api
from pipeline.engine.cuda import open_device
from pipeline.engine.debug_tensors import Watched, Watcher, dequantised_names, fused_ends, watched_names
from pipeline.engine.onnx_wire import Graph, read_model
from pipeline.engine.runner import Runner
from tests.engine.fakes import plan
from tests.engine.graphs import save
from tests.engine.graphs import small_qdq as model
from tests.engine.test_compat import api as listed_api

SCALE = 0.5
Card = SimpleNamespace


def test_names_that_stand_for_a_tensor(tmp_path: Path) -> None:
    graph = read_model(model(tmp_path / "m.onnx")).graph
    assert watched_names(graph, ["a", "r", "b"]) == {
        "a": Watched("a"),
        "r": Watched("r"),
        "r_q": Watched("r", SCALE),
        "b": Watched("b"),
    }, "the INT8 form with a zero point of 3 cannot be turned back by its scale alone"


def test_what_the_next_layer_reads(tmp_path: Path) -> None:
    """r as it is behind its DequantizeLinear; b's has a zero point, a and y are not quantised."""
    graph = read_model(model(tmp_path / "m.onnx")).graph
    assert dequantised_names(graph, ["a", "b", "r", "y", "gone"]) == {"r_dq": Watched("r", SCALE)}


def test_a_tensor_that_is_quantised_behind_a_cast(tmp_path: Path) -> None:
    """As in graphs whose float part is FP16; of two pairs the first counts, and a lone QuantizeLinear has no output."""
    constants = {"s": np.float32(SCALE), "t": np.float32(1), "zero": np.int8(0)}
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["h"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("QuantizeLinear", ["f", "t", "zero"], ["lone"]),
        helper.make_node("QuantizeLinear", ["f", "s", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "t", "zero"], ["other_scale"]),
        helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["again"]),
        helper.make_node("Add", ["d", "again"], ["y"]),
    ]
    graph = read_model(save(tmp_path / "m.onnx", nodes, constants)).graph
    assert dequantised_names(graph, ["h"]) == {"d": Watched("h", SCALE)}


def test_a_layer_fused_with_its_activation_has_another_end(tmp_path: Path) -> None:
    graph = read_model(model(tmp_path / "m.onnx")).graph
    assert fused_ends(graph, ["a", "b", "r", "y"]) == {"a": "r"}, "b is read by a quantiser too"


HARD_SWISH = (
    ("Add", ["a", "three"], ["plus"]),
    ("Clip", ["plus", "zero", "six"], ["clipped"]),
    ("Mul", ["a", "clipped"], ["product"]),
    ("Div", ["product", "six"], ["swish"]),
    ("Mul", ["swish", "three"], ["scaled"]),
    ("Add", ["scaled", "three"], ["end"]),
)
"""As PaddleOCR's text detector has it, with a scale and a shift behind it."""
QUANTISED = (
    ("QuantizeLinear", ["end", "s", "code"], ["q"]),
    ("DequantizeLinear", ["q", "s", "code"], ["d"]),
    ("Relu", ["d"], ["y"]),
)


def written_out(path: Path, *nodes: tuple[str, list[str], list[str]]) -> Graph:
    constants = {"three": np.float32(3), "six": np.float32(6), "zero": np.float32(0)}
    constants |= {"s": np.float32(SCALE), "code": np.int8(0)}
    made = [helper.make_node("Conv", ["x", "x"], ["a"]), *(helper.make_node(*node) for node in nodes)]
    return read_model(save(path, made, constants)).graph


def test_an_activation_may_be_written_in_several_nodes(tmp_path: Path) -> None:
    graph = written_out(tmp_path / "m.onnx", *HARD_SWISH, *QUANTISED)
    assert fused_ends(graph, ["a"]) == {"a": "end"}
    assert dequantised_names(graph, ["a", "end"]) == {"d": Watched("end", SCALE)}


@pytest.mark.parametrize(
    "more", [("GlobalAveragePool", ["swish"], ["pooled"]), ("Mul", ["swish", "x"], ["gated"])], ids=lambda node: node[0]
)
def test_what_another_operator_reads_on_the_way_is_no_end(
    more: tuple[str, list[str], list[str]], tmp_path: Path
) -> None:
    assert fused_ends(written_out(tmp_path / "m.onnx", *HARD_SWISH, more, *QUANTISED), ["a"]) == {}


def test_what_another_tensor_goes_into_is_no_end(tmp_path: Path) -> None:
    gated = [(op, ["x" if name == "six" else name for name in names], out) for op, names, out in HARD_SWISH]
    assert fused_ends(written_out(tmp_path / "m.onnx", *gated, *QUANTISED), ["a"]) == {}


def test_what_is_an_output_on_the_way_is_no_end(tmp_path: Path) -> None:
    names = {"product": "y", "y": "z"}
    nodes = [
        (op, [names.get(name, name) for name in read], [names.get(name, name) for name in made])
        for op, read, made in (*HARD_SWISH, *QUANTISED)
    ]
    assert fused_ends(written_out(tmp_path / "m.onnx", *nodes), ["a"]) == {}


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


# -- a runner ----------------------------------------------------------------------------------------------------------

DEBUG = (("r_q", "int8", 2), ("b", "float32", 3), ("__myln_1", "float32", 1))


def test_a_listener_gets_nothing_unless_the_engine_is_watched(card: Card) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Runner(plan(debug=DEBUG)) as engine:
        np.testing.assert_array_equal(engine({"x": rows})["y"], rows * 2)
