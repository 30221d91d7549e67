"""Which outputs of a network hold class scores, so that their arg-max means something.

The shape alone does not tell: an embedding of 384 numbers looks like the scores of 384 classes. The graph does, by what
computes the output:

- Softmax or LogSoftmax over the last axis: a row of scores for each step, as of a text recogniser.
- A linear layer (Gemm, or MatMul with a constant), its bias and its scale: scores, unless the output's name says that
  it is something else.
- A convolution: scores where one place is left of the map, as of (samples, classes, 1, 1), or because it is of pooled
  values or pooled itself.

Anything else is none: a norm, a pool behind an activation (features), a sigmoid (boxes, maps), a concatenation.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from pipeline.core.operators import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.errors.graphs import Graph

__all__ = ["Scores", "class_scores", "judged_output", "score_kinds", "scores_of"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Scores: TypeAlias = Literal["none", "row", "rows"]
"""None; one row of class scores per sample; one or more."""

_OTHER_NAMES = re.compile(r"box|coord|embed|feature|hidden|keypoint|landmark|vector", re.IGNORECASE)
_SAME = frozenset({"Cast", "Dropout", "Identity", "QuantizeLinear", "DequantizeLinear"})
_MOVED = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SCALED = frozenset({"Add", "Div", "Mul", "Sub"})
_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax"})


def class_scores(values: Array, samples: int) -> Array | None:
    """``values`` as class scores of shape (samples, steps, classes), or None where they cannot be, by their shape.

    Scores are floating point of shape (samples, classes), (samples, steps, classes), or (samples, classes, 1, 1).
    """
    if values.dtype.kind != "f" or values.ndim < 2 or values.shape[0] != samples:
        return None
    if values.ndim > 3 and all(dim == 1 for dim in values.shape[2:]):
        values = values.reshape(samples, -1)
    if values.ndim > 3 or values.shape[-1] < 2:
        return None
    return values.reshape(samples, -1, values.shape[-1])


def scores_of(kind: Scores, values: Array, samples: int) -> Array | None:
    """As :func:`class_scores`, of an output of which the graph says ``kind``."""
    scores = None if kind == "none" else class_scores(values, samples)
    return None if scores is None or (kind == "row" and scores.shape[1] > 1) else scores


def judged_output(kinds: Mapping[str, Scores], arrays: Mapping[str, Array], samples: int) -> str | None:
    """The output that labels are about: the first with one row of class scores per sample, by the graph or, where that
    knows none, by its shape."""
    for known in (True, False):
        for name in kinds:
            kind: Scores = kinds[name] if known else "row"
            scores = scores_of(kind, arrays[name], samples)
            if scores is not None and scores.shape[1] == 1:
                return name
    return None


def score_kinds(graph: Graph, *, labelled: bool = False) -> dict[str, Scores]:
    """What each output of ``graph`` holds, in their order.

    Args:
        labelled: the user has labels, so that some output holds scores: where the graph knows none, the shape decides.
    """
    found = {name: _kind(graph, name) for name in graph.outputs}
    if labelled and all(kind == "none" for kind in found.values()):
        return dict.fromkeys(found, "row")
    return found


def _kind(graph: Graph, output: str) -> Scores:
    moved = False
    name = output
    while (node := graph.producers.get(name)) is not None:
        computed = _computed(graph, node)
        if node.op_type in _SAME | _MOVED or (node.op_type in _SCALED and len(computed) == 1):
            moved |= node.op_type in _MOVED
            name = computed[0] if computed else ""
            continue
        if node.op_type in ("Softmax", "LogSoftmax"):
            return _of_softmax(node, moved=moved)
        if _OTHER_NAMES.search(output):
            return "none"
        if node.op_type in ("Gemm", "MatMul") and computed == [node.input[0]]:
            return "row" if moved else "rows"
        if node.op_type in _POOLS:
            behind = graph.producers.get(_through(graph, node.input[0], _SAME))
            return "row" if behind is not None and behind.op_type == "Conv" else "none"
        if node.op_type == "Conv":
            pooled = graph.producers.get(_through(graph, node.input[0], _SAME | ACTIVATIONS | _SCALED | _MOVED))
            return "row" if not moved or (pooled is not None and pooled.op_type in _POOLS) else "none"
        return "none"
    return "none"


def _of_softmax(node: Any, *, moved: bool) -> Scores:
    """Over axis 1 they are scores where it is the last one; with axes moved behind it, where one row is left."""
    axis = next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), -1)
    if axis == 1 or (moved and axis != 0):
        return "row"
    return "none" if axis in (0, -2) else "rows"


def _computed(graph: Graph, node: Any) -> list[str]:
    """The inputs of ``node`` that depend on the network's."""
    return [name for name in node.input if name not in graph.constants]


def _through(graph: Graph, name: str, operators: frozenset[str]) -> str:
    """The tensor that ``operators`` of one computed input make ``name`` of."""
    while (node := graph.producers.get(name)) is not None and node.op_type in operators:
        computed = _computed(graph, node)
        if len(computed) != 1:
            break
        name = computed[0]
    return name
