"""Fake quantisation in PyTorch, written from the definition: what an INT8 node of the plan must compute.

Takes the FP32 graph, the plan and ``scales.json``, and shares no code with the insertion of the pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch.nn import functional as F

from pipeline.placement import PlacementPlan

Arrays = dict[str, np.ndarray]


def fake_quantise(x: torch.Tensor, scale: float) -> torch.Tensor:
    """round half to even (x / s), clamped to -128..127, times s, all in float32."""
    s = torch.tensor(np.float32(scale))
    return torch.clamp(torch.round(x / s), -128, 127) * s


def fake_quantise_weights(w: np.ndarray, scales: np.ndarray, axis: int | None) -> torch.Tensor:
    """As in the docstring of ``quantize_weights``: nearest, then as many flips as the channel's sum of errors wants."""
    rows = np.moveaxis(w, -1 if axis is None else axis, 0).astype(np.float64)
    result = np.empty_like(rows)
    for index, row in enumerate(rows):
        scale = np.float64(scales[index if axis is not None else 0])
        exact = row.reshape(-1) / scale
        steps = np.rint(exact).clip(-127, 127)
        total = (exact - steps).sum()
        sign = -1.0 if total < 0 else 1.0
        error = np.where(np.abs(steps + sign) > 127, 0.0, (exact - steps) * sign)
        for flip in np.argsort(-error, kind="stable")[: int(np.rint(abs(total)))]:
            steps[flip] += sign if error[flip] > 0 else 0.0
        result[index] = (steps.astype(np.float32) * np.float32(scale)).reshape(row.shape)
    return torch.from_numpy(np.moveaxis(result, 0, -1 if axis is None else axis).astype(np.float32))


class Reference:
    """Recomputes quantised nodes one by one."""

    def __init__(self, fp32: onnx.ModelProto, plan: PlacementPlan, scales: dict[str, Any]) -> None:
        self.nodes = {node.name: node for node in fp32.graph.node}
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in fp32.graph.initializer}
        self.scales = {
            (node, index): scales["tensors"][point.tensor]["scale"]
            for point in plan.activations
            for node, index in point.consumers
        }
        self.weights = {
            (point.node, point.input_index): (
                np.array(scales["weights"][point.tensor]["scale"], np.float32),
                point.axis,
            )
            for point in plan.weights
        }

    def inputs(self, name: str) -> list[str]:
        """Computed tensors that the node reads."""
        return [value for value in self.nodes[name].input if value and value not in self.constants]

    def run(self, name: str, values: Arrays) -> list[np.ndarray]:
        """The node's outputs from its float inputs ``values``."""
        node = self.nodes[name]
        operands: list[Any] = []
        for index, value in enumerate(node.input):
            if not value:
                operands.append(None)
            elif (name, index) in self.weights:
                scales, axis = self.weights[name, index]
                operands.append(fake_quantise_weights(self.constants[value], scales, axis))
            elif value in self.constants:
                operands.append(torch.from_numpy(self.constants[value].copy()))
            else:
                tensor = torch.from_numpy(values[value].copy())
                scale = self.scales.get((name, index))
                operands.append(tensor if scale is None else fake_quantise(tensor, scale))
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        result = OPERATORS[node.op_type](operands, attributes)
        return [item.numpy() for item in (result if isinstance(result, (list, tuple)) else [result])]


def _padded(x: torch.Tensor, attributes: dict[str, Any], value: float = 0.0) -> torch.Tensor:
    spatial = x.ndim - 2
    pads = list(attributes.get("pads", [0] * 2 * spatial))
    pairs = [pads[axis + side * spatial] for axis in reversed(range(spatial)) for side in (0, 1)]
    return F.pad(x, pairs, value=value) if any(pairs) else x


def conv(operands: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    x, w = operands[:2]
    spatial = x.ndim - 2
    function = {1: F.conv1d, 2: F.conv2d}[spatial]
    return function(
        _padded(x, attributes), w, operands[2] if len(operands) > 2 else None,
        stride=tuple(attributes.get("strides", [1] * spatial)),
        dilation=tuple(attributes.get("dilations", [1] * spatial)), groups=attributes.get("group", 1),
    )  # fmt: skip


def conv_transpose(operands: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    x, w = operands[:2]
    return F.conv_transpose2d(
        x, w, operands[2] if len(operands) > 2 else None, stride=tuple(attributes.get("strides", [1, 1])),
        padding=tuple(attributes.get("pads", [0] * 4)[:2]), groups=attributes.get("group", 1),
    )  # fmt: skip


def gemm(operands: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    x, w = operands[:2]
    product = (x.T if attributes.get("transA") else x) @ (w.T if attributes.get("transB") else w)
    return product + operands[2] if len(operands) > 2 and operands[2] is not None else product


def max_pool(operands: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    padded = _padded(operands[0], attributes, -torch.inf)
    return F.max_pool2d(padded, tuple(attributes["kernel_shape"]), tuple(attributes.get("strides", [1, 1])))


def average_pool(operands: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    assert not any(attributes.get("pads", [0]))
    return F.avg_pool2d(operands[0], tuple(attributes["kernel_shape"]), tuple(attributes.get("strides", [1, 1])))


def split(operands: list[Any], attributes: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return torch.split(operands[0], operands[1].tolist(), attributes.get("axis", 0))


def resize(operands: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    assert attributes["mode"] == b"nearest"
    return F.interpolate(operands[0], scale_factor=tuple(operands[2].tolist()[2:]), mode="nearest")


OPERATORS: dict[str, Any] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Gemm": gemm,
    "MatMul": lambda operands, attributes: operands[0] @ operands[1],
    "Add": lambda operands, attributes: operands[0] + operands[1],
    "Concat": lambda operands, attributes: torch.cat(operands, attributes["axis"]),
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "GlobalAveragePool": lambda operands, attributes: operands[0].mean((2, 3), keepdim=True),
    "Split": split,
    "Resize": resize,
}
