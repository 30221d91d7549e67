"""Fold what scales and shifts each channel into the linear operator before it.

y = s (W * x + b) + t becomes W' = s W (per output channel), b' = s b + t, for Conv, ConvTranspose and Gemm, where the
scaling is one of

- BatchNormalization: s = gamma / sqrt(variance + epsilon), t = beta - s mean;
- Mul or Div by a constant: s = c or 1 / c, t = 0;
- Add or Sub of a constant: s = 1, t = c or -c,

and the constant has one value, or one per channel. The products are taken in float64. The linear node keeps its name,
the tensor after the scaling keeps its own, and the one between them goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.prepare.constants import constant, set_constant

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["ScaleShift", "fold_scale_shift", "folded"]

Array = np.ndarray[Any, np.dtype[Any]]
_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm"})
_ELEMENTWISE = frozenset({"Mul", "Div", "Add", "Sub"})


@dataclass(frozen=True)
class ScaleShift:
    """y = scale * x + shift; both float64 of shape (channels,) or ()."""

    scale: Array
    shift: Array


def folded(
    weight: Array, bias: Array | None, outer: ScaleShift, *, axis: int, groups: int
) -> tuple[Array, Array | None]:
    """New weight and bias (float64); the bias stays None where nothing shifts.

    Args:
        weight: the linear operator's weight.
        bias: (channels,), or None.
        axis: where the output channels lie in ``weight``; 1 for ConvTranspose, where they lie group after group.
        groups: of a ConvTranspose with axis 1; 1 otherwise.
    """
    scale = outer.scale
    if scale.ndim:
        shape = [1] * weight.ndim
        if groups > 1:
            # (C, M/groups, ...): input channels of group g meet the output channels g M/groups .. (g+1) M/groups.
            rows = weight.shape[0] // groups
            scale = np.repeat(scale.reshape(groups, -1), rows, axis=0)
            shape[0] = weight.shape[0]
        shape[axis] = -1
        scale = scale.reshape(shape)
    new_weight = weight.astype(np.float64) * scale
    shifted = bool(np.any(outer.shift))
    if bias is None and not shifted:
        return new_weight, None
    channels = weight.shape[axis] * groups
    start = np.zeros(channels) if bias is None else bias.astype(np.float64)
    return new_weight, start * outer.scale + outer.shift


def fold_scale_shift(model: ir.Model) -> dict[str, list[str]]:
    """Apply to the whole main graph until nothing is left. Returns kind of fold -> names of the folded nodes."""
    done: dict[str, list[str]] = {}
    for node in list(model.graph):
        if node.op_type not in _LINEAR or node.domain != "":
            continue
        while (follower := _follower(node)) is not None and _fold(model.graph, node, follower):
            done.setdefault(f"{follower.op_type} folded into {node.op_type}", []).append(str(follower.name))
    return done


def _follower(node: ir.Node) -> ir.Node | None:
    """The only node that uses the output."""
    output = node.outputs[0]
    users = [usage.node for usage in output.uses()]
    if output.is_graph_output() or len(users) != 1:
        return None
    follower = users[0]
    return follower if follower.graph is node.graph and follower.domain == "" else None


def _fold(graph: ir.Graph, node: ir.Node, follower: ir.Node) -> bool:
    weight_value = node.inputs[1]
    weight = constant(weight_value)
    bias_value = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(bias_value)
    if weight is None or weight_value is None or (bias_value is not None and bias is None):
        return False
    if weight.dtype.kind != "f" or not _plain_gemm(node, bias):
        return False
    axis, groups = _channel_axis(node)
    channels = weight.shape[axis] * groups
    outer = _batch_normalization(follower) if follower.op_type == "BatchNormalization" else None
    if follower.op_type in _ELEMENTWISE:
        rank = 2 if node.op_type == "Gemm" else weight.ndim
        outer = _elementwise(follower, node.outputs[0], channels, rank)
    if outer is None or any(array.ndim and array.shape != (channels,) for array in (outer.scale, outer.shift)):
        return False
    flat = None if bias is None else np.broadcast_to(bias.ravel(), (channels,))
    new_weight, new_bias = folded(weight, flat, outer, axis=axis, groups=groups)
    dtype = weight.dtype
    if not _fits(new_weight, dtype) or (new_bias is not None and not _fits(new_bias, dtype)):
        return False
    set_constant(graph, node, 1, new_weight.astype(dtype), stem=str(weight_value.name))
    if new_bias is not None:
        stem = str(bias_value.name) if bias_value is not None else _bias_name(str(weight_value.name))
        set_constant(graph, node, 2, new_bias.astype(dtype), stem=stem)
    _bypass(graph, node, follower)
    return True


def _fits(values: Array, dtype: np.dtype[Any]) -> bool:
    return bool(np.isfinite(values).all() and np.abs(values).max(initial=0.0) <= np.finfo(dtype).max)


def _plain_gemm(node: ir.Node, bias: Array | None) -> bool:
    """Only y = x W + b with one bias per column; always true of a convolution."""
    if node.op_type != "Gemm":
        return True
    attributes = node.attributes
    if attributes.get_float("alpha", 1.0) != 1.0 or (bias is not None and attributes.get_float("beta", 1.0) != 1.0):
        return False
    return bias is None or bias.ndim <= 1 or (bias.ndim == 2 and bias.shape[0] == 1)


def _channel_axis(node: ir.Node) -> tuple[int, int]:
    if node.op_type == "Conv":
        return 0, 1
    if node.op_type == "ConvTranspose":
        return 1, node.attributes.get_int("group", 1)
    return (0 if node.attributes.get_int("transB", 0) else 1), 1


def _batch_normalization(node: ir.Node) -> ScaleShift | None:
    if node.attributes.get_int("training_mode", 0) or any(value.uses() for value in node.outputs[1:]):
        return None
    parameters = [constant(value) for value in node.inputs[1:5]]
    if any(array is None for array in parameters):
        return None
    gamma, beta, mean, variance = (np.asarray(array, dtype=np.float64) for array in parameters)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    # The attribute is a float32; its nearest double is what every runtime adds.
    scale = gamma / np.sqrt(variance + np.float64(np.float32(epsilon)))
    return ScaleShift(scale, beta - scale * mean)


def _elementwise(node: ir.Node, source: ir.Value, channels: int, rank: int) -> ScaleShift | None:
    first = node.inputs[0] is source
    other = constant(node.inputs[1] if first else node.inputs[0])
    if other is None or (node.inputs[0] is node.inputs[1]) or other.ndim > rank:
        return None
    values = _per_channel(other.astype(np.float64), channels, rank)
    if values is None:
        return None
    one, zero = np.ones(()), np.zeros(())
    if node.op_type == "Mul":
        return ScaleShift(values, zero)
    if node.op_type == "Add":
        return ScaleShift(one, values)
    if not first:  # c - x and c / x
        return ScaleShift(-one, values) if node.op_type == "Sub" else None
    if node.op_type == "Sub":
        return ScaleShift(one, -values)
    return ScaleShift(1.0 / values, zero) if np.all(values) else None


def _per_channel(values: Array, channels: int, rank: int) -> Array | None:
    """(channels,) or () when ``values`` broadcast along the channel axis (1) of a tensor of ``rank``, else None."""
    if values.size == 1:
        return values.reshape(())
    full = (1,) * (rank - values.ndim) + values.shape
    if full[1] != channels or any(dim != 1 for axis, dim in enumerate(full) if axis != 1):
        return None
    return values.reshape(channels)


def _bias_name(weight: str) -> str:
    return weight.removesuffix(".weight") + ".bias" if weight.endswith(".weight") else f"{weight}_bias"


def _bypass(graph: ir.Graph, node: ir.Node, follower: ir.Node) -> None:
    """Let ``node`` produce the follower's tensor."""
    old, kept = node.outputs[0], follower.outputs[0]
    name, shape, kind = kept.name, kept.shape, kept.type
    kept.replace_all_uses_with(old, replace_graph_outputs=True)
    graph.remove(follower, safe=True)
    kept.name = None
    old.name, old.shape, old.type = name, shape, kind
