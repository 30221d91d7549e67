"""Operators that onnxruntime lacks: calibration and verification run there, so they are named before anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.onnxgraph import all_graphs

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["check_operators"]

_LISTED = 20


def check_operators(model: ir.Model) -> None:
    """Check every node of ``model``, whose local functions are inlined.

    Raises:
        InputError: some operators are unknown to onnxruntime; all their nodes are listed.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    known = {("" if schema.domain == "ai.onnx" else schema.domain, schema.name) for schema in get_all_operator_schema()}
    unknown = [
        f"{node.name or '(unnamed)'} ({node.domain + ':' if node.domain else ''}{node.op_type})"
        for graph in all_graphs(model)
        for node in graph
        if ("" if node.domain == "ai.onnx" else node.domain, node.op_type) not in known
    ]
    if unknown:
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        raise InputError(
            f"{len(unknown)} nodes have operators that onnxruntime does not know, where the model is calibrated and "
            f"verified: {', '.join(unknown[:_LISTED])}{more}",
            remedy="express them with standard ONNX operators, or as functions in the model",
        )
