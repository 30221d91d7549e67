"""Small graphs for the tests, written with onnx's helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.core.ort import make_session


def graph(
    nodes: list[Any],
    inputs: dict[str, list[Any]],
    outputs: dict[str, list[Any]],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """A checked model with inferred shapes; all inputs and outputs are float32."""
    built = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(built, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return onnx.shape_inference.infer_shapes(model)


def transformer(path: Path, *, seed: int = 0, widest: float = 60.0) -> Path:
    """Nx16x32 to Nx16x24: a LayerNormalization whose first channel is ``widest`` times the others, which --equalise
    changes, and a product that hardly reads it."""
    generator = np.random.default_rng(seed)
    scale = np.ones(32, np.float32)
    weight = generator.standard_normal((32, 24)).astype(np.float32)
    scale[0] = widest
    weight[0] /= widest
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["n"], name="norm"),
        helper.make_node("MatMul", ["n", "w"], ["y"], name="product"),
    ]
    constants = {"scale": scale, "bias": np.zeros(32, np.float32), "w": weight}
    onnx.save(graph(nodes, {"x": ["N", 16, 32]}, {"y": ["N", 16, 24]}, constants), path)
    return path


def classifier(path: Path, classes: int = 10, seed: int = 0) -> Path:
    """Nx3x8x8 to N x classes: two convolutions with ReLU and Clip, pooling, a linear layer; random weights, the last
    bias such that :func:`images` fall into all classes."""
    generator = np.random.default_rng(seed)

    def weights(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    constants = {
        "w1": weights(16, 3, 3, 3),
        "b1": weights(16, 1)[:, 0],
        "w2": weights(32, 16, 3, 3),
        "b2": weights(32, 1)[:, 0],
        "w3": weights(classes, 32) * np.float32(3.0),
        "b3": np.zeros(classes, np.float32),
        "low": np.float32(0.0),
        "high": np.float32(6.0),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Clip", ["c2", "low", "high"], ["r2"], name="clip2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["scores"], name="linear", transB=1),
    ]
    model = graph(nodes, {"x": ["N", 3, 8, 8]}, {"scores": ["N", classes]}, constants)
    (scores,) = make_session(model, threads=1).run(["scores"], {"x": images(200, seed=7)})
    constants["b3"] = -scores.mean(axis=0)
    onnx.save(graph(nodes, {"x": ["N", 3, 8, 8]}, {"scores": ["N", classes]}, constants), path)
    return path


def images(count: int, seed: int = 1) -> np.ndarray:
    """float32 (count, 3, 8, 8); smooth, of different brightness, with a few large values."""
    generator = np.random.default_rng(seed)
    base = generator.standard_normal((count, 3, 1, 1)) + 0.7 * generator.standard_normal((count, 3, 8, 8))
    base[generator.random(base.shape) < 0.002] *= 4.0
    return base.astype(np.float32)
