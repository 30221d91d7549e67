"""Fold a Pad with zeros into the convolutions behind it.

Pad(x, p) then Conv with pads q is Conv with pads p + q, when p pads only spatial dimensions, with the constant 0, and
never cuts. A Pad goes when every node behind it is such a convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.prepare.constants import constant

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["fold_pads"]


def fold_pads(model: ir.Model) -> list[str]:
    """Returns the names of the Pad nodes that are gone."""
    import onnx_ir as ir

    removed = []
    for node in list(model.graph):
        if node.op_type != "Pad" or node.domain != "" or node.outputs[0].is_graph_output():
            continue
        pads = _spatial_pads(node)
        users = [usage.node for usage in node.outputs[0].uses()]
        if pads is None or not users or not all(_takes(user, node, len(pads) // 2) for user in users):
            continue
        for user in users:
            own = user.attributes.get_ints("pads", [0] * len(pads))
            user.attributes["pads"] = ir.AttrInt64s("pads", [int(a) + int(b) for a, b in zip(own, pads, strict=True)])
            user.attributes.pop("auto_pad", None)
            user.replace_input_with(0, node.inputs[0])
        model.graph.remove(node, safe=True)
        removed.append(str(node.name))
    return removed


def _spatial_pads(node: ir.Node) -> list[int] | None:
    """Begin of each spatial dimension, then end of each, as Conv has them; None where the Pad does something else."""
    if node.attributes.get_string("mode", "constant") != "constant":
        return None
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return None
    pads = constant(node.inputs[1])
    fill = node.inputs[2] if len(node.inputs) > 2 else None
    value = constant(fill)
    if pads is None or (fill is not None and (value is None or np.any(value))):
        return None
    begin, end = np.asarray(pads).reshape(2, -1)
    if len(begin) < 3 or np.any(pads < 0) or begin[:2].any() or end[:2].any():
        return None
    return [int(pad) for pad in (*begin[2:], *end[2:])]


def _takes(user: ir.Node, pad: ir.Node, dimensions: int) -> bool:
    if user.op_type != "Conv" or user.domain != "" or user.graph is not pad.graph:
        return False
    if [value is pad.outputs[0] for value in user.inputs].count(True) != 1 or user.inputs[0] is not pad.outputs[0]:
        return False
    if user.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return False
    return len(user.attributes.get_ints("pads", [0] * (2 * dimensions))) == 2 * dimensions
