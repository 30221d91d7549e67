"""Which nodes the user means: names, shell patterns and operator types of ``include`` and ``exclude``."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.placement.ops import INCLUDABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["select"]

_NAME, _PATTERN, _OPERATOR = 3, 2, 1
_SHOWN = 3


def select(
    graph: GraphView, include: Sequence[str], exclude: Sequence[str]
) -> tuple[frozenset[ir.Node], frozenset[ir.Node]]:
    """The nodes to force into INT8 and the nodes to leave float.

    An entry is a node name, else a shell pattern for names (``*``, ``?``, ``[...]``), else an operator type. Where a
    node is in both lists, the more specific entry wins: a name before a pattern before an operator.

    Raises:
        InputError: an entry matches nothing; an include asks for an operator without INT8 form; equally specific
        entries
            of both lists meet in a node.
    """
    wanted: dict[ir.Node, tuple[int, str]] = {}
    for entry in include:
        nodes, kind = _matches(graph, entry, "include")
        able = [node for node in nodes if graph.op(node) in INCLUDABLE]
        if not able:
            raise InputError(
                f"include {entry!r} asks for {graph.op(nodes[0])} node {nodes[0].name!r}, which TensorRT does not "
                f"run on INT8 inputs",
                remedy=f"operators that can be included: {', '.join(INCLUDABLE)}",
            )
        _note(wanted, able, kind, entry)
    unwanted: dict[ir.Node, tuple[int, str]] = {}
    for entry in exclude:
        nodes, kind = _matches(graph, entry, "exclude")
        _note(unwanted, nodes, kind, entry)
    for node in wanted.keys() & unwanted.keys():
        if wanted[node][0] == unwanted[node][0]:
            raise InputError(
                f"node {node.name!r} is both included by {wanted[node][1]!r} and excluded by {unwanted[node][1]!r}",
                remedy="make one of the two more specific: a node name wins over a pattern, a pattern over an operator",
            )
    forced = frozenset(node for node, (kind, _) in wanted.items() if kind > unwanted.get(node, (0, ""))[0])
    return forced, frozenset(unwanted.keys() - forced)


def _note(chosen: dict[ir.Node, tuple[int, str]], nodes: Sequence[ir.Node], kind: int, entry: str) -> None:
    for node in nodes:
        if kind > chosen.get(node, (0, ""))[0]:
            chosen[node] = (kind, entry)


def _matches(graph: GraphView, entry: str, option: str) -> tuple[list[ir.Node], int]:
    if entry in graph.by_name:
        return [graph.by_name[entry]], _NAME
    if nodes := [node for node in graph.nodes if fnmatchcase(node.name or "", entry)]:
        return nodes, _PATTERN
    if nodes := [node for node in graph.nodes if graph.op(node) == entry]:
        return nodes, _OPERATOR
    operators = sorted({graph.op(node) for node in graph.nodes})
    near = get_close_matches(entry, [*graph.by_name, *operators], n=_SHOWN, cutoff=0.4)
    nearest = f"; nearest: {', '.join(map(repr, near))}" if near else ""
    raise InputError(
        f"{option} {entry!r} is no node name, pattern or operator of this graph{nearest}",
        remedy=f"operators of this graph: {', '.join(operators)}; `quantize explain` lists the nodes",
    )
