"""A float model that computes in 16 bits, made to compute in float32: what INT8 is calibrated on and placed in.

Every weight keeps its number (float32 holds all of float16 and bfloat16), casts between the two vanish, and inputs and
outputs become float32. What differs from the original is only what it lost by rounding to 16 bits. A model with Q/DQ
nodes is left alone: its types belong to its quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.onnxgraph import all_graphs, infer_shapes
from pipeline.placement.existing import is_quantizer
from pipeline.placement.graph import GraphView

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

__all__ = ["Widened", "widen"]

_HALVES = ("FLOAT16", "BFLOAT16")
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype")
"""Integer attributes that hold a data type: Cast; random numbers, EyeLike, Bernoulli; window functions."""


@dataclass(frozen=True)
class Widened:
    """What :func:`widen` changed."""

    dtype: str
    """``float16`` or ``bfloat16``, of :attr:`first`."""
    first: str
    """The first tensor in 16 bits that a node computes with."""
    weights: int
    casts: int
    """That are gone."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def note(self) -> str:
        """What was done to the tensors."""
        return (
            f"{self.weights} constants widened from {self.dtype} to float32, exactly; {self.casts} casts between the "
            "two removed"
        )

    @property
    def advice(self) -> str:
        """What the user should know of it, as a sentence: the other interface, and how to have the old one back."""
        both = bool(self.inputs and self.outputs)
        interface = "both" if both else "inputs" if self.inputs else "outputs" if self.outputs else ""
        options = "`--precision fp16`" if not interface else f"`--precision fp16 --fp16-io {interface}`"
        names = ", ".join((*self.inputs, *self.outputs))
        return (
            f"computes in {self.dtype} (first in {self.first!r}); INT8 is calibrated and placed in float32, so it was "
            "widened to that"
            + (f", with float32 instead of {self.dtype} at {names}" if names else "")
            + f"; {options} makes FP16 of what is not INT8"
            + (", and of these inputs and outputs" if both else f", and of these {interface}" if interface else "")
        )


def widen(model: ir.Model) -> Widened | None:
    """Make ``model`` float32, in place, where it computes in float16 or bfloat16; None, and no change, where it does
    not, or has Q/DQ nodes."""
    from onnx_ir.passes.common import InlinePass

    graphs = list(all_graphs(model))
    if not any(_half_sources(graph) for graph in graphs):
        return None
    if any(is_quantizer(GraphView.op(node)) for graph in graphs for node in graph):
        return None
    if model.functions:
        InlinePass()(model)
    sources = (value for graph in all_graphs(model) for value in _half_sources(graph))
    found = next((value for value in sources if _computed_with(value)), None)
    if found is None:
        return None
    dtype = "float16" if found.dtype is None else found.dtype.name.lower()
    inputs = tuple(str(value.name) for value in model.graph.inputs if _is_half(value))
    outputs = tuple(str(value.name) for value in model.graph.outputs if _is_half(value))
    types = _inferred_types(model)
    weights = sum(_widen_graph(graph) for graph in all_graphs(model))
    casts = sum(_drop_casts(graph, types) for graph in list(all_graphs(model)))
    return Widened(dtype, str(found.name), weights, casts, inputs, outputs)


def _is_half(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.name in _HALVES


def _half_sources(graph: ir.Graph) -> list[ir.Value]:
    """Tensors in 16 bits that come into ``graph`` from nowhere in 16 bits: without one of them it has none."""
    values = [value for value in (*graph.inputs, *graph.initializers.values()) if _is_half(value)]
    return values + [node.outputs[0] for node in graph if node.outputs and any(_half_attributes(node))]


def _half_attributes(node: ir.Node) -> Iterator[ir.Attr]:
    """Attributes that give the node's output 16 bits: a type, or a constant."""
    import onnx_ir as ir

    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.INT:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.as_int() in {ir.DataType[name] for name in _HALVES}:
                yield attribute
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype.name in _HALVES:
            yield attribute


def _computed_with(value: ir.Value) -> bool:
    """True when a node does more with ``value`` than to change its type."""
    return any(node.op_type not in ("Cast", "CastLike") for node, _ in value.uses())


def _inferred_types(model: ir.Model) -> dict[str, str]:
    """Tensor to the name of its data type, where that is known. Inference takes sequences for tensors, so that it is
    let at a copy; the weights are shared."""
    copy = model.clone()
    infer_shapes(copy)
    values = [
        value
        for graph in all_graphs(copy)
        for value in (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs))
    ]
    return {value.name: value.dtype.name for value in values if value.name and value.dtype is not None}


def _widen_graph(graph: ir.Graph) -> int:
    """Make every 16-bit tensor of ``graph`` itself float32; returns how many constants there were."""
    import onnx_ir as ir

    constants = 0
    for value in graph.initializers.values():
        if _is_half(value) and value.const_value is not None:
            value.const_value = _widened(value.const_value)
            constants += 1
    for node in graph:
        for attribute in list(_half_attributes(node)):
            if attribute.type == ir.AttributeType.INT:
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
            else:
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _widened(attribute.as_tensor()))
                constants += 1
    for value in (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        value.type = _widened_type(value.type)
    return constants


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    import numpy as np
    import onnx_ir as ir

    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _widened_type(kind: Any) -> Any:
    """``kind`` with float32 in the place of 16 bits, also inside sequences and optionals."""
    import onnx_ir as ir

    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        return type(kind)(_widened_type(kind.elem_type))
    if isinstance(kind, ir.TensorType) and kind.dtype.name in _HALVES:
        return ir.TensorType(ir.DataType.FLOAT)
    return kind


def _drop_casts(graph: ir.Graph, types: dict[str, str]) -> int:
    """Take out casts between widths (``types``: as they were); one that writes an output becomes an Identity."""
    import onnx_ir as ir

    dropped = 0
    for node in list(graph):
        if node.op_type != "Cast" or node.attributes["to"].as_int() != ir.DataType.FLOAT:
            continue
        source, output = node.inputs[0], node.outputs[0]
        if source is None or types.get(source.name or "") not in ("FLOAT", *_HALVES):
            continue
        dropped += 1
        if output.is_graph_output():
            node.op_type = "Identity"
            node.attributes.clear()
        else:
            ir.convenience.replace_all_uses_with(output, source)
            graph.remove(node, safe=True)
    return dropped
