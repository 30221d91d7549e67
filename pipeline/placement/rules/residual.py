"""Residual Add: INT8 on the skip input only, so that convolution, Add, activation and Q become one kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.placement.ops import CONVOLUTIONS
from pipeline.placement.patterns import cone, reaches_pair
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES", "fused_side"]


def fused_side(draft: Draft, node: ir.Node) -> int | None:
    """Which input of an Add comes out of an INT8 convolution that the Add can fuse with.

    A convolution directly in front is preferred to one with an activation between, and of two equal ones that at the
    end of the longer path from the inputs (the other is the projection of the skip path). None when there is none, or
    when the operands have different shapes.
    """
    graph = draft.graph
    if len(graph.computed_inputs(node)) != 2 or node.inputs[0] is node.inputs[1]:
        return None
    shapes = [graph.shape(value) for value in node.inputs]
    if shapes[0] is not None and shapes[1] is not None:
        if len(shapes[0]) != len(shapes[1]):
            return None
        if any(a is not None and b is not None and a != b for a, b in zip(*shapes, strict=True)):
            return None
    sides: list[tuple[int, int, int, ir.Node]] = []
    for index in (0, 1):
        value = node.inputs[index]
        assert value is not None
        if graph.only_reader(value) is not node:
            continue
        found = cone(graph, value)
        if len(found.leaves) != 1:
            continue
        leaf = found.leaves[0]
        convolution = graph.producer(leaf, *CONVOLUTIONS)
        if convolution is None or not draft.is_weighted(convolution) or not found.closed(graph, leaf):
            continue
        if any(
            graph.op(inner) in ("Mul", "Add", "Sub", "Div") and len(graph.computed_inputs(inner)) < 2
            for inner in found.nodes
        ):
            continue  # a layer scale or shift: what ConvNeXt-like blocks have between convolution and Add
        sides.append((len(found.nodes), -graph.depth(value), index, convolution))
    if not sides:
        return None
    sides.sort(key=lambda each: each[:3])
    best, other = sides[0], sides[-1]
    if best[0] == other[0] and best[1] < other[1] and _widens(draft, other[3]):
        best = other
    return best[2]


def _widens(draft: Draft, convolution: ir.Node) -> bool:
    """True when a Conv writes more elements than it reads."""
    weight = draft.graph.shape(convolution.inputs[1])
    if draft.graph.op(convolution) != "Conv" or weight is None or weight[0] is None or weight[1] is None:
        return False
    group = convolution.attributes.get_int("group", 1)
    strides = convolution.attributes.get_ints("strides", (1,))
    return weight[0] > weight[1] * group * math.prod(strides)


def _residual(draft: Draft, node: ir.Node) -> None:
    if node in draft.banned or not draft.graph.is_float(node.outputs[0]):
        return
    side = fused_side(draft, node)
    if side is None:
        return
    skip = node.inputs[1 - side]
    assert skip is not None
    if (reaches_pair(draft, node.outputs[0]) or draft.has_pair(skip)) and draft.demand(node, 1 - side):
        draft.decide(
            node,
            True,
            f"fuses with the convolution behind input {side}; the skip input {1 - side} ({skip.name}) is INT8",
        )


RULES = (
    Rule(
        name="residual-add",
        stage=Stage.STRUCTURE,
        ops=("Add",),
        effect="quantises the skip input of a residual Add, and nothing between the convolution and the Add",
        reason="the fused kernel writes INT8 only when the skip input is INT8; a Q/DQ pair between convolution and "
        "Add stops the fusion",
        source="TensorRT: placement guide, recommendation 4; pytorch-quantization ResNet-50 tutorial",
        visit=_residual,
    ),
)
