"""The look at a graph before TensorRT sees it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import helper

from pipeline.core.errors import InputError
from pipeline.engine.checks import check_model
from pipeline.engine.compat import Api
from pipeline.engine.onnx_wire import read_model
from tests.engine import graphs

RTX = Api(trt=SimpleNamespace(), rtx=True, version="1.7.1.116")
OLD = Api(trt=SimpleNamespace(), rtx=False, version="8.6.0")
NEW = Api(trt=SimpleNamespace(), rtx=False, version="11.4.0.106")


def warnings(path: Path, api: Api = RTX) -> list[str]:
    return [message.text for message in check_model(path, read_model(path), api)]


@pytest.mark.parametrize("api", [RTX, OLD, NEW])
def test_a_proper_graph_passes_without_a_word(tmp_path: Path, api: Api) -> None:
    assert warnings(graphs.qdq_conv(tmp_path / "m.onnx"), api) == []
    assert warnings(graphs.conv(tmp_path / "m.onnx"), api) == []


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ({"scale_from": graphs.run_time_scale()}, "'s' is computed at run time"),
        ({"zero": 5}, r"'z' is 5 \(TensorRT takes 0 only\)"),
        ({"zero_type": np.uint8}, r"'z' is uint8 \(TensorRT takes int8 only\)"),
        ({"zero_type": np.uint8, "zero": 128}, r"\(4\):(.|\n)*'z' is 128"),
        ({"with_zero": False}, r"no zero point \(ONNX: uint8, TensorRT: int8\)"),
        ({"scale": -1.0}, "must be positive and finite, found -1.0"),
        ({"scale": 0.0}, "must be positive and finite, found 0.0"),
        ({"scale": np.nan}, "must be positive and finite, found nan"),
        ({"scale": np.inf}, "must be positive and finite, found inf"),
        ({"axis": None}, r"per-channel scale 'ws' without an axis \(ONNX: 1, TensorRT: 0\)"),
        ({"bias": True}, "'bz' is int32"),
        ({"opset": 12}, "per-channel scales need opset 13 or newer, the model has 12"),
        ({"opset": 99}, "has opset 99; TensorRT-RTX .* reads 9 to 25"),
        ({"opset": 8}, "has opset 8"),
    ],
)
def test_what_would_be_read_otherwise_is_refused_with_node_and_tensor(
    tmp_path: Path, spoiled: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        warnings(graphs.qdq_conv(tmp_path / "m.onnx", **spoiled))
    assert re.search(words, str(caught.value)), str(caught.value)


def test_opset_18_is_refused_on_8_6_only(tmp_path: Path) -> None:
    path = graphs.conv(tmp_path / "m.onnx", opset=18)
    assert warnings(path, NEW) == []
    with pytest.raises(InputError, match=r"has opset 18; TensorRT 8\.6\.0 reads 9 to 17"):
        warnings(path, OLD)


def test_a_quantised_convolution_without_kernel_shape_is_refused_on_8_6_only(tmp_path: Path) -> None:
    path = graphs.qdq_conv(tmp_path / "m.onnx", kernel_shape=False)
    assert warnings(path, NEW) == warnings(path, RTX) == []
    with pytest.raises(InputError, match=r"needs the attribute kernel_shape .* lacks on 1: Conv 'conv'\n.*stage"):
        warnings(path, OLD)
    assert warnings(graphs.conv(tmp_path / "float.onnx"), OLD) == []


def test_a_zero_point_computed_at_run_time_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="dynamic"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="dq"),
    ]
    with pytest.raises(InputError, match="its zero point 'z' is computed at run time"):
        warnings(graphs.save(tmp_path / "m.onnx", nodes, {}))


def test_scales_computed_from_constants_are_constants(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Mul", ["half", "two"], ["s"]),
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    constants = {"half": np.float32(0.5), "z": np.int8(0)}
    assert warnings(graphs.save(tmp_path / "m.onnx", nodes, constants)) == []


def test_a_bad_pair_in_a_subgraph_is_found(tmp_path: Path) -> None:
    body = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "bad", "z"], ["q"], name="inner"),
            helper.make_node("DequantizeLinear", ["q", "bad", "z"], ["r"], name="inner_dq"),
        ],
        "branch",
        [],
        [helper.make_tensor_value_info("r", 1, None)],
    )
    nodes = [helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)]
    constants = {"bad": np.float32(-2), "z": np.int8(0), "c": np.bool_(True)}
    with pytest.raises(InputError, match="QuantizeLinear 'inner': its scale 'bad' must be positive"):
        warnings(graphs.save(tmp_path / "m.onnx", nodes, constants))


def test_per_channel_activations_are_a_warning(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="pair", axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1),
    ]
    constants = {"s": np.full(8, 0.1, np.float32), "z": np.zeros(8, np.int8)}
    (text,) = warnings(graphs.save(tmp_path / "m.onnx", nodes, constants))
    assert "'pair': per-channel scales on an activation, what follows runs in float" in text


@pytest.mark.parametrize(
    ("operator", "attributes", "axis", "fine"),
    [
        ("ConvTranspose", {}, 1, True),
        ("ConvTranspose", {}, 0, False),
        ("Gemm", {"transB": 1}, 0, True),
        ("Gemm", {"transB": 1}, 1, False),
        ("Gemm", {}, 1, True),
        ("Conv", {}, 0, True),
    ],
)
def test_the_axis_of_weights(tmp_path: Path, operator: str, attributes: dict[str, int], axis: int, fine: bool) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=axis),
        helper.make_node(operator, ["x", "d"], ["y"], name="op", **attributes),
    ]
    constants = {"w": np.ones((4, 4), np.int8), "s": np.full(4, 0.1, np.float32), "z": np.zeros(4, np.int8)}
    assert (warnings(graphs.save(tmp_path / "m.onnx", nodes, constants)) == []) == fine


def test_many_problems_are_cut_and_counted(tmp_path: Path) -> None:
    nodes = []
    for number in range(30):
        source = "x" if not number else f"d{number - 1}"
        nodes.append(helper.make_node("QuantizeLinear", [source, "s", "z"], [f"q{number}"], name=f"n{number}"))
        nodes.append(helper.make_node("DequantizeLinear", [f"q{number}", "s", "z"], [f"d{number}"]))
    constants = {"s": np.float32(0), "z": np.int8(0)}
    with pytest.raises(InputError, match="and 40 more"):
        warnings(graphs.save(tmp_path / "m.onnx", nodes, constants))


def test_a_model_without_an_opset_is_refused(tmp_path: Path) -> None:
    import onnx

    path = graphs.conv(tmp_path / "m.onnx")
    model = onnx.load(path)
    del model.opset_import[:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="states no ONNX opset"):
        warnings(path)
