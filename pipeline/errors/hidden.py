"""Why a layer has no INT8 tensor of its own: what an engine with marked INT8 tensors cannot show.

Marking an INT8 tensor that the next layer reads leaves the kernels as they are; marking a float tensor in front of it
would undo the fusion that keeps it inside one. So a layer is shown where what it gives, or what its activation makes of
that (:func:`pipeline.engine.debug_tensors.fused_ends`), is quantised by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.operators import ACTIVATIONS

if TYPE_CHECKING:
    from pipeline.errors.graphs import Graph

__all__ = ["why_hidden"]

_LOOKED_BEHIND = ACTIVATIONS | {"Cast"}
"""Operators to look behind: the reason is what reads their result."""


def why_hidden(int8: Graph, tensor: str) -> str:
    """The reason for ``tensor`` of a Q/DQ graph, in words that layers of a kind share."""
    seen = {tensor}
    while True:
        readers = int8.consumers.get(tensor, [])
        ops = sorted({node.op_type for node in readers})
        if len(readers) != 1:
            named = ", ".join(ops[:-1]) + f" and {ops[-1]}" if len(ops) > 1 else f"several {ops[0]}" if ops else ""
            return f"{named} read it in float" if ops else "nothing reads it"
        (reader,) = readers
        others = {name for name in reader.input if name} - int8.constants - seen
        if others:
            return f"{reader.op_type} joins it with another tensor before anything is quantised"
        if reader.op_type not in _LOOKED_BEHIND:
            return f"{reader.op_type} reads it before anything is quantised"
        tensor = reader.output[0]
        seen.add(tensor)
