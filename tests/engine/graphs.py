"""Small ONNX models for the engine tests, most of them wrong in one way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

CHANNELS = 16


def save(
    path: Path,
    nodes: list,
    constants: dict,
    *,
    opset: int = 17,
    shape: tuple = ("N", 8, 16, 16),
    dtype=TensorProto.FLOAT,
) -> Path:
    """x -> nodes -> y. Shape inference and checks are left out on purpose."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", dtype, list(shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("my", 1)], ir_version=8
    )
    path.write_bytes(model.SerializeToString())
    return path


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, (CHANNELS, 8, 3, 3)).astype(np.float32)


def conv(path: Path, **options) -> Path:
    """A float convolution and a Relu."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["y"], name="relu"),
    ]
    return save(path, nodes, {"w": weights()}, **options)


def qdq_conv(
    path: Path,
    *,
    scale: float = 0.1,
    zero: int = 0,
    zero_type: type = np.int8,
    with_zero: bool = True,
    weight_scale=None,
    weight_zero=None,
    axis: int | None = 0,
    scale_from: list | None = None,
    bias: bool = False,
    kernel_shape: bool = True,
    **options,
) -> Path:
    """x -> Q -> DQ -> conv with Q/DQ weights -> Relu; each argument can spoil one thing.

    Args:
        scale_from: nodes that compute ``s`` instead of a constant.
        bias: an int32 bias behind a DequantizeLinear, as onnxruntime writes it.
    """
    weight_scale = np.full(CHANNELS, 0.01, np.float32) if weight_scale is None else weight_scale
    weight_zero = np.zeros(np.shape(weight_scale), np.int8) if weight_zero is None else weight_zero
    constants = {"z": zero_type(zero), "w": weights(), "ws": weight_scale, "wz": weight_zero}
    if scale_from is None:
        constants["s"] = np.float32(scale)
    tail = ["z"] if with_zero else []
    kernel = {"kernel_shape": [3, 3]} if kernel_shape else {}
    along = {} if axis is None else {"axis": axis}
    inputs = ["d", "wd"]
    nodes = [
        *(scale_from or []),
        helper.make_node("QuantizeLinear", ["x", "s", *tail], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "s", *tail], ["d"], name="dequantize"),
        helper.make_node("QuantizeLinear", ["w", "ws", "wz"], ["wq"], name="weight_quantize", **along),
        helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["wd"], name="weight_dequantize", **along),
    ]
    if bias:
        constants |= {
            "b": np.zeros(CHANNELS, np.int32),
            "bs": np.full(CHANNELS, 1e-3, np.float32),
            "bz": np.zeros(CHANNELS, np.int32),
        }
        nodes.append(helper.make_node("DequantizeLinear", ["b", "bs", "bz"], ["bd"], name="bias_dequantize", axis=0))
        inputs.append("bd")
    nodes += [
        helper.make_node("Conv", inputs, ["c"], name="conv", pads=[1] * 4, **kernel),
        helper.make_node("Relu", ["c"], ["y"], name="relu"),
    ]
    return save(path, nodes, constants, **options)


def run_time_scale() -> list:
    """Nodes that compute the activation scale from the input."""
    return [helper.make_node("ReduceMax", ["x"], ["s"], name="largest", keepdims=0)]


def small_qdq(path: Path) -> Path:
    """x -> a -> Relu r -> Q/DQ -> b (read by two) -> Clip c -> y; the Q of b has a zero point of 3, that of r 0."""
    constants = {
        "s": np.float32(0.5),
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
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(made.SerializeToString())
    return path
