"""Small networks with a Q/DQ form written out by hand, for tests that need to know every number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.data.batching import Batch
from pipeline.placement.plan import NodeDecision, PlacementPlan

CLASSES = 5
SIDE = 8


def fake_quantised(x: np.ndarray, scale: float | np.ndarray) -> np.ndarray:
    """s * clamp(round-half-even(x / s)), the definition."""
    return (np.clip(np.rint(x / scale), -128, 127) * scale).astype(np.float32)


@dataclass
class Network:
    """FP32 and INT8 form; ``amax`` by activation, ``weights`` in FP32 by name."""

    fp32: onnx.ModelProto
    int8: onnx.ModelProto
    amax: dict[str, float]
    weights: dict[str, np.ndarray]
    plan: PlacementPlan


def _model(
    nodes: list[Any], initializers: list[Any], outputs: dict[str, list[Any]], side: Any = SIDE
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, side, side])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        initializer=initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def network(amax: dict[str, float] | None = None, *, seed: int = 0, weight_scale: float = 1.0) -> Network:
    """x -> stem Conv, Relu -> branch Conv, + skip -> Pad, Conv -> GAP, Flatten, Gemm.

    The skip input of ``add`` and the input of ``pad`` (in front of ``last``) are quantised.
    """
    rng = np.random.default_rng(seed)
    weights = {
        "w_stem": rng.normal(0, 0.3, (4, 3, 3, 3)).astype(np.float32),
        "w_branch": rng.normal(0, 0.2 * weight_scale, (4, 4, 3, 3)).astype(np.float32),
        "w_last": rng.normal(0, 0.2, (6, 4, 3, 3)).astype(np.float32),
        "w_fc": rng.normal(0, 0.5, (CLASSES, 6)).astype(np.float32),
    }
    bias = rng.normal(0, 0.1, 4).astype(np.float32)
    others = [
        numpy_helper.from_array(bias, "b_stem"),
        numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64), "pads"),
    ]
    amax = {"x": 3.0, "relu": 3.0, "sum": 4.0, "flat": 1.5} | (amax or {})

    def nodes(
        stem: tuple[str, str], branch: tuple[str, str], skip: str, pad: str, last: str, fc: tuple[str, str]
    ) -> list[Any]:
        return [
            helper.make_node("Conv", [*stem, "b_stem"], ["stem"], "stem_conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["stem"], ["relu"], "relu_node"),
            helper.make_node("Conv", [*branch], ["branch"], "branch_conv", pads=[1, 1, 1, 1]),
            helper.make_node("Add", ["branch", skip], ["sum"], "add_node"),
            helper.make_node("Pad", [pad, "pads"], ["padded"], "pad_node"),
            helper.make_node("Conv", ["padded", last], ["last"], "last_conv"),
            helper.make_node("GlobalAveragePool", ["last"], ["pooled"], "pool_node"),
            helper.make_node("Flatten", ["pooled"], ["flat"], "flatten_node"),
            helper.make_node("Gemm", [*fc], ["logits"], "fc_node", transB=1),
        ]

    outputs: dict[str, list[Any]] = {"logits": ["N", CLASSES]}
    float_nodes = nodes(("x", "w_stem"), ("relu", "w_branch"), "relu", "sum", "w_last", ("flat", "w_fc"))
    fp32 = _model(float_nodes, [*(numpy_helper.from_array(w, n) for n, w in weights.items()), *others], outputs)

    quantised: list[Any] = []
    initializers = [*others, numpy_helper.from_array(np.int8(0), "zero")]
    for name, value in amax.items():
        initializers.append(numpy_helper.from_array(np.float32(value / 127), f"{name}_scale"))
    for name, value in weights.items():
        scale = weight_scales(value)
        codes = np.clip(np.rint(value / _along0(scale, value)), -127, 127).astype(np.int8)
        initializers += [
            numpy_helper.from_array(codes, f"{name}_q"),
            numpy_helper.from_array(scale, f"{name}_scale"),
            numpy_helper.from_array(np.zeros(len(scale), np.int8), f"{name}_zero"),
        ]
        quantised.append(
            helper.make_node(
                "DequantizeLinear", [f"{name}_q", f"{name}_scale", f"{name}_zero"], [f"{name}_dq"], f"{name}_DQ", axis=0
            )
        )
    int8_nodes = nodes(
        ("x_dq", "w_stem_dq"), ("relu_dq", "w_branch_dq"), "relu_dq", "sum_dq", "w_last_dq", ("flat_dq", "w_fc_dq")
    )

    def pair(tensor: str) -> list[Any]:
        scale = [f"{tensor}_scale", "zero"]
        return [
            helper.make_node("QuantizeLinear", [tensor, *scale], [f"{tensor}_q"], f"{tensor}_Q"),
            helper.make_node("DequantizeLinear", [f"{tensor}_q", *scale], [f"{tensor}_dq"], f"{tensor}_DQ"),
        ]

    ordered = [*quantised, *pair("x")]
    for node in int8_nodes:
        ordered.append(node)
        if node.output[0] in amax:
            ordered += pair(node.output[0])
    int8 = _model(ordered, initializers, outputs)
    decisions = tuple(
        NodeDecision(
            node=node.name,
            op=node.op_type,
            outputs=tuple(node.output),
            quantized=node.name in ("stem_conv", "branch_conv", "add_node", "pad_node", "last_conv", "fc_node"),
            rule="test",
            reason="",
        )
        for node in float_nodes
    )
    return Network(fp32, int8, amax, weights, PlacementPlan(decisions=decisions))


def almost_zero(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose logits are the sigmoid of what they were, less 12."""
    low = onnx.ModelProto()
    low.CopyFrom(model)
    low.graph.initializer.append(numpy_helper.from_array(np.float32(12), "twelve"))
    for node in low.graph.node:
        node.output[:] = ["high" if name == "logits" else name for name in node.output]
    low.graph.node.append(helper.make_node("Sub", ["high", "twelve"], ["low"], "shift"))
    low.graph.node.append(helper.make_node("Sigmoid", ["low"], ["logits"], "sigmoid"))
    return low


