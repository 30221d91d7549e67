"""Which node of one graph is which node of another graph of the same network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError
from pipeline.errors.graphs import QDQ

if TYPE_CHECKING:
    from pipeline.errors.graphs import Graph

__all__ = ["match_nodes"]

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Whose weights tell a network. Constants of element-wise operators do not: equalisation adds and widens some."""


def match_nodes(reference: Graph, other: Graph) -> dict[str, str]:
    """Node of ``other`` to node of ``reference``.

    By name where every operator with weights is found by it; otherwise the n-th node of an operator type, in graph
    order, is the n-th of that type, and the shapes of the weights must agree.

    Raises:
        InputError: the two are not the same network; the first difference is named.
    """
    ours, theirs = _computing(reference), _computing(other)
    names = {node.name for node in ours}
    weighted = [node for node in theirs if _weight_shape(other, node) is not None]
    if weighted and all(node.name in names for node in weighted):
        by_name = {node.name: node for node in ours}
        for node in weighted:
            _check_same(reference, by_name[node.name], other, node)
        return {node.name: node.name for node in theirs if node.name in names}
    matched: dict[str, str] = {}
    for op in dict.fromkeys(node.op_type for node in theirs):
        first = [node for node in ours if node.op_type == op]
        second = [node for node in theirs if node.op_type == op]
        has_weights = any(_weight_shape(other, node) is not None for node in second)
        if len(first) != len(second):
            if has_weights:
                raise InputError(
                    f"not the same network: {len(first)} nodes of type {op} with weights against {len(second)}",
                    remedy="export both from the same network, with BatchNorm folded in both",
                )
            continue  # helper operators may differ; what they feed is matched by its own type
        for ours_node, theirs_node in zip(first, second, strict=True):
            if has_weights:
                _check_same(reference, ours_node, other, theirs_node)
            matched[theirs_node.name] = ours_node.name
    return matched


def _computing(graph: Graph) -> list[Any]:
    return [node for node in graph.nodes if node.op_type not in QDQ and node.op_type != "Constant"]


def _weight_shape(graph: Graph, node: Any) -> tuple[int, ...] | None:
    """Shape of a matrix operator's first constant of rank two or more, also behind Q/DQ nodes."""
    if node.op_type not in _WEIGHTED:
        return None
    for name in node.input:
        source, turned = name, False
        while source in graph.producers and graph.producers[source].op_type in (*QDQ, "Transpose"):
            turned ^= graph.producers[source].op_type == "Transpose"
            source = graph.producers[source].input[0]
        values = graph.shape(source)
        if values is not None and len(values) >= 2:
            return values[::-1] if turned and len(values) == 2 else values
    return None


def _check_same(reference: Graph, ours: Any, other: Graph, theirs: Any) -> None:
    first, second = _weight_shape(reference, ours), _weight_shape(other, theirs)
    if ours.op_type != theirs.op_type or first != second:
        raise InputError(
            f"not the same network: {ours.op_type} {ours.name!r} with weights {first} against "
            f"{theirs.op_type} {theirs.name!r} with {second}",
            remedy="export both from the same network, with BatchNorm folded in both",
        )
