"""Unique node names that stay the same from run to run."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pipeline.onnxgraph import all_graphs

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["name_nodes"]


def name_nodes(model: ir.Model) -> list[str]:
    """Name what has no name ``<operator>_<count>`` in graph order, and number a name that comes again.

    The first node with a name keeps it. Nodes of inner graphs count as well.

    Returns:
        The new names.
    """
    nodes = [node for graph in all_graphs(model) for node in graph]
    taken = {node.name for node in nodes if node.name}
    seen: set[str] = set()
    counts: defaultdict[str, int] = defaultdict(int)
    given = []
    for node in nodes:
        if node.name and node.name not in seen:
            seen.add(node.name)
            continue
        stem = node.name or node.op_type
        while (name := f"{stem}_{counts[stem]}") in taken:
            counts[stem] += 1
        node.name = name
        taken.add(name)
        seen.add(name)
        given.append(name)
    return given
