"""A look at the graph before TensorRT sees it: what its parser takes without a word and then computes differently.

Every case here was seen to parse (or to end the process) in at least one version; the message says what would happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.errors import InputError
from pipeline.engine.compat import OLDEST_OPSET
from pipeline.engine.records import Message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.engine.compat import Api
    from pipeline.engine.onnx_wire import Graph, Model, Node, Tensor

__all__ = ["check_model"]

_AXIS_OPSET = 13  # Q/DQ know an axis from here on
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_SHOWN = 20


class _Constants:
    """Which tensors of a graph are known before it runs, and their values where they lie in the file."""

    def __init__(self, model: Model) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.known: set[str] = set()
        self._add(model.graph)

    def _add(self, graph: Graph) -> None:
        fed = {spec.name for spec in graph.inputs} - set(graph.initializers)
        self.tensors.update(graph.constants())
        self.known.update(graph.initializers)
        self.known -= fed
        for node in graph.nodes:
            given = node.op_type == "Constant" and not node.domain
            computed = (
                node.inputs
                and not any(a.graphs for a in node.attributes.values())
                and all(name in self.known for name in node.inputs if name)
                and not node.op_type.startswith("Random")
            )
            if given or computed:
                self.known.update(node.outputs)
            for attribute in node.attributes.values():
                for subgraph in attribute.graphs:
                    self._add(subgraph)

    def values(self, name: str) -> np.ndarray | None:
        tensor = self.tensors.get(name)
        return tensor.values() if tensor is not None else None


def check_model(path: Path, model: Model, api: Api) -> tuple[Message, ...]:
    """Refuse what would go wrong silently.

    Returns:
        Warnings: graphs that work and run slower than they look, since a convolution stays in float.

    Raises:
        InputError: an opset outside the version's range, or Q/DQ nodes that TensorRT reads otherwise than ONNX means
            them. All of them are listed with node and tensor. For 8.6: a quantised convolution lacks kernel_shape.
    """
    opset = model.opsets.get("")
    if opset is None:
        raise InputError(f"{path} states no ONNX opset", remedy="write the model again with opset 17")
    if not OLDEST_OPSET <= opset <= api.newest_opset:
        raise InputError(
            f"{path} has opset {opset}; {api.title} reads {OLDEST_OPSET} to {api.newest_opset} "
            "(others parse without a message, some wrongly)",
            remedy="export the model with opset 17, which every version reads",
        )
    constants = _Constants(model)
    problems = [
        text
        for _, node in model.graph.walk()
        if node.op_type in _QDQ and not node.domain
        for text in _qdq_problems(node, constants, opset)
    ]
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise InputError(
            f"{path}: {api.title} would read these quantisation nodes wrongly ({len(problems)}):\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more,
            remedy="quantise symmetrically: explicit int8 zero points of 0, constant positive scales, an explicit axis",
        )
    if api.needs_kernel_shape and (nodes := _without_kernel_shape(model)):
        raise InputError(
            f"{path}: {api.title} needs the attribute kernel_shape where a convolution's weight comes from a "
            f"DequantizeLinear; it lacks on {len(nodes)}: {', '.join(nodes[:_SHOWN])}"
            + (f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""),
            remedy="write it on the nodes; the prepare stage of `quantize build` does so on every convolution",
        )
    return tuple(Message(severity="warning", source="check", text=text) for text in _float_fallbacks(model, constants))


def _without_kernel_shape(model: Model) -> list[str]:
    """Convolutions with weights behind a DequantizeLinear that leave their kernel's shape to be worked out."""
    found = []
    for graph in {id(graph): graph for graph, _ in model.graph.walk()}.values():
        producers = {name: node for node in graph.nodes for name in node.outputs}
        for node in graph.nodes:
            if node.op_type not in ("Conv", "ConvTranspose") or node.domain or "kernel_shape" in node.attributes:
                continue
            weight = producers.get(node.inputs[1]) if len(node.inputs) > 1 else None
            if weight is not None and weight.op_type == "DequantizeLinear":
                found.append(f"{node.op_type} {node.label()!r}")
    return found


def _qdq_problems(node: Node, constants: _Constants, opset: int) -> Iterator[str]:
    where = f"{node.op_type} {node.label()!r}"
    scale, zero = (*node.inputs, "", "")[1:3]
    if scale not in constants.known:
        yield f"{where}: its scale {scale!r} is computed at run time; TensorRT needs a constant (TensorRT-RTX crashes)"
    values = constants.values(scale)
    if values is not None:
        bad = values[~(np.isfinite(values) & (values > 0))]
        if bad.size:
            yield f"{where}: its scale {scale!r} must be positive and finite, found {float(bad[0])!r}"
        if values.size > 1:
            if opset < _AXIS_OPSET:
                yield f"{where}: per-channel scales need opset {_AXIS_OPSET} or newer, the model has {opset}"
            elif "axis" not in node.attributes:
                yield f"{where}: per-channel scale {scale!r} without an axis (ONNX: 1, TensorRT: 0)"
    if not zero:
        yield f"{where}: no zero point (ONNX: uint8, TensorRT: int8)"
    elif zero not in constants.known:
        yield f"{where}: its zero point {zero!r} is computed at run time; TensorRT needs a constant"
    else:
        tensor = constants.tensors.get(zero)
        if tensor is not None and tensor.dtype in ("uint8", "int32", "uint16", "int16"):
            yield f"{where}: its zero point {zero!r} is {tensor.dtype} (TensorRT takes int8 only)"
        zeros = constants.values(zero)
        if zeros is not None and np.any(zeros != 0):
            yield f"{where}: its zero point {zero!r} is {int(zeros[zeros != 0][0])} (TensorRT takes 0 only)"


def _float_fallbacks(model: Model, constants: _Constants) -> Iterator[str]:
    for graph in {id(graph): graph for graph, _ in model.graph.walk()}.values():
        producers = {name: node for node in graph.nodes for name in node.outputs}
        for node in graph.nodes:
            if node.domain:
                continue
            if node.op_type in _QDQ and node.inputs[0] not in constants.known:
                values = constants.values(node.inputs[1])
                source = producers.get(node.inputs[0])
                if values is not None and values.size > 1 and not (source and source.op_type in _QDQ):
                    yield (
                        f"{node.op_type} {node.label()!r}: per-channel scales on an activation, "
                        "what follows runs in float"
                    )
            expected = _weight_axis(node)
            weight = producers.get(node.inputs[1]) if expected is not None and len(node.inputs) > 1 else None
            if weight is None or weight.op_type != "DequantizeLinear":
                continue
            values, axis = constants.values(weight.inputs[1]), weight.attributes.get("axis")
            if values is not None and values.size > 1 and axis is not None and axis.integer != expected:
                yield (
                    f"{node.op_type} {node.label()!r}: its weights are quantised along axis {axis.integer}, "
                    f"TensorRT needs axis {expected}; it runs in float"
                )


def _weight_axis(node: Node) -> int | None:
    """The output-channel axis of the node's weights; None for other operators."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        transposed = node.attributes.get("transB")
        return 0 if transposed is not None and transposed.integer else 1
    return None
