"""Questions to, and plain edits of, an ONNX graph held in onnx-ir."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pipeline.records import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    import numpy as np
    import onnx_ir as ir

__all__ = [
    "add_initializer",
    "all_graphs",
    "clear_meaningless_dimensions",
    "drop_unused_initializers",
    "explicit_output_types",
    "fresh_name",
    "infer_shapes",
    "lift_constants",
    "opset_of",
    "tensor_specs",
    "weight_bytes",
]

_MOST_RESHAPE_ROUNDS = 50
_UNKNOWN = re.compile(r"\?|unk__\d+")


def all_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and every graph inside a node's attribute, outer ones first."""
    pending: list[ir.Graph] = [model.graph]
    while pending:
        graph = pending.pop(0)
        yield graph
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type.name == "GRAPH":
                    pending.append(attribute.as_graph())
                elif attribute.type.name == "GRAPHS":
                    pending.extend(attribute.as_graphs())


def lift_constants(model: ir.Model) -> None:
    """Turn every Constant node of the main graph into an initializer, in place; tensor names stay."""
    from onnx_ir.passes.common import LiftConstantsToInitializersPass

    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def drop_unused_initializers(model: ir.Model) -> None:
    """Take out, in place, every initializer that no node reads and that is no output of its graph."""
    for graph in all_graphs(model):
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del graph.initializers[name]


def fresh_name(name: str, taken: Container[str | None]) -> str:
    """``name``, or ``name_1``, ``name_2`` ... where that is taken."""
    result, number = name, 1
    while result in taken:
        result, number = f"{name}_{number}", number + 1
    return result


def add_initializer(
    graph: ir.Graph, name: str, array: np.ndarray[Any, np.dtype[Any]], taken: Container[str | None]
) -> ir.Value:
    """A new initializer of ``graph`` under :func:`fresh_name`."""
    import onnx_ir as ir

    fresh = fresh_name(name, taken)
    tensor = ir.tensor(array, name=fresh)
    value = ir.Value(name=fresh, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def explicit_output_types(model: ir.Model) -> list[ir.Node]:
    """Give every QuantizeLinear with ``output_dtype`` (opset 21) a zero point of that type instead, in place.

    The two say the same; opset 20 and before, and TensorRT, have the zero point only. Nodes whose scale has no static
    shape stay as they are.

    Returns:
        The nodes that had no zero point.
    """
    import numpy as np
    import onnx_ir as ir

    changed = []
    for graph in all_graphs(model):
        taken = {value.name for node in graph for value in (*node.inputs, *node.outputs) if value is not None}
        for node in graph:
            attribute = node.attributes.get("output_dtype") if node.op_type == "QuantizeLinear" else None
            scale = node.inputs[1] if len(node.inputs) > 1 else None
            if attribute is None or not attribute.as_int() or scale is None:
                continue
            if len(node.inputs) < 3 or node.inputs[2] is None:
                if scale.shape is None or not scale.shape.is_static():
                    continue
                name = f"{node.outputs[0].name}_zero_point"
                while name in taken:
                    name += "_0"
                taken.add(name)
                dtype = ir.DataType(attribute.as_int())
                tensor = ir.tensor(np.zeros(scale.shape.numpy(), dtype.numpy()), dtype=dtype, name=name)
                zero = ir.Value(name=name, shape=ir.Shape(scale.shape), type=ir.TensorType(dtype), const_value=tensor)
                graph.register_initializer(zero)
                node.resize_inputs(3)
                node.replace_input_with(2, zero)
                changed.append(node)
            del node.attributes["output_dtype"]
    return changed


def infer_shapes(model: ir.Model) -> None:
    """Shape inference in place, and the rank of a Reshape whose target is computed but has a known length."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    infer = ShapeInferencePass(check_type=False, strict_mode=False)
    infer(model)
    for _ in range(_MOST_RESHAPE_ROUNDS):
        # One at a time: a rank that becomes known lets inference go on to the next Reshape by itself.
        target = next((node for node in model.graph if _rankless_reshape(node)), None)
        if target is None:
            return
        length = _target_length(target)
        target.outputs[0].shape = ir.Shape([None] * (length or 0))
        infer(model)


def _rankless_reshape(node: ir.Node) -> bool:
    return node.op_type == "Reshape" and node.outputs[0].shape is None and _target_length(node) is not None


def _target_length(node: ir.Node) -> int | None:
    target = node.inputs[1] if len(node.inputs) > 1 else None
    length = target.shape[0] if target is not None and target.shape is not None and len(target.shape) == 1 else None
    return length if isinstance(length, int) else None


def clear_meaningless_dimensions(model: ir.Model) -> None:
    """Make dimensions unknown that only stand for it: -1, 0, ``?`` and the ``unk__<n>`` of onnx's shape inference."""
    import onnx_ir as ir

    for graph in all_graphs(model):
        for value in (*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)):
            if value.shape is None:
                continue
            dims = [
                (dim if dim > 0 else None)
                if isinstance(dim, int)
                else (None if _UNKNOWN.fullmatch(dim.value or "") else dim)
                for dim in value.shape
            ]
            if dims != list(value.shape):
                value.shape = ir.Shape(dims)


def opset_of(model: ir.Model) -> int:
    """Version of the default operator domain."""
    return int(model.graph.opset_imports[""])


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return sum(
        value.const_value.nbytes
        for graph in all_graphs(model)
        for value in graph.initializers.values()
        if value.const_value is not None
    )


def tensor_specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """Graph inputs or outputs as records; a dimension that is no positive number and has no name becomes ``"?"``."""
    return tuple(
        TensorSpec(
            name=str(value.name),
            dtype="unknown" if value.dtype is None else _numpy_name(value.dtype),
            shape=None if value.shape is None else tuple(_dimension(dim) for dim in value.shape),
        )
        for value in values
    )


def _numpy_name(dtype: ir.DataType) -> str:
    try:
        return str(dtype.numpy().name)
    except TypeError:
        return dtype.name.lower()


def _dimension(dim: Any) -> int | str:
    if isinstance(dim, int):
        return dim if dim > 0 else "?"
    return str(dim.value) if dim.value else "?"
