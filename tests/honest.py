"""FP16 as ONNX defines it: every FP16 tensor is really rounded, which onnxruntime's CPU provider does not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

__all__ = ["evaluate"]


def evaluate(proto: onnx.ModelProto, feeds: dict[str, Any], *more: str) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """The graph's outputs and the tensors ``more`` by onnx's own evaluator."""
    from onnx.reference import ReferenceEvaluator

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.opset_import[0].version = 19  # its QuantizeLinear of opset 17 and older is incomplete; it means the same here
    names = [output.name for output in copy.graph.output]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in more)
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(copy).run([*names, *more], feeds))
