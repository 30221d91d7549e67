"""Small ONNX graphs, written node by node, for tests of single rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.config import PlacementConfig
from pipeline.placement import PlacementPlan, make_plan


class Tiny:
    """Builds one graph. Every method adds a node named after its output and returns the output's name."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.random = np.random.default_rng(seed)

    def input(self, name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        self.constants[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def weights(self, name: str, *shape: int) -> str:
        return self.constant(name, self.random.standard_normal(shape) * 0.2)

    def op(self, kind: str, inputs: list[str], output: str, *more: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output, *more], name=output, **attributes))
        return output

    def conv(self, x: str, name: str, inputs: int, outputs: int, kernel: int = 3, **attributes: Any) -> str:
        group = attributes.get("group", 1)
        self.weights(f"{name}.weight", outputs, inputs // group, kernel, kernel)
        self.weights(f"{name}.bias", outputs)
        attributes.setdefault("pads", [kernel // 2] * 4)
        return self.op("Conv", [x, f"{name}.weight", f"{name}.bias"], name, **attributes)

    def silu(self, x: str, name: str) -> str:
        return self.op("Mul", [x, self.op("Sigmoid", [x], f"{name}.sigmoid")], name)

    def model(self, *outputs: str, opset: int = 17) -> onnx.ModelProto:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "tiny", self.inputs, values, list(self.constants.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)

    def save(self, folder: Path, *outputs: str, opset: int = 17) -> Path:
        path = folder / "tiny.onnx"
        onnx.save(self.model(*outputs, opset=opset), path)
        return path

    def plan(self, folder: Path, *outputs: str, **config: Any) -> PlacementPlan:
        return make_plan(self.save(folder, *outputs), PlacementConfig(**config))


def pairs(plan: PlacementPlan) -> dict[str, set[tuple[str, int]]]:
    """Tensor with a pair -> who reads it as INT8."""
    return {point.tensor: set(point.consumers) for point in plan.activations}


def groups(plan: PlacementPlan) -> list[set[str]]:
    """Sets of tensors that share a scale."""
    found: dict[str, set[str]] = {}
    for point in plan.activations:
        if point.group is not None:
            found.setdefault(point.group, set()).add(point.tensor)
    return list(found.values())


def decision(plan: PlacementPlan, node: str) -> tuple[bool, str]:
    """Quantised or not, and by which rule."""
    (found,) = [item for item in plan.decisions if item.node == node]
    return found.quantized, found.rule