def weight_scales(weight: np.ndarray) -> np.ndarray:
    return (np.abs(weight).reshape(len(weight), -1).max(axis=1) / 127).astype(np.float32)


def _along0(scale: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return scale.reshape(-1, *[1] * (weight.ndim - 1))


def quantised_weight(weight: np.ndarray) -> np.ndarray:
    return fake_quantised(weight, _along0(weight_scales(weight), weight))


def batches(count: int = 6, size: int = 2, *, seed: int = 1, side: int = SIDE) -> list[Batch]:
    """Random images as batches; sample numbers start at 10."""
    x = np.random.default_rng(seed).normal(0, 1, (count, 3, side, side)).astype(np.float32)
    return [
        Batch(i, tuple(range(10 + start, 10 + min(start + size, count))), {"x": x[start : start + size]})
        for i, start in enumerate(range(0, count, size))
    ]


def chain(layers: int, *, width: int = 4, side: int = 16, seed: int = 0) -> Network:
    """``layers`` convolutions with Relu in a row, each with Q/DQ, for tests of size."""
    rng = np.random.default_rng(seed)
    float_nodes: list[Any] = []
    int8_nodes: list[Any] = []
    float_init: list[Any] = []
    int8_init: list[Any] = [
        numpy_helper.from_array(np.int8(0), "zero"),
        numpy_helper.from_array(np.float32(4 / 127), "s"),
    ]
    weights, amax, decisions = {}, {}, []
    current = "x"
    for i in range(layers):
        shape = (width, 3 if i == 0 else width, 3, 3)
        weight = rng.normal(0, (1.6 / np.prod(shape[1:])) ** 0.5, shape).astype(np.float32)
        name = f"w{i}"
        weights[name] = weight
        scale = weight_scales(weight)
        float_init.append(numpy_helper.from_array(weight, name))
        int8_init += [
            numpy_helper.from_array(np.rint(weight / _along0(scale, weight)).astype(np.int8), f"{name}_q"),
            numpy_helper.from_array(scale, f"{name}_s"),
            numpy_helper.from_array(np.zeros(width, np.int8), f"{name}_z"),
        ]
        conv, relu = f"conv{i}", f"relu{i}"
        float_nodes += [
            helper.make_node("Conv", [current, name], [conv], f"/layers.{i}/Conv", pads=[1] * 4),
            helper.make_node("Relu", [conv], [relu], f"/layers.{i}/Relu"),
        ]
        int8_nodes += [
            helper.make_node("QuantizeLinear", [current, "s", "zero"], [f"{current}_q"], f"q{i}"),
            helper.make_node("DequantizeLinear", [f"{current}_q", "s", "zero"], [f"{current}_dq"], f"dq{i}"),
            helper.make_node(
                "DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [f"{name}_dq"], f"wdq{i}", axis=0
            ),
            helper.make_node("Conv", [f"{current}_dq", f"{name}_dq"], [conv], f"/layers.{i}/Conv", pads=[1] * 4),
            helper.make_node("Relu", [conv], [relu], f"/layers.{i}/Relu"),
        ]
        amax[current] = 4.0
        decisions.append(
            NodeDecision(node=f"/layers.{i}/Conv", op="Conv", outputs=(conv,), quantized=True, rule="t", reason="")
        )
        current = relu
    outputs: dict[str, list[Any]] = {current: ["N", width, side, side]}
    return Network(
        _model(float_nodes, float_init, outputs, side),
        _model(int8_nodes, int8_init, outputs, side),
        amax,
        weights,
        PlacementPlan(decisions=tuple(decisions)),
    )
