"""Small Q/DQ graphs, and an artifact around one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline import artifact as layout
from pipeline.artifact import CalibrationRecord, DataRecord, Manifest, SourceRecord, file_record, write_manifest
from pipeline.records import TensorSpec

X_SCALE, Y_SCALE = np.float32(0.031), np.float32(0.27)
ZERO = np.int8(0)
W_SCALES = np.array([0.5, 0.25, 0.125], np.float32)


def qdq_model(
    *,
    x_scale: Any = X_SCALE,
    zero: Any = ZERO,
    axis: int | None = 0,
    stored_weights: bool = False,
    cast: bool = False,
    constant_node: bool = False,
    run_time_scale: bool = False,
) -> onnx.ModelProto:
    """y = Gemm(DQ(Q(x)), DQ(Q(w))) with w of shape (3, 4), then DQ(Q(y))."""
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    inits = {
        "x_scale": np.asarray(x_scale), "y_scale": np.asarray(Y_SCALE), "w_scale": W_SCALES,
        "w": weights.astype(np.int8) if stored_weights else weights, "w_zero": np.zeros(3, np.int8),
    }  # fmt: skip
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])]
    nodes = []
    if run_time_scale:
        del inits["x_scale"]
        inputs.append(helper.make_tensor_value_info("x_scale", TensorProto.FLOAT, []))
    if constant_node:
        value = numpy_helper.from_array(inits.pop("x_scale"))
        nodes.append(helper.make_node("Constant", [], ["x_scale"], name="scale", value=value))
    source = "x"
    if cast:
        nodes.append(helper.make_node("Cast", ["x"], ["x_cast"], name="cast", to=TensorProto.FLOAT))
        source = "x_cast"
    pair = ["x_scale"]
    if zero is not None:
        inits["zero"] = np.asarray(zero)
        pair.append("zero")
    attributes = {} if axis is None else {"axis": axis}
    nodes += [
        helper.make_node("QuantizeLinear", [source, *pair], ["x_q"], name="q"),
        helper.make_node("DequantizeLinear", ["x_q", *pair], ["x_dq"], name="dq"),
    ]
    if stored_weights:
        weight = ["w", "w_scale", "w_zero"]
        nodes.append(helper.make_node("DequantizeLinear", weight, ["w_dq"], name="wdq", **attributes))
    else:
        nodes += [
            helper.make_node("QuantizeLinear", ["w", "w_scale", "w_zero"], ["w_q"], name="wq", **attributes),
            helper.make_node("DequantizeLinear", ["w_q", "w_scale", "w_zero"], ["w_dq"], name="wdq", **attributes),
        ]
    pair = ["y_scale", *pair[1:]]
    nodes += [
        helper.make_node("Gemm", ["x_dq", "w_dq"], ["y"], name="gemm", transB=1),
        helper.make_node("QuantizeLinear", ["y", *pair], ["y_q"], name="yq"),
        helper.make_node("DequantizeLinear", ["y_q", *pair], ["z"], name="ydq"),
    ]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(array, name) for name, array in inits.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    return model


def float_model() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def convolutions(seed: int = 0) -> onnx.ModelProto:
    """Two convolutions of 32 channels with a ReLU between them."""
    generator = np.random.default_rng(seed)
    weights = [generator.standard_normal((32, 32, 1, 1)).astype(np.float32) for _ in range(2)]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w0"], ["c"], name="conv"),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Conv", ["r", "w1"], ["y"], name="conv2"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 32, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32, 4, 4])],
        [numpy_helper.from_array(array, f"w{number}") for number, array in enumerate(weights)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def write_artifact(folder: Path, *, x_scale: float = float(X_SCALE), calibrator: str = "entropy") -> Path:
    """An artifact with the graph, its scales, and sample inputs and outputs."""
    folder.mkdir(parents=True)
    onnx.save(qdq_model(x_scale=np.float32(x_scale)), folder / layout.INT8_MODEL)

    def activation(scale: float) -> dict[str, Any]:
        return {
            "amax": scale * 127, "scale": float(np.float32(scale)), "calibrator": calibrator, "samples": 80,
            "min": -scale * 127, "max": scale * 120, "zeros": 1,
        }  # fmt: skip

    scales = {
        "schema": 1,
        "tensors": {"x": activation(x_scale), "y": activation(float(Y_SCALE))},
        "weights": {"w": {"node": "gemm", "axis": 0, "amax": [1.0] * 3, "scale": W_SCALES.tolist()}},
    }
    (folder / layout.SCALES).write_text(json.dumps(scales))
    generator = np.random.default_rng(0)
    x = generator.standard_normal((40, 4)).astype(np.float32)
    outputs = generator.standard_normal((40, 3)).astype(np.float32)
    np.savez(
        folder / layout.SAMPLES,
        **{"samples": np.arange(40), "inputs/x": x, "fp32/z": outputs * 1.03, "int8/z": outputs},
    )
    names = [layout.INT8_MODEL, layout.SCALES, layout.SAMPLES]
    manifest = Manifest(
        name="tiny", created="2026-01-01T00:00:00+00:00", tools={"numpy": np.__version__},
        source=SourceRecord(kind="onnx", spec="tiny.onnx", sha256="a" * 64),
        data=DataRecord(
            spec="40 samples", sha256="d" * 64, calibration_samples=40, verification_samples=4, held_aside=True
        ),
        calibration=CalibrationRecord(
            calibrator=calibrator, params={"bins": 2048.0}, batches=5, skipped_batches=0, tensors=2
        ),
        inputs=(TensorSpec(name="x", dtype="float32", shape=("N", 4)),),
        outputs=(TensorSpec(name="z", dtype="float32", shape=("N", 3)),),
        profiles=("x=1x4,8x4,64x4",),
        files={name: file_record(folder / name) for name in names},
    )  # fmt: skip
    write_manifest(folder, manifest)
    return folder
