"""Give each weighted node a weight of its own.

Two nodes that share a weight would share its Q/DQ pair; TensorRT then does not fuse the pair into either of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.prepare.constants import constant, new_initializer

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["unshare_weights"]

_WEIGHT_INPUTS = {"Conv": (1,), "ConvTranspose": (1,), "Gemm": (0, 1), "MatMul": (0, 1)}


def unshare_weights(model: ir.Model) -> list[str]:
    """Copy constants of two or more dimensions until no weighted node shares one with any other node.

    Among weighted nodes the first in graph order keeps the original; where another kind of node uses it too (an
    embedding's Gather), that one does. A copy is named ``<weight>_1``, ``<weight>_2`` ... and shares the original's
    memory until it is written.

    Returns:
        Names of the copied weights, once per copy.
    """
    import onnx_ir as ir

    copied = []
    kept: set[int] = set()
    for node in list(model.graph):
        for index in _weight_inputs(node):
            value = node.inputs[index]
            array = constant(value)
            if value is None or array is None or array.ndim < 2 or len(value.uses()) <= 1:
                continue
            weighted = all(usage.idx in _weight_inputs(usage.node) for usage in value.uses())
            if weighted and id(value) not in kept:
                kept.add(id(value))
                continue
            if not isinstance(value.const_value, ir.ExternalTensor):
                # Both tensors hold the one array: reading it from the file's message would give a second.
                value.const_value = ir.tensor(array, name=value.name)
            node.replace_input_with(index, new_initializer(model.graph, array, str(value.name)))
            copied.append(str(value.name))
    return copied


def _weight_inputs(node: ir.Node) -> tuple[int, ...]:
    return _WEIGHT_INPUTS.get(node.op_type, ()) if node.domain == "" else ()
