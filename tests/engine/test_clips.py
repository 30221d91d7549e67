"""Clip in front of a QuantizeLinear: which ones TensorRT is not left alone with, and that the integers stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from pipeline.config import Profile
from pipeline.engine.builder import build_engine
from pipeline.engine.clips import Passed, _how, clips_to_pass, pass_clips
from pipeline.engine.compat import load_api
from pipeline.engine.onnx_wire import read_model

DATA = Path(__file__).parent / "data"
CONSTANTS = {
    "low": np.float32(0),
    "high": np.float32(6),
    "scale": np.float32(6 / 127),
    "zero": np.int8(0),
    "w": np.full((4, 4, 1, 1), 0.5, np.float32),
    "w_scale": np.float32(0.5 / 127),
    "x_scale": np.float32(0.1),
}
INT8 = [
    helper.make_node("QuantizeLinear", ["x", "x_scale", "zero"], ["x_q"]),
    helper.make_node("DequantizeLinear", ["x_q", "x_scale", "zero"], ["x_dq"]),
    helper.make_node("QuantizeLinear", ["w", "w_scale", "zero"], ["w_q"]),
    helper.make_node("DequantizeLinear", ["w_q", "w_scale", "zero"], ["w_dq"]),
    helper.make_node("Conv", ["x_dq", "w_dq"], ["c"], kernel_shape=[1, 1]),
]
FLOAT = [helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[1, 1])]
CLIP = helper.make_node("Clip", ["c", "low", "high"], ["r"], name="relu6")
PAIR = [
    helper.make_node("QuantizeLinear", ["r", "scale", "zero"], ["r_q"]),
    helper.make_node("DequantizeLinear", ["r_q", "scale", "zero"], ["y"]),
]
RELU = Passed("relu6", "c", "r_q", "relu", (0.0, 6.0))


def graph_of(path: Path, nodes: list, *, outputs: tuple[str, ...] = ("y",), opset: int = 17, **constants: object):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (CONSTANTS | constants).items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path.write_bytes(made.SerializeToString())
    return read_model(path).graph


def found(tmp_path: Path, nodes: list, *, returned: tuple[str, ...] = (), **more: object) -> list[Passed]:
    return clips_to_pass(graph_of(tmp_path / "m.onnx", nodes, **more), returned=returned)  # type: ignore[arg-type]


def test_an_int8_convolution_keeps_its_clip(tmp_path: Path) -> None:
    assert found(tmp_path, [*INT8, CLIP, *PAIR]) == []


def test_behind_float_layers_and_sums_it_is_passed(tmp_path: Path) -> None:
    assert found(tmp_path, [*FLOAT, CLIP, *PAIR]) == [RELU]
    add = helper.make_node("Add", ["s", "x"], ["c"])
    conv = helper.make_node("Conv", ["x_dq", "w_dq"], ["s"], kernel_shape=[1, 1])
    assert found(tmp_path, [*INT8[:4], conv, add, CLIP, *PAIR]) == [RELU]
    first = helper.make_node("Clip", ["x", "low", "high"], ["r"], name="relu6")
    assert found(tmp_path, [first, *PAIR]) == [Passed("relu6", "x", "r_q", "relu", (0.0, 6.0))]
    half = helper.make_node("Conv", ["x_dq", "w"], ["c"], kernel_shape=[1, 1])  # its weights stay float
    assert found(tmp_path, [*INT8[:2], half, CLIP, *PAIR]) == [RELU]


@pytest.mark.parametrize("outputs", [("y", "c"), ("y", "r")])
def test_an_int8_convolution_whose_float_values_somebody_sees(tmp_path: Path, outputs: tuple[str, ...]) -> None:
    assert found(tmp_path, [*INT8, CLIP, *PAIR], outputs=outputs) == [RELU]
    assert found(tmp_path, [*INT8, CLIP, *PAIR], returned=outputs[1:]) == [RELU]
    other = helper.make_node("Sqrt", [outputs[1]], ["z"])
    assert found(tmp_path, [*INT8, CLIP, *PAIR, other], outputs=("y", "z")) == [RELU]


def test_a_reader_in_a_subgraph_sees_them_too(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("Sqrt", ["r"], ["z"])], "then", [], [helper.make_tensor_value_info("z", 1, None)]
    )
    branch = helper.make_node("If", ["yes"], ["z"], then_branch=inner, else_branch=inner)
    assert found(tmp_path, [*INT8, CLIP, *PAIR, branch], outputs=("y", "z"), yes=np.bool_(True)) == [RELU]


@pytest.mark.parametrize(
    ("low", "high", "amax", "how"),
    [
        (0, 6, 6.0, "relu"),
        (0, 6, 4.7, "relu"),
        (0, 6, 6.02, "relu"),  # 126.58 steps
        (0, 6, 6.03, "doubled"),  # 126.4 steps: 126, where larger values are 127
        (-1, 1, 1.0, "doubled"),  # -127, where smaller values are -128
        (-1.01, 1, 1.0, "source"),
        (-0.0, 6, 6.0, "relu"),
        (0.1, 6, 6.0, "doubled"),
        (-np.inf, 6, 6.0, "source"),
        (0, np.inf, 6.0, "relu"),
        (-3, np.inf, 12.0, "doubled"),
    ],
)
def test_how(tmp_path: Path, low: float, high: float, amax: float, how: str) -> None:
    constants = {"low": np.float32(low), "high": np.float32(high), "scale": np.float32(amax / 127)}
    (one,) = found(tmp_path, [*FLOAT, CLIP, *PAIR], **constants)
    assert one.by == how
    assert one.bounds == (np.float32(low), np.float32(high))


def test_bounds_and_scales_wherever_they_are_written(tmp_path: Path) -> None:
    value = helper.make_node("Constant", [], ["six"], value=numpy_helper.from_array(np.float32(6)))
    clip = helper.make_node("Clip", ["c", "low", "six"], ["r"], name="relu6")
    assert found(tmp_path, [*FLOAT, value, clip, *PAIR]) == [RELU]
    old = helper.make_node("Clip", ["c"], ["r"], name="relu6", min=0.0, max=6.0)
    assert found(tmp_path, [*FLOAT, old, *PAIR], opset=10) == [RELU]
    only = helper.make_node("Clip", ["c", "low"], ["r"], name="relu6")
    assert found(tmp_path, [*FLOAT, only, *PAIR]) == [Passed("relu6", "c", "r_q", "relu", (0.0, np.inf))]
    without = helper.make_node("Clip", ["c", "", "high"], ["r"], name="relu6")
    assert found(tmp_path, [*FLOAT, without, *PAIR]) == [Passed("relu6", "c", "r_q", "source", (-np.inf, 6.0))]


def test_bounds_that_the_graph_computes_are_left_alone(tmp_path: Path) -> None:
    largest = helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0)
    clip = helper.make_node("Clip", ["c", "low", "most"], ["r"], name="relu6")
    assert found(tmp_path, [*FLOAT, largest, clip, *PAIR]) == []


@pytest.mark.parametrize(("low", "high", "scale"), [(2, 1, 0.1), (np.nan, 6, 0.1), (0, 6, 0.0), (0, 6, np.nan)])
def test_what_makes_no_sense_is_left_alone(tmp_path: Path, low: float, high: float, scale: float) -> None:
    constants = {"low": np.float32(low), "high": np.float32(high), "scale": np.float32(scale)}
    assert found(tmp_path, [*FLOAT, CLIP, *PAIR], **constants) == []


@settings(max_examples=300, deadline=None)
@given(
    low=st.one_of(st.just(0.0), st.just(-np.inf), st.floats(-8, 0, width=32)),
    high=st.one_of(st.just(np.inf), st.floats(0.125, 8, width=32)),
    scale=st.floats(2**-10, 0.25, width=32),
    values=st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=30),
)
def test_the_integers_are_the_same(low: float, high: float, scale: float, values: list[float]) -> None:
    step = np.float32(scale)
    near = [bound + move * step for bound in (low, high) if np.isfinite(bound) for move in (-1, -0.5, 0, 0.5, 1)]
    x = np.array([*values, *near, 126.5 * step, 127 * step, -127.5 * step, -128 * step], np.float32)

    def integers(y: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(y / step), -128, 127)

    instead = {
        "relu": np.maximum(x, np.float32(0)),
        "source": x,
        "doubled": np.clip(2 * x, np.float32(2 * low), np.float32(2 * high)) * np.float32(0.5),
    }[_how((low, high), scale)]
    np.testing.assert_array_equal(integers(instead), integers(np.clip(x, np.float32(low), np.float32(high))))


@pytest.fixture
def rtx():
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")
    return load_api("rtx")


def parsed(api: object, path: Path):
    trt = api.trt  # type: ignore[attr-defined]
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(api.network_flags(weakly_typed=False))  # type: ignore[attr-defined]
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(path))
    return network, (parser, builder, logger)


def test_the_network_reads_something_else(rtx) -> None:
    path = DATA / "clip_qdq.onnx"
    network, _alive = parsed(rtx, path)
    assert pass_clips(network, rtx, read_model(path).graph) == ("y_clipped", "z_clipped")
    trt = rtx.trt
    makers = {}
    for layer in map(network.get_layer, range(network.num_layers)):
        makers[layer.get_output(0).name] = layer
    relu = makers[makers["y_clipped_q"].get_input(0).name]
    assert (relu.name, relu.get_input(0).name) == ("y_clipped::relu", "c")
    half = makers[makers["z_clipped_q"].get_input(0).name]
    clip = makers[half.get_input(0).name]
    assert clip.name == "z_clipped::doubled"
    clip.__class__ = trt.IActivationLayer
    assert (clip.type, clip.alpha, clip.beta) == (trt.ActivationType.CLIP, -6.0, 6.0)
    assert makers[clip.get_input(0).name].get_input(0).name == "c"


def test_two_ranges_of_one_tensor_share_a_layer(rtx, tmp_path: Path) -> None:
    second = [
        helper.make_node("QuantizeLinear", ["r", "x_scale", "zero"], ["s_q"]),
        helper.make_node("DequantizeLinear", ["s_q", "x_scale", "zero"], ["z"]),
    ]
    path = tmp_path / "m.onnx"
    graph = graph_of(path, [*FLOAT, CLIP, *PAIR, *second], outputs=("y", "z"), x_scale=np.float32(0.04))
    network, _alive = parsed(rtx, path)
    before = network.num_layers
    assert pass_clips(network, rtx, graph) == ("relu6",)
    assert network.num_layers == before + 1


def test_the_record_names_them(rtx, tmp_path: Path) -> None:
    shape = "1x16x16x16"
    record = build_engine(
        DATA / "clip_qdq.onnx",
        target="rtx",
        profiles=[Profile.parse(f"x={shape},{shape},{shape}")],
        plan_path=tmp_path / "model.plan",
        timeout_s=120,
    )
    told = [message for message in record.messages if "y_clipped" in message.text]
    assert [m.text for m in told] == ["computed in another form, with the same INT8 values: y_clipped, z_clipped"]
    assert told[0].severity == "info"
