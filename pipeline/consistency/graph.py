"""The quantisation that a Q/DQ ONNX graph expresses, read without the onnx package (a serving machine has none)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.consistency.context import QuantContext, TensorContext, TensorKind
from pipeline.core.errors import InputError
from pipeline.engine.onnx_wire import Node, Tensor, read_model

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["context_of_graph", "visible_tensors"]

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_DEFAULT_AXIS = 1
"""ONNX's, of both operators."""


class _Graph:
    """The nodes and constants of one model, by tensor name."""

    def __init__(self, path: Path) -> None:
        model = read_model(path)
        if model.opsets.get("", 0) < 10 or not model.quantised:
            raise InputError(
                f"{path} has no QuantizeLinear or DequantizeLinear node",
                remedy="give a quantised graph, such as an artifact's model.int8.onnx",
            )
        self.path = path
        self.nodes = model.graph.nodes
        self.constants: dict[str, Tensor] = dict(model.graph.initializers)
        self.producers: dict[str, Node] = {}
        for node in self.nodes:
            for name in node.outputs:
                self.producers[name] = node
            if node.op_type == "Constant" and "value" in node.attributes:
                value = node.attributes["value"].tensor
                if value is not None:
                    self.constants[node.outputs[0]] = value

    def source(self, name: str) -> str:
        """The tensor that ``name`` is a mere cast of (the float part of a graph may be FP16)."""
        producer = self.producers.get(name)
        while producer is not None and producer.op_type == "Cast":
            name = producer.inputs[0]
            producer = self.producers.get(name)
        return name

    def parameters(self, node: Node) -> tuple[tuple[float, ...], tuple[int, ...], str, int | None]:
        """Scales, zero points, integer dtype and axis of a Q or DQ node."""
        scales = self._values(node, 1, "scale")
        zeros, dtype = np.zeros(1), "uint8"  # ONNX's default for Q; a DQ takes its input's dtype
        if len(node.inputs) > 2 and node.inputs[2]:
            zeros = self._values(node, 2, "zero point")
            dtype = self.constants[node.inputs[2]].dtype
        elif node.op_type == _DEQUANTIZE and node.inputs[0] in self.constants:
            dtype = self.constants[node.inputs[0]].dtype
        axis = None
        if scales.size > 1:
            given = node.attributes.get("axis")
            axis = _DEFAULT_AXIS if given is None or given.integer is None else given.integer
        return tuple(map(float, scales)), tuple(map(int, zeros)), dtype, axis

    def _values(self, node: Node, index: int, what: str) -> np.ndarray:
        name = node.inputs[index]
        tensor = self.constants.get(name)
        if tensor is None:
            raise InputError(
                f"{self.path}: the {what} {name!r} of node {node.label()!r} is computed at run time",
                remedy="only constant scales can be compared; TensorRT takes no others",
            )
        values = tensor.values()
        if values is None or not values.size:
            raise InputError(
                f"{self.path}: the {what} {name!r} of node {node.label()!r} cannot be read ({tensor.dtype})",
                remedy="scales must lie in the .onnx file itself, as float32 or float16",
            )
        return values


def context_of_graph(path: Path, *, label: str | None = None) -> QuantContext:
    """Every Q/DQ pair of the graph: activations by the tensor that is quantised, weights by the constant's name.

    Raises:
        InputError: no ONNX file, no Q/DQ node in it, or a scale that is not a constant.
    """
    graph = _Graph(path)
    found: dict[tuple[TensorKind, str], TensorContext] = {}
    for node in graph.nodes:
        stored = node.op_type == _DEQUANTIZE and node.inputs[0] in graph.constants
        if node.op_type != _QUANTIZE and not stored:
            continue
        source = graph.source(node.inputs[0])
        kind: TensorKind = "weight" if source in graph.constants else "activation"
        scales, zero_points, dtype, axis = graph.parameters(node)
        entry = TensorContext(name=source, kind=kind, scales=scales, zero_points=zero_points, dtype=dtype, axis=axis)
        if found.setdefault((kind, source), entry) != entry:  # quantised twice, in two ways
            entry = entry.model_copy(update={"name": f"{source} ({node.label()})"})
            found[kind, entry.name] = entry
    return QuantContext(
        label=label or str(path),
        tensors=tuple(found.values()),
        complete=("activation", "weight"),
    )


def visible_tensors(path: Path) -> dict[str, str]:
    """The output of each activation's DequantizeLinear, by the name of the activation it came from.

    Where an engine returns such a tensor, its values are multiples of the scale.
    """
    graph = _Graph(path)
    found: dict[str, str] = {}
    for node in graph.nodes:
        producer = graph.producers.get(node.inputs[0]) if node.op_type == _DEQUANTIZE else None
        if producer is not None and producer.op_type == _QUANTIZE:
            source = graph.source(producer.inputs[0])
            if source not in graph.constants:
                found.setdefault(source, node.outputs[0])
    return found
