"""Shape arithmetic with one answer: ``Shape``, ``Gather``, ``Concat`` ... that depend on static dimensions only.

A tensor of whole numbers is followed element by element, each known or not: the shape of an N x 3 x 224 x 224 tensor is
(?, 3, 224, 224), and element 2 of it is 224 whatever N is. A tensor all of whose elements are known becomes a constant,
and so does the target of a Reshape with one unknown element: -1 there means the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.prepare.constants import constant, new_initializer, replace_by_constant

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

__all__ = ["Partial", "fold_static_shapes"]

_MOST_ELEMENTS = 64
_INTEGERS = ("INT64", "INT32")
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Partial:
    """Whole numbers of rank 0 or 1, of which some are known."""

    values: Integers
    known: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def complete(self) -> bool:
        return bool(self.known.all())


def fold_static_shapes(model: ir.Model) -> list[str]:
    """Returns the names of the tensors that are constants now, new ones included."""
    found: dict[int, Partial] = {}
    folded = []
    for node in list(model.graph):
        if node.domain != "" or len(node.outputs) != 1:
            continue
        if node.op_type == "Reshape" and _fix_target(model.graph, node, found):
            folded.append(f"target of {node.name}")
        rule = _RULES.get(node.op_type)
        result = rule(node, [_partial(value, found) for value in node.inputs]) if rule is not None else None
        output = node.outputs[0]
        if result is None or output.dtype is None or output.dtype.name not in _INTEGERS:
            continue
        found[id(output)] = result
        if result.complete and not output.is_graph_output():
            folded.append(str(output.name))
            replace_by_constant(model.graph, node, result.values.astype(output.dtype.numpy()))
    return folded


def _partial(value: ir.Value | None, found: dict[int, Partial]) -> Partial | None:
    if value is None:
        return None
    if id(value) in found:
        return found[id(value)]
    array = constant(value)
    if array is None or array.ndim > 1 or array.size > _MOST_ELEMENTS or array.dtype.kind != "i":
        return None
    return Partial(array.astype(np.int64), np.ones(array.shape, bool))


def _fix_target(graph: ir.Graph, node: ir.Node, found: dict[int, Partial]) -> bool:
    """Give a Reshape a constant target where only one element of it is unknown."""
    target = node.inputs[1]
    partial = found.get(id(target))
    if target is None or partial is None or target.producer() is None or (~partial.known).sum() != 1:
        return False
    # -1 may stand once only; 0 would copy a dimension.
    if np.any(partial.values[partial.known] <= 0):
        return False
    values = np.where(partial.known, partial.values, -1)
    node.replace_input_with(1, new_initializer(graph, values, f"{target.name}_target"))
    return True


def _shape(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    dims = list(value.shape)[node.attributes.get_int("start", 0) :]
    end = node.attributes.get("end")
    if end is not None:
        dims = list(value.shape)[node.attributes.get_int("start", 0) : end.as_int()]
    known = np.array([isinstance(dim, int) for dim in dims], bool)
    return Partial(np.array([dim if isinstance(dim, int) else 0 for dim in dims], np.int64), known)


def _gather(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
    data, indices = inputs
    if data is None or indices is None or not indices.complete or data.values.ndim != 1:
        return None
    if np.any(indices.values >= data.values.size) or np.any(indices.values < -data.values.size):
        return None
    return Partial(np.asarray(data.values[indices.values]), np.asarray(data.known[indices.values]))


def _slice(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
    data, bounds = inputs[0], inputs[1:]
    if data is None or data.values.ndim != 1 or any(item is None or not item.complete for item in bounds):
        return None
    numbers = [int(item.values.ravel()[0]) for item in bounds if item is not None and item.values.size == 1]
    if len(numbers) != len(bounds):
        return None
    start, end = numbers[:2]
    step = numbers[3] if len(numbers) > 3 else 1
    if step <= 0:
        return None
    part = slice(start, end, step)
    return Partial(data.values[part], data.known[part])


def _concat(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
    parts = [item for item in inputs if item is not None and item.values.ndim == 1]
    if len(parts) != len(inputs):
        return None
    return Partial(np.concatenate([item.values for item in parts]), np.concatenate([item.known for item in parts]))


def _unsqueeze(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
    data = inputs[0]
    if data is None or data.values.ndim:
        return None
    return Partial(data.values.reshape(1), data.known.reshape(1))


def _squeeze(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
    data = inputs[0]
    if data is None or data.values.shape != (1,):
        return None
    return Partial(data.values.reshape(()), data.known.reshape(()))


def _same(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
    return inputs[0]


def _elementwise(operation: Callable[[Integers, Integers], Integers]) -> Callable[..., Partial | None]:
    def rule(node: ir.Node, inputs: list[Partial | None]) -> Partial | None:
        first, second = inputs
        if first is None or second is None:
            return None
        known = np.asarray(first.known & second.known)
        # Where an operand is unknown, ones keep the operation defined; the result there is unknown anyway.
        a, b = np.where(first.known, first.values, 1), np.where(second.known, second.values, 1)
        if operation is _divide and np.any(b == 0):
            return None
        return Partial(np.asarray(operation(a, b), np.int64), known)

    return rule


def _divide(a: Integers, b: Integers) -> Integers:
    """Whole-number division towards zero, as ONNX has it."""
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), np.int64)


_RULES: dict[str, Callable[..., Partial | None]] = {
    "Add": _elementwise(np.add),
    "Cast": _same,
    "Concat": _concat,
    "Div": _elementwise(_divide),
    "Gather": _gather,
    "Identity": _same,
    "Mul": _elementwise(np.multiply),
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(np.subtract),
    "Unsqueeze": _unsqueeze,
}
