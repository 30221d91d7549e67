"""Q/DQ nodes as tools write them, brought into the form that TensorRT fuses. Every rewrite keeps every bit.

They come before the checks: what they mend is no fault any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.onnxgraph import explicit_output_types
from pipeline.placement.given_edit import along, axis_of
from pipeline.placement.given_tables import dequantise_tables
from pipeline.placement.ops import QUANTIZERS

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.given_edit import Edit

__all__ = ["CONTRIB", "rewrite_given"]

CONTRIB = tuple(f"com.microsoft::{op}" for op in QUANTIZERS)
"""onnxruntime's own names for the two operators (its option UseQDQContribOps, and models of before opset 21)."""


def rewrite_given(edit: Edit) -> None:
    """Apply every rewrite to the model under repair."""
    standard = (_standard_domain, _zero_points, _merge_equal)
    for rewrite in (*standard, dequantise_tables, _clip_before, _transpose_constants):
        rewrite(edit)
        edit.refresh()


def _standard_domain(edit: Edit) -> None:
    for node in edit.graph.nodes:
        if edit.graph.op(node) in CONTRIB:
            node.domain = ""
            edit.note("QuantizeLinear and DequantizeLinear of com.microsoft became ONNX's own (the same steps)", node)


def _zero_points(edit: Edit) -> None:
    for node in explicit_output_types(edit.graph.model):
        edit.note("the type in the attribute output_dtype was written as a zero point of 0 (the same steps)", node)


def _merge_equal(edit: Edit) -> None:
    """One pair per tensor: TensorRT quantises once for each Q that it finds."""
    graph = edit.graph
    seen: dict[tuple[Any, ...], ir.Node] = {}
    for node in graph.nodes:
        parameters = [graph.array(value) for value in node.inputs[1:]]
        between = graph.op(node) == "Clip" and graph.producer(node.inputs[0], "QuantizeLinear") is not None
        if not (between or graph.op(node) in QUANTIZERS) or any(array is None for array in parameters):
            continue
        axis = node.attributes.get("axis")
        numbers = tuple((a.dtype.str, a.shape, a.tobytes()) for a in parameters if a is not None)
        key = (graph.op(node), id(node.inputs[0]), numbers, None if axis is None else axis.as_int())
        first = seen.setdefault(key, node)
        if first is node or node.outputs[0].is_graph_output():
            continue
        edit.replace(node.outputs[0], first.outputs[0])
        edit.remove_unread(node)
        if graph.op(node) == "QuantizeLinear":
            edit.note("a second QuantizeLinear of the same tensor with the same scale was merged into the first", node)


def _clip_before(edit: Edit) -> None:
    """Q, Clip, DQ (fewer than 256 steps: Brevitas, torch's reduced ranges) becomes Clip, Q, DQ.

    No TensorRT has an INT8 Clip; a float one in front of Q is part of the kernel before it, and one of constants is
    done here. Rounding is monotonic and ``(k * scale) / scale`` rounds to k, so that the steps are the same. Where the
    steps that are left fit int8 about a zero point of 0, so they are written, whatever the type was.
    """
    import onnx_ir as ir

    graph = edit.graph
    for clip in graph.nodes:
        quantizer = graph.producer(clip.inputs[0], "QuantizeLinear") if graph.op(clip) == "Clip" else None
        if quantizer is None or graph.only_reader(quantizer.outputs[0]) is not clip:
            continue
        followers = list(graph.downstream(clip.outputs[0]))
        if clip.outputs[0].is_graph_output() or any(graph.op(node) != "DequantizeLinear" for node in followers):
            continue
        steps, scale = _steps(edit, quantizer, clip), graph.array(quantizer.inputs[1])
        if steps is None or scale is None or not _clip_source(edit, quantizer, clip, steps, scale):
            continue
        edit.replace(clip.outputs[0], quantizer.outputs[0])
        edit.remove_unread(clip)
        quantizer.outputs[0].type = ir.TensorType(ir.DataType.INT8)
        for node in (quantizer, *followers):
            edit.set_zero(node, scale)
        edit.note("a Clip between Q and DQ became a float Clip in front of Q (the same steps)", clip)


