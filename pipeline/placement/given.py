"""What a graph that came with Q/DQ nodes has quantised: scales of activations, and weights with theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.placement.plan import WeightPoint

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["RULE", "GivenWeight", "given_scales", "given_weights"]

RULE = "existing"


@dataclass(frozen=True)
class GivenWeight:
    """A constant that a node reads behind a DequantizeLinear."""

    point: WeightPoint
    scale: np.ndarray[Any, np.dtype[np.float32]]
    """One, or one per slice along the point's axis."""


def given_scales(graph: GraphView) -> dict[str, float]:
    """Scale by name of every computed tensor that a per-tensor QuantizeLinear of the graph reads, in graph order."""
    scales: dict[str, float] = {}
    for node in graph.nodes:
        if graph.op(node) == "QuantizeLinear" and not graph.is_constant(node.inputs[0]):
            scale = graph.scalar(node.inputs[1])
            if scale is not None and node.inputs[0] is not None:
                scales.setdefault(node.inputs[0].name or "", scale)
    return scales


def given_weights(graph: GraphView) -> list[GivenWeight]:
    """Every constant that is stored quantised, or has a pair of its own, once for each node that reads it.

    The graph has been repaired, so that an axis is written out.
    """
    found = []
    for node in graph.nodes:
        if graph.op(node) != "DequantizeLinear":
            continue
        quantizer = graph.producer(node.inputs[0], "QuantizeLinear")
        root = graph.constant_root(node.inputs[0] if quantizer is None else quantizer.inputs[0])
        scale = graph.array(node.inputs[1])
        if root is None or scale is None:
            continue
        for reader, index in graph.readers(node.outputs[0]):
            point = WeightPoint(
                tensor=root.name or "",
                node=reader.name or "",
                input_index=index,
                axis=None if scale.size == 1 else _axis(graph, node),
                rule=RULE,
            )
            found.append(GivenWeight(point, scale.reshape(-1).astype(np.float32)))
    return found


def _axis(graph: GraphView, node: ir.Node) -> int:
    attribute, shape = node.attributes.get("axis"), graph.shape(node.inputs[0])
    axis = 1 if attribute is None else attribute.as_int()
    return axis + len(shape) if axis < 0 and shape is not None else axis
