"""Why the remaining nodes stay float. These rules change no pair; they only say what would happen, and to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import LAYOUT, POINTWISE, RECURRENT, REDUCTIONS, SELECTIONS, WEIGHTED
from pipeline.placement.patterns import gate_of, kernel_of, reaches_pair, spatial_mean
from pipeline.placement.rule import ANY, Rule, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]

_NEAR = 4


def _shape_arithmetic(draft: Draft, node: ir.Node) -> None:
    types = {value.dtype.name for value in node.outputs if value.dtype is not None}
    if types and not types & {"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"}:
        draft.decide(node, False, "its outputs are no floats (shapes, indices, masks)")
    elif draft.graph.op(node) in ("ConstantOfShape", "Range") or not draft.graph.computed_inputs(node):
        draft.decide(node, False, "a constant")


def _recurrent(draft: Draft, node: ir.Node) -> None:
    draft.decide(
        node, False, f"{node.op_type} keeps a float state from step to step, and TensorRT has no INT8 kernel for it"
    )


def _normalisation(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    op = graph.op(node)
    before = {graph.op(producer) for value in node.inputs if (producer := graph.producer(value)) is not None}
    after = {graph.op(reader) for reader in graph.downstream(node.outputs[0])}
    inside = (
        op
        in (
            "LayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "SimplifiedLayerNormalization",
            "LpNormalization",
        )
        or (op == "ReduceMean" and not spatial_mean(graph, node))
        or op in ("Pow", "Sqrt")
        or (op == "Sub" and "ReduceMean" in before)
        or (op == "Div" and "Sqrt" in before)
        or (op == "Add" and "Sqrt" in after)
    )
    if inside:
        draft.decide(
            node,
            False,
            "part of a normalisation: mean and variance need float precision, and one float kernel computes all of it",
        )


def _softmax(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    if graph.op(node) in ("Softmax", "LogSoftmax"):
        draft.decide(node, False, "exponentials and their sum need float precision")
        return
    value = node.outputs[0]
    for _ in range(_NEAR):
        readers = list(graph.downstream(value))
        if any(graph.op(reader) in ("Softmax", "LogSoftmax") for reader in readers):
            draft.decide(
                node, False, "scales or masks the scores of a Softmax: masked scores are far outside any INT8 range"
            )
            return
        if len(readers) != 1 or graph.op(readers[0]) not in (*POINTWISE, "Where"):
            return
        value = readers[0].outputs[0]


def _gelu(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph

    def near(start: ir.Node, step: Callable[[ir.Node], list[ir.Node]]) -> bool:
        level = [start]
        for _ in range(_NEAR):
            level = [other for current in level for other in step(current) if graph.op(other) in POINTWISE]
            if any(graph.op(other) == "Erf" for other in level):
                return True
        return False

    def before(current: ir.Node) -> list[ir.Node]:
        return [producer for value in current.inputs if (producer := graph.producer(value)) is not None]

    def after(current: ir.Node) -> list[ir.Node]:
        return list(graph.downstream(current.outputs[0]))

    if graph.op(node) in ("Erf", "Gelu") or near(node, before) or near(node, after):
        draft.decide(node, False, "part of a GELU: TensorRT recognises it as a whole, without Q/DQ inside")


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
    if reaches_pair(draft, written):
        draft.decide(node, False, f"runs in the kernel of {source.name}, before its result is rounded to INT8")
    else:
        draft.decide(node, False, f"runs in the kernel of {source.name}, whose output stays float")


def _residual_stream(draft: Draft, node: ir.Node) -> None:
    if len(draft.graph.computed_inputs(node)) > 1:
        draft.decide(
            node,
            False,
            "adds two float tensors: no INT8 convolution directly before it to fuse with, or no INT8 reader behind it",
        )


def _copy(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    if graph.op(node) == "Gather" and graph.is_constant(node.inputs[0]):
        draft.decide(node, False, "looks up rows of a table (embedding)")
    elif any(reaches_pair(draft, value) for value in node.outputs):
        draft.decide(node, False, "copies values; the pair behind it is enough, TensorRT moves the Q in front")
    else:
        draft.decide(node, False, "copies float values for float readers")


def _pooling(draft: Draft, node: ir.Node) -> None:
    if reaches_pair(draft, node.outputs[0]) and draft.graph.op(node) == "MaxPool":
        draft.decide(
            node, False, "commutes with quantisation: the pair behind it is enough, TensorRT moves the Q in front"
        )
    else:
        draft.decide(node, False, "reduces float values: no INT8 kernel writes its input, or none reads its output")


def _element_wise(draft: Draft, node: ir.Node) -> None:
    draft.decide(node, False, "element by element on float values, no INT8 kernel before it to run in")


def _weighted(draft: Draft, node: ir.Node) -> None:
    draft.decide(node, False, "the rule for this operator is switched off, or its operands are no float32 tensors")


def _control_flow(draft: Draft, node: ir.Node) -> None:
    draft.decide(node, False, "control flow: its body is left as it is")


_UNDERSTOOD = "ONNX operator definitions"

RULES = (
    Rule(
        name="shape-arithmetic",
        stage=Stage.EXPLAIN,
        ops=ANY,
        effect="names nodes that compute shapes, indices or masks, and constants",
        reason="only float activations are quantised",
        source=_UNDERSTOOD,
        visit=_shape_arithmetic,
    ),
    Rule(
        name="recurrent",
        stage=Stage.EXPLAIN,
        ops=RECURRENT,
        effect="leaves LSTM, GRU and RNN float, and says so",
        reason="TensorRT has no INT8 kernel for them, and errors of the state add up over the steps",
        source="TensorRT: layers and precisions",
        visit=_recurrent,
    ),
    Rule(
        name="control-flow",
        stage=Stage.EXPLAIN,
        ops=("If", "Loop", "Scan"),
        effect="leaves the bodies of If, Loop and Scan float",
        reason="TensorRT fuses nothing across them",
        source=_UNDERSTOOD,
        visit=_control_flow,
    ),
    Rule(
        name="normalisation",
        stage=Stage.EXPLAIN,
        ops=ANY,
        effect="leaves LayerNorm and its kind float, also where it is spelt out in ReduceMean, Sub, Pow, Sqrt, Div",
        reason="INT8 mean and variance are too coarse; a pair inside would break TensorRT's fused kernel up",
        source="ModelOpt partitioning (layer norm patterns)",
        visit=_normalisation,
    ),
    Rule(
        name="softmax",
        stage=Stage.EXPLAIN,
        ops=(*POINTWISE, "Softmax", "LogSoftmax", "Where"),
        effect="leaves Softmax float, and the scale and mask in front of it",
        reason="a mask of -10000 would take the whole INT8 range",
        source="ModelOpt partitioning (attention patterns)",
        visit=_softmax,
    ),
    Rule(
        name="gelu",
        stage=Stage.EXPLAIN,
        ops=POINTWISE,
        effect="leaves the inside of a GELU float",
        reason="TensorRT recognises Div, Erf, Add, Mul, Mul as one operator",
        source="ModelOpt partitioning (GELU pattern)",
        visit=_gelu,
    ),
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
        reason="their rule is off, or an operand is no float32 tensor",
        source=_UNDERSTOOD,
        visit=_weighted,
    ),
)