def _clip_source(
    edit: Edit, quantizer: ir.Node, clip: ir.Node, steps: tuple[int, int], scale: np.ndarray[Any, Any]
) -> bool:
    """Limit what ``quantizer`` reads to ``steps``; False where it has a scale per channel and is no constant."""
    import onnx_ir as ir

    graph, source = edit.graph, quantizer.inputs[0]
    values = graph.array(source)
    name = f"{quantizer.outputs[0].name}_clipped"
    low, high = ((step * scale).astype(scale.dtype) for step in steps)
    if source is None or (values is None and scale.size > 1):
        return False
    if values is not None:
        axis = axis_of(graph, quantizer, scale)
        if axis is None:
            return False
        limited = np.clip(values, along(low, axis, values.ndim), along(high, axis, values.ndim))
        quantizer.replace_input_with(0, edit.constant(name, limited.astype(values.dtype)))
        return True
    bounds = [edit.constant(f"{name}_{end}", bound.reshape(())) for end, bound in (("min", low), ("max", high))]
    before = ir.node("Clip", [source, *bounds], name=f"{clip.name}_before")
    before.outputs[0].name, before.outputs[0].shape, before.outputs[0].type = name, source.shape, source.type
    graph.model.graph.insert_before(quantizer, before)
    quantizer.replace_input_with(0, before.outputs[0])
    return True


def _steps(edit: Edit, quantizer: ir.Node, clip: ir.Node) -> tuple[int, int] | None:
    """Least and greatest step about the zero point that Q and Clip leave, where int8 holds them."""
    found = [edit.graph.array(value) for value in clip.inputs[1:3]]
    zero = edit.graph.array(quantizer.inputs[2]) if len(quantizer.inputs) > 2 else np.zeros((), np.uint8)
    if zero is None or zero.dtype not in (np.int8, np.uint8) or any(array is None for array in found):
        return None
    if np.ptp(zero):
        return None
    limits = [int(array.reshape(-1)[0]) for array in found if array is not None]
    info, shift = np.iinfo(zero.dtype), int(zero.reshape(-1)[0])
    low = max(info.min, limits[0] if limits else info.min) - shift
    high = min(info.max, limits[1] if len(limits) > 1 else info.max) - shift
    return (low, high) if -128 <= low <= high <= 127 else None


def _transpose_constants(edit: Edit) -> None:
    """Constant, (Q,) DQ, Transpose (torch's Linear on more than two dimensions) becomes a constant that is transposed.

    TensorRT then finds the pair next to the product, and the axis of the scales is the one of its output channels.
    """
    import onnx_ir as ir

    graph = edit.graph
    for node in graph.nodes:
        if graph.op(node) != "Transpose" or node.outputs[0].is_graph_output():
            continue
        dq = graph.producer(node.inputs[0], "DequantizeLinear")
        if dq is None:
            continue
        q = graph.producer(dq.inputs[0], "QuantizeLinear")
        values, scale = graph.array((dq if q is None else q).inputs[0]), graph.array(dq.inputs[1])
        axis = None if scale is None else axis_of(graph, dq, scale)
        if values is None or scale is None or axis is None:
            continue
        if len(node.inputs[0].uses()) > 1 or (q is not None and len(q.outputs[0].uses()) > 1):  # type: ignore[union-attr]
            q, dq = _copied(edit, q, dq, node)
        first = dq if q is None else q
        permutation = node.attributes.get_ints("perm", list(reversed(range(values.ndim))))
        root = first.inputs[0]
        turned = np.ascontiguousarray(values.transpose(permutation))
        first.replace_input_with(0, edit.constant(f"{root.name if root else ''}_transposed", turned))
        for each in (first, dq):
            if scale.size > 1:
                each.attributes["axis"] = ir.AttrInt64("axis", list(permutation).index(axis))
            each.outputs[0].shape = ir.Shape(turned.shape)
        edit.replace(node.outputs[0], dq.outputs[0])
        edit.remove_unread(node)
        edit.note("quantised weights behind a Transpose were stored transposed", node)


def _copied(edit: Edit, q: ir.Node | None, dq: ir.Node, before: ir.Node) -> tuple[ir.Node | None, ir.Node]:
    """The pair once more, for the node ``before`` alone: others read the one that is there."""
    import onnx_ir as ir

    copies: list[ir.Node] = []
    for node in (dq,) if q is None else (q, dq):
        source = copies[-1].outputs[0] if copies else node.inputs[0]
        inputs = [source, *node.inputs[1:]]
        copy = ir.node(node.op_type, inputs, dict(node.attributes), name=f"{node.name}_{before.name}")
        copy.outputs[0].name, copy.outputs[0].type = f"{node.outputs[0].name}_{before.name}", node.outputs[0].type
        edit.graph.model.graph.insert_before(before, copy)
        copies.append(copy)
    before.replace_input_with(0, copies[-1].outputs[0])
    return (None if q is None else copies[0]), copies[-1]
