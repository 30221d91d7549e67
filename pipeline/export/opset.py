"""Conversion of a model between opset versions, by rules about each operator and never by changing a number alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.export.downgrade import CannotConvert, downgrade
from pipeline.onnxgraph import infer_shapes, lift_constants, opset_of

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["LOWEST", "MAX_IR_VERSION", "PORTABLE", "CannotConvert", "convert", "lower_ir_version"]

LOWEST = 13
"""The first opset with per-channel QuantizeLinear."""
PORTABLE = 17
"""The newest opset that every TensorRT from 8.6 on reads."""
MAX_IR_VERSION = 9
_LARGE_BYTES = 1 << 16
_SOFTMAX_LIKE = ("Softmax", "LogSoftmax", "Hardmax")


def convert(model: ir.Model, target: int) -> ir.Model:
    """``model`` at opset ``target``; tensor names stay. May change ``model``, and may return it.

    Raises:
        CannotConvert: an operator has no equal in ``target``; every one is named.
    """
    version = opset_of(model)
    if version < target:
        return _upgraded(model, target)
    if version > target:
        downgrade(model, target)
    return model


def lower_ir_version(model: ir.Model) -> None:
    """Set an IR version of at most 9, after removing what only later ones have: metadata inside the graph."""
    if model.ir_version is not None and model.ir_version <= MAX_IR_VERSION:
        return
    strip_graph_metadata(model)
    model.ir_version = MAX_IR_VERSION


def strip_graph_metadata(model: ir.Model) -> None:
    """Remove metadata and documentation of graphs, nodes and values (the model's own metadata stays)."""
    from pipeline.onnxgraph import all_graphs

    for graph in all_graphs(model):
        graph.metadata_props.clear()
        graph.doc_string = None
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            value.metadata_props.clear()
            value.doc_string = None
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
                value.doc_string = None


def _upgraded(model: ir.Model, target: int) -> ir.Model:
    """By onnx's version converter, which gets the graph without its large weights."""
    import onnx.version_converter
    import onnx_ir as ir

    lift_constants(model)
    last_axis = _softmax_over_last_axis(model) if opset_of(model) < 13 else {}
    large = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > _LARGE_BYTES
    }
    stand_ins = [name for name in large if model.graph.initializers[name] not in model.graph.inputs]
    for name, tensor in large.items():
        value = model.graph.initializers.pop(name)
        value.shape, value.dtype, value.const_value = ir.Shape(tensor.shape.numpy()), tensor.dtype, None
        if name in stand_ins:
            model.graph.inputs.append(value)
    try:
        converted: ir.Model = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), target))
    except Exception as error:  # the converter raises RuntimeError, ValueError and its own ConvertError
        raise CannotConvert(model.graph.opset_imports[""], target, [_plain(error)]) from error
    inputs = {value.name: value for value in converted.graph.inputs}
    for name, tensor in large.items():
        value = inputs[name]
        value.const_value = tensor
        if name in stand_ins:
            converted.graph.inputs.remove(value)
        converted.graph.register_initializer(value)
    _restore_softmax(converted, last_axis)
    lift_constants(converted)
    return converted


def _plain(error: Exception) -> str:
    """The converter's own words, without the place in its C++ source."""
    return str(error).splitlines()[0].rpartition("failed: ")[2]


def _softmax_over_last_axis(model: ir.Model) -> dict[str, str]:
    """Output name -> input name of the softmax nodes whose axis is the last one.

    Before opset 13 softmax flattened its input from ``axis`` on. Over the last axis that is the same as since, but the
    converter does not know the rank and writes Flatten, Softmax and Reshape.
    """
    nodes = [node for node in model.graph if node.op_type in _SOFTMAX_LIKE and node.domain == ""]
    if not nodes:
        return {}
    infer_shapes(model)
    found = {}
    for node in nodes:
        value = node.inputs[0]
        axis = node.attributes.get_int("axis", 1)
        if value is not None and (axis == -1 or (value.shape is not None and axis == len(value.shape) - 1)):
            found[str(node.outputs[0].name)] = str(value.name)
    return found


def _restore_softmax(model: ir.Model, last_axis: dict[str, str]) -> None:
    """Put one softmax over the last axis back where the converter wrote three nodes."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    producers: dict[str, Any] = {str(value.name): node for node in model.graph for value in node.outputs}
    values = {str(value.name): value for value in model.graph.inputs}
    values.update({name: next(v for v in node.outputs if v.name == name) for name, node in producers.items()})
    for output, source in last_axis.items():
        reshape = producers[output]
        inner = reshape.inputs[0].producer() if reshape.op_type == "Reshape" else None
        if inner is None or inner.op_type not in _SOFTMAX_LIKE:
            continue
        old = reshape.outputs[0]
        node = ir.node(inner.op_type, [values[source]], {"axis": -1}, name=inner.name)
        new = node.outputs[0]
        new.name, new.shape, new.type = old.name, old.shape, old.type
        model.graph.insert_before(reshape, node)
        old.name = f"{output}_flattened"
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        # The inner node gives up its name to its successor.
        inner.name = None
    RemoveUnusedNodesPass()(model)
