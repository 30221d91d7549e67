"""Operators that graphs spell out in several nodes, and that stay float as a whole: normalisation, Softmax, GELU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.attention import around_softmax
from pipeline.placement.gelu import gelu_around
from pipeline.placement.normalisation import normalisation_around
from pipeline.placement.ops import LAYOUT, POINTWISE, REDUCTIONS
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]

_NEAR = 4
_NORMALISATIONS = (
    "LayerNormalization", "InstanceNormalization", "GroupNormalization", "SimplifiedLayerNormalization",
    "LpNormalization",
)  # fmt: skip

_ON_SCORES = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Where")


def _normalisation(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    nodes = {node} if graph.op(node) in _NORMALISATIONS else normalisation_around(graph, node)
    for each in sorted(nodes or (), key=graph.place):
        draft.decide(
            each,
            False,
            "part of a normalisation: mean and variance need float precision, and one float kernel computes all of it",
        )


def _softmax(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    if graph.op(node) in ("Softmax", "LogSoftmax"):
        draft.decide(node, False, "exponentials and their sum need float precision")
        for each in around_softmax(graph, node):
            if graph.op(each) in ("Where", "Mul", "Div"):
                draft.decide(each, False, "masks, scales or guards the probabilities of a Softmax, in float as it is")
        return
    value = node.outputs[0]
    for _ in range(_NEAR):
        readers = list(graph.downstream(value))
        if any(graph.op(reader) in ("Softmax", "LogSoftmax") for reader in readers):
            draft.decide(
                node,
                False,
                "shifts, scales or masks the scores of a Softmax: masked ones are far outside of any INT8 range",
            )
            return
        if len(readers) != 1 or graph.op(readers[0]) not in (*POINTWISE, *LAYOUT, "Cast", "Where"):
            return
        value = readers[0].outputs[0]


def _gelu(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    nodes = {node} if graph.op(node) == "Gelu" else gelu_around(graph, node)
    reason = "part of a GELU: TensorRT recognises it as a whole, without Q/DQ inside"
    if graph.op(node) == "Sigmoid":
        reason = "part of a GELU in its sigmoid form: element by element in one kernel, without Q/DQ inside"
    for each in sorted(nodes or (), key=graph.place):
        draft.decide(each, False, reason)


RULES = (
    Rule(
        name="normalisation",
        stage=Stage.EXPLAIN,
        ops=(*_NORMALISATIONS, *REDUCTIONS),
        effect="leaves LayerNorm and its kind float, also where it is spelt out in ReduceMean, Sub, Pow, Sqrt, Div",
        reason="INT8 mean and variance are too coarse; a pair inside would break TensorRT's fused kernel up",
        source="ModelOpt partitioning (layer norm patterns)",
        visit=_normalisation,
    ),
    Rule(
        name="softmax",
        stage=Stage.EXPLAIN,
        ops=("Softmax", "LogSoftmax", *_ON_SCORES),
        effect="leaves Softmax float, the scale and mask in front of it, and a mask or guard against NaN behind it",
        reason="a mask of -10000 would take the whole INT8 range",
        source="ModelOpt partitioning (attention patterns)",
        visit=_softmax,
    ),
    Rule(
        name="gelu",
        stage=Stage.EXPLAIN,
        ops=("Erf", "Gelu", "Sigmoid", "Tanh"),
        effect="leaves the inside of a GELU float, spelt with Erf, with Tanh of a cubic, or with a Sigmoid",
        reason="TensorRT recognises Div, Erf, Add, Mul, Mul, and the form with Tanh, as one operator",
        source="TensorRT: layer fusions (GELU); ModelOpt partitioning (GELU pattern)",
        visit=_gelu,
    ),
)
