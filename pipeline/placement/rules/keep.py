"""Matrix products and convolutions that are left alone, because INT8 would cost time or accuracy there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.ops import WEIGHTED
from pipeline.placement.rule import Rule, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["RULES"]

_SMALLEST = 16
_STEM_WALK = 8


def _computed_weights(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    if not graph.is_constant(node.inputs[1]):
        draft.decide(node, False, f"its weights {node.inputs[1].name} are computed, not constant")  # type: ignore[union-attr]
    elif graph.is_constant(node.inputs[0]):
        draft.decide(node, False, "its data input is a constant")


def _constant_left(draft: Draft, node: ir.Node) -> None:
    graph = draft.graph
    left, right = node.inputs[:2]
    if graph.is_constant(left):
        draft.decide(node, False, "its left operand is a constant: TensorRT takes weights on the right only")
        return
    transposed = node.attributes.get("transA")
    if transposed is not None and transposed.as_int() and graph.is_constant(right):
        draft.decide(node, False, "its left operand is transposed (transA)")


def _channels(draft: Draft, node: ir.Node) -> tuple[int | None, int | None, int]:
    """Input and output channels, and groups, of a convolution."""
    attribute = node.attributes.get("group")
    group = attribute.as_int() if attribute is not None else 1
    shape = draft.graph.shape(node.inputs[1])
    if shape is None or len(shape) < 3:
        return None, None, group
    first, second = shape[0], shape[1]
    if draft.graph.op(node) == "ConvTranspose":
        return first, None if second is None else second * group, group
    return None if second is None else second * group, first, group


def _tiny_convolution(draft: Draft, node: ir.Node) -> None:
    inputs, outputs, _ = _channels(draft, node)
    stem = _is_stem(draft, node)
    if outputs is not None and outputs < _SMALLEST:
        draft.decide(
            node, False, f"{outputs} output channels, fewer than the {_SMALLEST} an INT8 kernel works on at a time"
        )
    elif inputs is not None and inputs < _SMALLEST and not stem:
        draft.decide(
            node, False, f"{inputs} input channels, fewer than the {_SMALLEST} an INT8 kernel works on at a time"
        )


def _is_stem(draft: Draft, node: ir.Node) -> bool:
    """The first convolution of a network: only padding, normalisation and the like stand between an input and it."""
    graph, value = draft.graph, node.inputs[0]
    for _ in range(_STEM_WALK):
        if value is None:
            return False
        if value.is_graph_input():
            return True
        producer = graph.producer(value)
        if producer is None or graph.op(producer) in WEIGHTED:
            return False
        computed = [tensor for _, tensor in graph.computed_inputs(producer) if graph.is_float(tensor)]
        if len(computed) != 1:
            return False
        value = computed[0]
    return False


def _single_pixel(draft: Draft, node: ir.Node) -> None:
    shape = draft.graph.shape(node.inputs[0])
    if shape is not None and len(shape) > 2 and all(dim == 1 for dim in shape[2:]):
        draft.decide(
            node,
            False,
            "a convolution over a single pixel (squeeze-and-excitation): bound by latency, not by arithmetic",
        )


def _product_shape(draft: Draft, node: ir.Node) -> tuple[int | None, int | None, int | None]:
    """Rows, common dimension and columns of a matrix product, where they are static."""
    graph = draft.graph
    left, right = graph.shape(node.inputs[0]), graph.shape(node.inputs[1])
    rows = common = columns = None
    transposed = node.attributes.get("transB")
    flip = transposed is not None and bool(transposed.as_int())
    if right is not None and len(right) >= 2:
        common, columns = (right[-1], right[-2]) if flip else (right[-2], right[-1])
    elif right is not None and len(right) == 1:
        common, columns = right[0], 1
    if left is not None and left:
        common = common if common is not None else left[-1]
        outer = left[:-1]
        if right is not None and len(right) > 2:
            outer = left[-2:-1]
        if all(dim is not None for dim in outer):
            rows = 1
            for dim in outer:
                rows *= dim or 0
    return rows, common, columns


def _matrix_vector(draft: Draft, node: ir.Node) -> None:
    rows, _, columns = _product_shape(draft, node)
    if rows == 1 or columns == 1:
        which = "row" if rows == 1 else "column"
        draft.decide(node, False, f"a matrix-vector product (one {which}): bound by memory, no tensor core runs it")


def _tiny_product(draft: Draft, node: ir.Node) -> None:
    _, common, columns = _product_shape(draft, node)
    for number, what in ((common, "terms per sum"), (columns, "columns")):
        if number is not None and number < _SMALLEST:
            draft.decide(node, False, f"{number} {what}, fewer than the {_SMALLEST} an INT8 kernel works on at a time")
            return


RULES = (
    Rule(
        name="computed-weights",
        stage=Stage.KEEP,
        ops=("Conv", "ConvTranspose"),
        effect="leaves convolutions alone whose weights are not constant",
        reason="TensorRT wants the weights of an INT8 convolution to be a constant with one Q/DQ pair",
        source="TensorRT: checks of the weighted layers; ModelOpt partitioning",
        visit=_computed_weights,
    ),
    Rule(
        name="left-operand",
        stage=Stage.KEEP,
        ops=("Gemm", "MatMul"),
        effect="leaves products alone whose left operand is constant or transposed",
        reason="TensorRT takes INT8 weights as the right operand, with scales along its output channels",
        source="TensorRT: placement guide, per-channel axis",
        visit=_constant_left,
    ),
    Rule(
        name="tiny-channels",
        stage=Stage.KEEP,
        ops=("Conv", "ConvTranspose"),
        effect="leaves convolutions of fewer than 16 input or output channels alone, but for the first one of a "
        "network",
        reason="INT8 kernels work on 16 or 32 channels at a time; padding eats the gain",
        source="TREx lint rules; ModelOpt graph_utils",
        visit=_tiny_convolution,
    ),
    Rule(
        name="single-pixel",
        stage=Stage.KEEP,
        ops=("Conv",),
        effect="leaves 1x1 convolutions of 1x1 images alone (squeeze-and-excitation)",
        reason="they are matrix-vector products at small batch, and their output gates a whole channel",
        source="ModelOpt GEMV rule, applied to convolutions",
        visit=_single_pixel,
    ),
    Rule(
        name="matrix-vector",
        stage=Stage.KEEP,
        ops=("Gemm", "MatMul"),
        effect="leaves products with one row or one column alone",
        reason="they are bound by reading the matrix once; Q/DQ only add kernels",
        source="ModelOpt GEMV rule",
        visit=_matrix_vector,
    ),
    Rule(
        name="tiny-product",
        stage=Stage.KEEP,
        ops=("Gemm", "MatMul"),
        effect="leaves products with fewer than 16 terms or columns alone",
        reason="INT8 tensor cores work on tiles of at least 16",
        source="ModelOpt graph_utils",
        visit=_tiny_product,
    ),
)
