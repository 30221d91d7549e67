"""From a newer opset down to 17 (or another of 13 and more), operator by operator.

An operator is carried over in one of three ways:

1. its definition is the same in both versions, or differs only in the types it allows;
2. it has new attributes, all of which stand at values that mean the old behaviour: they are dropped;
3. it has a rule here, which rewrites it into operators of the old version.

Anything else is an error that names every such node. The new definitions are those of onnx's own schemas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.export.decompose import DECOMPOSED, decompose
from pipeline.onnxgraph import all_graphs, explicit_output_types, lift_constants, opset_of

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["CannotConvert", "downgrade"]


class CannotConvert(Exception):
    """No equal model exists in the target opset, or none that the rules know."""

    def __init__(self, version: int, target: int, reasons: list[str]) -> None:
        super().__init__(f"opset {version} cannot become {target}: " + "; ".join(reasons))
        self.reasons = reasons


class _Refused(Exception):
    """A rule does not apply to a node; the text says why."""


Rule: TypeAlias = Callable[["ir.Node", "ir.Graph"], None]


def downgrade(model: ir.Model, target: int) -> None:
    """Rewrite ``model`` to opset ``target`` in place.

    Raises:
        CannotConvert: with the reason for every node that has no equal; ``model`` may have been changed by then.
    """
    import onnx

    version = opset_of(model)
    lift_constants(model)
    explicit_output_types(model)
    reasons = []
    for graph in all_graphs(model):
        for node in list(graph):
            if node.domain not in ("", "ai.onnx"):
                continue
            try:
                _lower(node, graph, version, target)
            except _Refused as error:
                reasons.append(f"{node.op_type} {node.name!r}: {error}")
            except onnx.defs.SchemaError:
                reasons.append(f"{node.op_type} {node.name!r}: opset {target} has no such operator")
    if reasons:
        raise CannotConvert(version, target, reasons)
    for graph in all_graphs(model):
        graph.opset_imports[""] = target
    for function in model.functions.values():
        if "" in function.opset_imports:
            raise CannotConvert(version, target, [f"function {function.name!r} is not inlined"])


def _lower(node: ir.Node, graph: ir.Graph, version: int, target: int) -> None:
    import onnx

    new = onnx.defs.get_schema(node.op_type, version, "")
    rule = _RULES.get(node.op_type)
    if rule is not None and new.since_version > target:
        rule(node, graph)
        return
    if node.op_type in DECOMPOSED and new.since_version > target:
        if (reason := decompose(node, graph, version, target)) is not None:
            raise _Refused(reason)
        return
    old = onnx.defs.get_schema(node.op_type, target, "")
    if new.since_version == old.since_version:
        return
    if len(node.inputs) > len(old.inputs) and not _variadic(old):
        raise _Refused(f"the input {new.inputs[len(old.inputs)].name!r} is new since opset {target}")
    for name in [name for name in node.attributes if name not in old.attributes]:
        _drop_default(node, name, new)
    _check_types(node, old)


def _variadic(schema: Any) -> bool:
    return bool(schema.inputs) and schema.inputs[-1].option.name == "Variadic"


_OLD_BEHAVIOUR: dict[str, object] = {
    "saturate": 1, "round_mode": "up", "block_size": 0, "output_dtype": 0, "precision": 0, "dilations": None,
    "antialias": 0, "keep_aspect_ratio_policy": "stretch", "stash_type": 1, "ceil_mode": 0,
}  # fmt: skip
"""New attributes and the value at which they change nothing; ``dilations`` must be all ones."""


def _drop_default(node: ir.Node, name: str, schema: Any) -> None:
    value = node.attributes[name].value
    value = list(value) if isinstance(value, (list, tuple)) else value
    neutral = _OLD_BEHAVIOUR.get(name, schema)  # schema: equal to no attribute
    if value == neutral or (name == "dilations" and isinstance(value, list) and set(value) == {1}):
        del node.attributes[name]
        return
    raise _Refused(f"the attribute {name}={value!r} has no equal in the older opset")


def _check_types(node: ir.Node, old: Any) -> None:
    """A type that the old definition does not allow, such as bfloat16, must not slip through."""
    allowed = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in old.type_constraints}
    for values, parameters in ((node.inputs, old.inputs), (node.outputs, old.outputs)):
        for position, value in enumerate(values):
            if value is None or value.dtype is None or not parameters:
                continue
            parameter = parameters[min(position, len(parameters) - 1)]
            types = allowed.get(parameter.type_str, {parameter.type_str})
            text = f"tensor({_onnx_type(value.dtype.name)})"
            if text not in types and not any(item.startswith(("seq", "optional")) for item in types):
                raise _Refused(f"the older opset does not allow {text} for {parameter.name!r}")


def _onnx_type(name: str) -> str:
    return {"FLOAT": "float", "DOUBLE": "double"}.get(name, name.lower())


def _constant(value: ir.Value | None, what: str) -> np.ndarray[Any, np.dtype[Any]] | None:
    """The constant behind an optional input.

    Raises:
        _Refused: it is computed in the graph.
    """
    if value is None:
        return None
    tensor = value.const_value
    if tensor is None:
        raise _Refused(f"{what} {value.name!r} is no constant")
    return tensor.numpy()


def _rank(value: ir.Value | None) -> int:
    if value is None or value.shape is None:
        raise _Refused("the rank of its input is unknown")
    return len(value.shape)


def _reduce(node: ir.Node, graph: ir.Graph) -> None:
    """18: axes became an input, with ``noop_with_empty_axes``."""
    import onnx_ir as ir

    axes = _constant(node.inputs[1], "axes") if len(node.inputs) > 1 else None
    if node.attributes.get_int("noop_with_empty_axes", 0) and (axes is None or not axes.size):
        raise _Refused("noop_with_empty_axes=1 without axes")
    node.attributes.pop("noop_with_empty_axes", None)
    if axes is not None and axes.size:
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in axes.ravel()])
    node.resize_inputs(1)
    if (
        node.op_type in ("ReduceMax", "ReduceMin")
        and node.inputs[0] is not None
        and node.inputs[0].dtype == ir.DataType.BOOL
    ):
        raise _Refused("a reduction of booleans")


def _pad(node: ir.Node, graph: ir.Graph) -> None:
    """18: an input with the axes that ``pads`` is about; 19: mode wrap."""
    if node.attributes.get_string("mode", "constant") == "wrap":
        raise _Refused("mode wrap")
    axes = _constant(node.inputs[3], "axes") if len(node.inputs) > 3 else None
    if axes is not None:
        pads, rank = _constant(node.inputs[1], "pads"), _rank(node.inputs[0])
        full = np.zeros((2, rank), dtype=np.int64)
        full[:, axes.ravel() % rank] = np.asarray(pads, dtype=np.int64).reshape(2, -1)
        node.replace_input_with(1, _initializer(graph, f"{node.outputs[0].name}_pads", full.ravel()))
    if len(node.inputs) > 3:
        node.resize_inputs(3)


def _resize(node: ir.Node, graph: ir.Graph) -> None:
    """18: antialias, and ``axes`` that ``scales`` or ``sizes`` are about; 19: half_pixel_symmetric and more."""
    if node.attributes.get_int("antialias", 0):
        raise _Refused("antialias=1")
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise _Refused("keep_aspect_ratio_policy")
    if node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "half_pixel_symmetric":
        raise _Refused("coordinate_transformation_mode half_pixel_symmetric")
    if "axes" in node.attributes:
        rank = _rank(node.inputs[0])
        axes = [axis % rank for axis in node.attributes.get_ints("axes", ())]
        if axes != list(range(rank)):
            _resize_all_axes(node, graph, axes, rank)
    for name in ("antialias", "keep_aspect_ratio_policy", "axes"):
        node.attributes.pop(name, None)


def _resize_all_axes(node: ir.Node, graph: ir.Graph, axes: list[int], rank: int) -> None:
    scales = _constant(node.inputs[2], "scales") if len(node.inputs) > 2 else None
    if scales is None or not scales.size:
        raise _Refused("axes together with sizes")
    full = np.ones(rank, dtype=np.float32)
    full[axes] = scales
    node.replace_input_with(2, _initializer(graph, f"{node.outputs[0].name}_scales", full))


def _split(node: ir.Node, graph: ir.Graph) -> None:
    """18: ``num_outputs``, whose last part may be smaller."""
    count = node.attributes.pop("num_outputs", None)
    if count is None:
        return
    value = node.inputs[0]
    axis = node.attributes.get_int("axis", 0)
    size = None if value is None or value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise _Refused(f"num_outputs of the dynamic axis {axis}")
    number = len(node.outputs)
    part = math.ceil(size / number)
    parts = np.array([part] * (number - 1) + [size - part * (number - 1)], dtype=np.int64)
    node.resize_inputs(2)
    node.replace_input_with(1, _initializer(graph, f"{node.outputs[0].name}_split", parts))


def _scatter(node: ir.Node, graph: ir.Graph) -> None:
    """18: reductions min and max."""
    if (reduction := node.attributes.get_string("reduction", "none")) in ("min", "max"):
        raise _Refused(f"reduction {reduction}")


def _grid_sample(node: ir.Node, graph: ir.Graph) -> None:
    """20: modes renamed, and 5-D input."""
    import onnx_ir as ir

    if _rank(node.inputs[0]) != 4:
        raise _Refused("an input that is not 4-D")
    mode = node.attributes.get_string("mode", "linear")
    node.attributes["mode"] = ir.AttrString("mode", {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))


def _dft(node: ir.Node, graph: ir.Graph) -> None:
    """20: the axis became an input, with another default."""
    raise _Refused("its axis is an input")


def _initializer(graph: ir.Graph, name: str, array: np.ndarray[Any, np.dtype[Any]]) -> ir.Value:
    import onnx_ir as ir

    while name in graph.initializers:
        name += "_"
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
    value.dtype = ir.DataType.from_numpy(array.dtype)
    graph.register_initializer(value)
    return value


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
            "ReduceProd", "ReduceSumSquare",
        ),
        _reduce,
    ),
    "DFT": _dft,
    "GridSample": _grid_sample,
    "Pad": _pad,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Split": _split,
}  # fmt: skip
