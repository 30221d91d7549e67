"""Rewrites that only take away: constants worked out, nodes without effect, what nobody uses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.onnxgraph import all_graphs, lift_constants

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "fold_constants",
    "omit_empty_inputs",
    "remove_dropout",
    "remove_identity",
    "remove_unused",
    "simplify",
    "standard_form",
    "state_kernel_shapes",
]

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Range", "Tile", "Resize", "Pad"})
"""Operators whose result may be far larger than their inputs."""
_LARGEST_GROWN = 1 << 18
"""Elements to which such an operator may grow a constant; more would swell the file."""
_NO_LIMIT = 1 << 40


def standard_form(model: ir.Model) -> list[str]:
    """Inline functions, and make every constant an initializer that is no graph input. Returns what was inlined."""
    from onnx_ir.passes.common import (
        InlinePass,
        LiftSubgraphInitializersToMainGraphPass,
        RemoveInitializersFromInputsPass,
        RemoveUnusedFunctionsPass,
    )

    functions = [function.name for function in model.functions.values()]
    InlinePass()(model)
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    RemoveInitializersFromInputsPass()(model)
    lift_constants(model)
    LiftSubgraphInitializersToMainGraphPass()(model)
    return functions


def remove_dropout(model: ir.Model) -> list[str]:
    """Dropout in inference passes its input on; a mask that something uses keeps the node."""
    import onnx_ir as ir

    removed = []
    for graph in all_graphs(model):
        for node in list(graph):
            if (
                node.op_type != "Dropout"
                or node.domain != ""
                or any(v.uses() or v.is_graph_output() for v in node.outputs[1:])
            ):
                continue
            training = node.inputs[2] if len(node.inputs) > 2 else None
            if training is not None and (training.const_value is None or training.const_value.numpy().item()):
                continue
            # Identity first: its removal knows the cases of graph inputs and outputs.
            identity = ir.node("Identity", [node.inputs[0]], name=node.name)
            old, new = node.outputs[0], identity.outputs[0]
            new.shape, new.type = old.shape, old.type
            graph.insert_before(node, identity)
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            new.name, old.name = old.name, None
            graph.remove(node, safe=True)
            removed.append(str(node.name))
    return removed


def fold_constants(model: ir.Model) -> list[str]:
    """Work out every node whose inputs are constants, shape arithmetic with static dimensions included.

    QuantizeLinear and DequantizeLinear stay, and so does what would grow a constant beyond 2^18 elements.

    Returns:
        Names of the tensors that have become constants.
    """
    from onnxscript.optimizer import fold_constants as fold

    before = _constant_names(model)
    fold(
        model,
        onnx_shape_inference=True,
        input_size_limit=_NO_LIMIT,
        output_size_limit=_NO_LIMIT,
        should_fold=_may_fold,
    )
    lift_constants(model)
    return sorted(_constant_names(model) - before)


def _constant_names(model: ir.Model) -> set[str]:
    return set(model.graph.initializers)


def _may_fold(node: ir.Node) -> bool | None:
    """True folds the node, False keeps it; None leaves the decision to the folder."""
    if node.op_type in _QUANTIZERS or node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type in _GROWING:
        value = node.outputs[0]
        sizes = [dim for dim in value.shape if isinstance(dim, int)] if value.shape is not None else []
        known = value.shape is not None and len(sizes) == len(value.shape)
        return known and math.prod(sizes) <= _LARGEST_GROWN
    return None


def simplify(model: ir.Model) -> int:
    """Apply onnxscript's rules for nodes without effect and for shape arithmetic with one answer.

    Returns:
        How many times a rule was applied.
    """
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common as rules

    chosen = RewriteRuleSet(
        [
            rules.mul_by_1_rule, rules.div_by_1_rule, rules.add_0_rule, rules.sub_0_rule,
            rules.no_op_cast_rule, rules.cast_cast_rule, rules.no_op_transpose_rule, rules.transpose_transpose_rule,
            rules.no_op_expand_rule, rules.collapse_slice_rule, rules.collapse_slice2_rule,
            rules.materialize_reshape_shape_rule, rules.reshape_reshape_rule, rules.unsqueeze_unsqueeze_rule,
            rules.squeeze_reshape_1d_rule, rules.cast_constant_of_shape_rule,
            rules.cast_constant_of_shape_without_value_rule,
        ]
    )  # fmt: skip
    return int(chosen.apply_to_model(model))


def remove_identity(model: ir.Model) -> list[str]:
    """Identity nodes, but for those that give a graph an output which is its input, another one's value or another
    output as well. Returns the names of the removed ones."""
    removed = []
    for graph in all_graphs(model):
        for node in graph:
            source = node.inputs[0] if node.inputs else None
            if node.op_type != "Identity" or node.domain not in ("", "ai.onnx") or source is None:
                continue
            output = node.outputs[0]
            is_output = output.is_graph_output()
            if is_output and not _may_become_output(source, graph):
                continue
            if output.shape is not None and (is_output or source.shape is None):
                source.shape = output.shape
            if source.type is None:
                source.type = output.type
            output.replace_all_uses_with(source, replace_graph_outputs=True)
            graph.remove(node, safe=True)
            if is_output:
                source.name = output.name
            removed.append(str(node.name))
    return removed


def omit_empty_inputs(model: ir.Model) -> list[str]:
    """Take the optional inputs of Resize away that are constants of no element: TensorRT warns of each one.

    Returns:
        The names of the nodes.
    """
    changed = []
    for graph in all_graphs(model):
        for node in graph:
            if node.op_type != "Resize" or node.domain not in ("", "ai.onnx"):
                continue
            empty = [
                index
                for index, value in enumerate(node.inputs)
                if index and value is not None and value.const_value is not None and value.const_value.size == 0
            ]
            for index in empty:
                node.replace_input_with(index, None)
            if empty:
                changed.append(str(node.name))
    return changed


def _may_become_output(value: ir.Value, graph: ir.Graph) -> bool:
    """A node of ``graph`` makes it, and it is no output so far: it can take over an output's name."""
    producer = value.producer()
    return producer is not None and producer.graph is graph and not value.is_graph_output()


def remove_unused(model: ir.Model) -> None:
    """Nodes, weights and operator domains that no output depends on."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)


def state_kernel_shapes(model: ir.Model) -> None:
    """Write the optional ``kernel_shape`` on every convolution whose weight has a known shape.

    With a weight that is no constant, as behind a DequantizeLinear, TensorRT 8.6 does not work it out and refuses the
    graph.
    """
    import onnx_ir as ir

    for graph in all_graphs(model):
        for node in graph:
            if node.op_type not in _CONVOLUTIONS or node.domain not in ("", "ai.onnx"):
                continue
            weight = node.inputs[1]
            if "kernel_shape" in node.attributes or weight is None or weight.shape is None:
                continue
            kernel = [dim for dim in weight.shape[2:] if isinstance(dim, int)]
            if len(kernel) == len(weight.shape) - 2:
                node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", kernel)
