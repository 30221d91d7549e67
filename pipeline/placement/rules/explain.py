"""Why the remaining nodes stay float. These rules change no pair; they only say what would happen, and to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import CONVOLUTIONS, LAYOUT, POINTWISE, REDUCTIONS, SELECTIONS, WEIGHTED
from pipeline.placement.patterns import (
    cone,
    copies_values,
    fused_source,
    gate_of,
    is_zero_pad,
    kernel_of,
    reaches_pair,
)
from pipeline.placement.rule import Rule, Stage
from pipeline.placement.rules.residual import fused_side
from pipeline.placement.rules.weighted import why_float

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]


def _gate(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    if gate_of(graph, node) is not None:
        draft.decide(node, False, "multiplies by a gate (squeeze-and-excitation); both operands are float")
    elif any(gate_of(graph, reader) is node.outputs[0] for reader in graph.downstream(node.outputs[0])):
        draft.decide(node, False, "computes a gate: INT8 steps of a gate would scale a whole channel")


def _epilogue(draft: Draft, node: ir.Node) -> None:
    found = kernel_of(draft, node)
    if found is None:
        return
    source, written = found
    where = f"runs in the kernel of {source.name}"
    if not reaches_pair(draft, written):
        draft.decide(node, False, f"{where}, whose output stays float")
    elif floats := _float_operands(draft, source, written):
        names = ", ".join(value.name or "" for value in floats)
        draft.decide(
            node,
            False,
            f"{where}, which reads {names} in float as well and so writes float: the pair behind it rounds that to "
            "INT8",
        )
    else:
        draft.decide(node, False, f"{where}, before its result is rounded to INT8")


def _float_operands(draft: Draft, source: ir.Node, written: ir.Value) -> list[ir.Value]:
    """What element-wise operators between ``source`` and ``written`` read in float besides the result of ``source``."""
    graph = draft.graph
    found = cone(graph, written)
    return [
        leaf
        for leaf in found.leaves
        if leaf not in source.outputs
        and graph.is_float(leaf)
        and any(node in found.nodes and not draft.demanded(node, index) for node, index in graph.readers(leaf))
    ]


def _residual_stream(draft: Draft, node: ir.Node) -> None:
    if len(draft.graph.computed_inputs(node)) < 2:
        return
    if fused_side(draft, node) is None:
        why = "no INT8 convolution of the same shape directly before it to fuse with"
    elif not reaches_pair(draft, node.outputs[0]):
        why = "no INT8 reader behind it"
    else:
        why = "the rule residual-add, which would quantise its skip input, is switched off"
    draft.decide(node, False, f"adds two float tensors: {why}")


def _copy(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    op = graph.op(node)
    if op == "Gather" and graph.is_constant(node.inputs[0]):
        draft.decide(node, False, "looks up rows of a table (embedding)")
    elif not any(reaches_pair(draft, value) for value in node.outputs):
        draft.decide(node, False, _float_copy(draft, node))
    elif op == "Pad" and not is_zero_pad(graph, node):
        value = graph.scalar(node.inputs[2])
        what = "a computed value" if value is None else f"{value:g}"
        draft.decide(
            node,
            False,
            f"pads float values with {what}, which INT8 steps of the data do not hold in general, so that no Q moves "
            "in front: the pair behind it quantises",
        )
    elif op in ("Resize", "Upsample") and not copies_values(node):
        draft.decide(node, False, "computes new float values between those it reads: the pair behind it quantises them")
    elif op == "Cast":
        draft.decide(node, False, "makes floats of another type: the pair behind it quantises them")
    else:
        draft.decide(node, False, "copies values; the pair behind it is enough, TensorRT moves the Q in front")


def _float_copy(draft: Draft, node: ir.Node) -> str:
    op = draft.graph.op(node)
    if op in ("Resize", "Upsample") and not copies_values(node):
        return "computes float values for float readers"
    return "changes the type, for float readers" if op == "Cast" else "copies float values for float readers"


def _pooling(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    op = graph.op(node)
    if not reaches_pair(draft, node.outputs[0]):
        draft.decide(node, False, "reduces float values for float readers")
    elif op == "MaxPool" and not (len(node.outputs) > 1 and node.outputs[1].uses()):
        draft.decide(
            node, False, "commutes with quantisation: the pair behind it is enough, TensorRT moves the Q in front"
        )
    elif fused_source(draft, node.inputs[0], *CONVOLUTIONS) is None:  # type: ignore[arg-type]
        draft.decide(node, False, "reduces float values that no INT8 convolution writes: the pair behind it is enough")
    else:
        draft.decide(node, False, "reduces the float output of a convolution: only what it leaves is quantised")


def _element_wise(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    for leaf in cone(graph, node.outputs[0]).leaves:
        source = graph.producer(leaf)
        if source is not None and draft.is_weighted(source):
            draft.decide(
                node,
                False,
                f"element by element on float values: the kernel of {source.name} has to write {leaf.name} for its "
                "other readers",
            )
            return
    draft.decide(node, False, "element by element on float values, no INT8 kernel before it to run in")


def _weighted(draft: Draft, node: ir.Node) -> None:
    draft.decide(node, False, why_float(draft.graph, node))


_UNDERSTOOD = "ONNX operator definitions"

RULES = (
    Rule(
        name="gate",
        stage=Stage.EXPLAIN,
        ops=POINTWISE,
        effect="leaves squeeze-and-excitation gates float: Sigmoid or HardSigmoid, and the Mul",
        reason="a gate multiplies a whole channel, its rounding error does not average out",
        source="user reports on MobileNetV3 and EfficientNet in INT8",
        visit=_gate,
    ),
    Rule(
        name="epilogue",
        stage=Stage.EXPLAIN,
        ops=POINTWISE,
        effect="keeps BatchNorm, ReLU, Clip, SiLU, HardSwish, bias and scale behind an INT8 kernel free of pairs",
        reason="TensorRT runs them in the kernel's epilogue, on the float accumulator",
        source="TensorRT: placement guide, recommendations 2 and 3",
        visit=_epilogue,
    ),
    Rule(
        name="residual-stream",
        stage=Stage.EXPLAIN,
        ops=("Add",),
        effect="leaves an Add float that has no INT8 convolution to fuse with",
        reason="rounding the residual stream of a transformer in every block loses accuracy, and its reader is a "
        "float LayerNorm",
        source="ModelOpt (an ancestor that is the block's own input is no residual)",
        visit=_residual_stream,
    ),
    Rule(
        name="copy",
        stage=Stage.EXPLAIN,
        ops=(*LAYOUT, *SELECTIONS, "Concat", "Pad", "Resize", "Upsample", "Expand", "Tile", "Cast"),
        effect="names operators that only copy values",
        reason="they run in whatever type their neighbours have",
        source="TensorRT: placement guide, commuting layers",
        visit=_copy,
    ),
    Rule(
        name="pooling",
        stage=Stage.EXPLAIN,
        ops=("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", *REDUCTIONS),
        effect="names pools and reductions that need no pair of their own",
        reason="a MaxPool commutes; a mean between float neighbours gains nothing",
        source="TensorRT: placement guide, commuting layers",
        visit=_pooling,
    ),
    Rule(
        name="element-wise",
        stage=Stage.EXPLAIN,
        ops=POINTWISE,
        effect="names the remaining element-wise operators",
        reason="alone they are bound by memory; TensorRT fuses neighbours into one kernel",
        source="TensorRT: placement guide, recommendation 6",
        visit=_element_wise,
    ),
    Rule(
        name="not-quantizable",
        stage=Stage.EXPLAIN,
        ops=WEIGHTED,
        effect="names convolutions and products that no rule quantised",
        reason="an operand is no float32 tensor, the weights are no constant, or their rule is off: it says which",
        source=_UNDERSTOOD,
        visit=_weighted,
    ),
)
