"""Rewrites that only take away: constants worked out, nodes without effect, what nobody uses."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from pipeline.onnxfile import all_graphs, lift_constants

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "clear_meaningless_dimensions",
    "fold_constants",
    "remove_dropout",
    "remove_identity",
    "remove_unused",
    "simplify",
    "standard_form",
]

_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Range", "Tile", "Resize", "Pad"})
"""Operators whose result may be far larger than their inputs."""
_LARGEST_GROWN = 1 << 18
"""Elements to which such an operator may grow a constant; more would swell the file."""
_NO_LIMIT = 1 << 40
_UNKNOWN = re.compile(r"\?|unk__\d+")


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


def clear_meaningless_dimensions(model: ir.Model) -> None:
    """Make dimensions unknown that only stand for it: -1, 0, ``?`` and the ``unk__<n>`` of onnx's shape inference."""
    import onnx_ir as ir

    for graph in all_graphs(model):
        for value in (*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)):
            if value.shape is None:
                continue
            dims = [
                (dim if dim > 0 else None)
                if isinstance(dim, int)
                else (None if _UNKNOWN.fullmatch(dim.value or "") else dim)
                for dim in value.shape
            ]
            if dims != list(value.shape):
                value.shape = ir.Shape(dims)


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
    """Identity nodes, but for one between a graph input and a graph output. Returns their names."""
    from onnx_ir.passes.common import IdentityEliminationPass

    before = {id(node): str(node.name) for graph in all_graphs(model) for node in graph if node.op_type == "Identity"}
    IdentityEliminationPass()(model)
    for graph in all_graphs(model):
        for node in graph:
            before.pop(id(node), None)
    return list(before.values())


def remove_unused(model: ir.Model) -> None:
    """Nodes, weights and operator domains that no output depends on."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
