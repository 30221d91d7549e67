"""Unique node names that stay the same from run to run, and names that fit into one line of a text file."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.onnxgraph import all_graphs

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["name_nodes", "one_line_names"]

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def one_line_names(model: ir.Model) -> list[str]:
    """Write ``_`` for each control character in the names of tensors: a calibration cache has a line for each.

    Returns:
        The new names.

    Raises:
        InputError: the name of a graph input or output has one; users of the model know it by that name.
    """
    graph = model.graph
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            if _CONTROL.search(value.name or ""):
                raise InputError(
                    f"the name of the model {kind} {value.name!r} has a control character",
                    remedy="rename it before the export: it would break the lines of calibration.cache",
                )
    values = [
        value
        for each in all_graphs(model)
        for value in (*each.inputs, *each.initializers.values(), *(out for node in each for out in node.outputs))
    ]
    taken = {value.name for value in values}
    given = []
    for value in dict.fromkeys(values):
        if value.name is None or not _CONTROL.search(value.name):
            continue
        stem = name = _CONTROL.sub("_", value.name)
        count = 0
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        value.name = name
        taken.add(name)
        given.append(name)
    return given


def name_nodes(model: ir.Model) -> list[str]:
    """Name what has no name ``<operator>_<count>`` in graph order, and number a name that comes again.

    Control characters in names become ``_``.

    The first node with a name keeps it. Nodes of inner graphs count as well.

    Returns:
        The new names.
    """
    nodes = [node for graph in all_graphs(model) for node in graph]
    for node in nodes:
        node.name = _CONTROL.sub("_", node.name or "")  # names are printed; a number is added where two become one
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
