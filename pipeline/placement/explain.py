"""Plan and scales joined: for each node what was decided, by which rule, and the scales of what it reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from pipeline.core.errors import InputError
from pipeline.placement.plan import NodeDecision, PlacementPlan
from pipeline.records import Record

__all__ = ["FloatTypes", "NodeExplanation", "Operand", "explain_nodes", "load_explained", "select_nodes"]


class Operand(Record):
    """One input of a node that reads INT8."""

    index: int
    tensor: str
    kind: str
    """``activation`` or ``weights``."""
    scales: tuple[float, ...] = ()
    """One of an activation, one or one per channel of weights; none when no ``scales.json`` is at hand."""
    axis: int | None = None
    calibrator: str | None = None
    group: tuple[str, ...] = ()
    """All tensors that share the scale, where there are others."""

    def __str__(self) -> str:
        if not self.scales:
            return f"{self.tensor}: {self.kind}"
        if len(self.scales) > 1:
            span = f"{min(self.scales):.6g} to {max(self.scales):.6g}"
            return f"{self.tensor}: scale {span} ({len(self.scales)} channels, axis {self.axis})"
        shared = [name for name in self.group if name != self.tensor]
        origin = f" ({self.calibrator})" if self.calibrator else ""
        return f"{self.tensor}: scale {self.scales[0]:.6g}{origin}" + (
            f", shared with {', '.join(shared)}" if shared else ""
        )


class NodeExplanation(Record):
    """Everything about one node."""

    decision: NodeDecision
    operands: tuple[Operand, ...]
    fp16: bool = False
    """A float node that computes in FP16 by the graph's own types."""
    not_fp16: str = ""
    """Why a node stays float32 where others compute in FP16."""


class FloatTypes(Record):
    """What ``--precision fp16`` did to the nodes that are not INT8."""

    fp16: tuple[str, ...] = ()
    not_fp16: dict[str, str] = Field(default_factory=dict)
    """Node that stays float32 although it could be FP16 -> why."""


def load_explained(placement: Path, scales: Path) -> tuple[PlacementPlan, dict[str, Any], FloatTypes]:
    """The plan in ``placement.json``, the content of ``scales.json``, and the float types in the former.

    Raises:
        InputError: a file cannot be read or is none of ours.
    """
    try:
        raw = json.loads(placement.read_text())
        plan = PlacementPlan.model_validate({key: raw[key] for key in PlacementPlan.model_fields if key in raw})
        types = FloatTypes.model_validate({key: raw[key] for key in FloatTypes.model_fields if key in raw})
        found: dict[str, Any] = json.loads(scales.read_text())
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, ValidationError) as error:
        raise InputError(f"{placement} or {scales.name} beside it was not written by this program: {error}") from error
    return plan, found, types


def explain_nodes(
    plan: PlacementPlan, scales: Mapping[str, Any], types: FloatTypes | None = None
) -> list[NodeExplanation]:
    """One explanation per node, in graph order. ``scales``: as in ``scales.json``, or empty."""
    types = types or FloatTypes()
    halves = set(types.fp16)
    tensors, weights = scales.get("tensors", {}), scales.get("weights", {})
    groups: dict[str, list[str]] = {}
    for point in plan.activations:
        if point.group is not None:
            groups.setdefault(point.group, []).append(point.tensor)
    operands: dict[str, list[Operand]] = {}
    for point in plan.activations:
        entry = tensors.get(point.tensor)
        for node, index in point.consumers:
            operand = Operand(
                index=index,
                tensor=point.tensor,
                kind="activation",
                scales=() if entry is None else (entry["scale"],),
                calibrator=None if entry is None else entry["calibrator"],
                group=tuple(groups.get(point.group or "", ())),
            )
            operands.setdefault(node, []).append(operand)
    for weight in plan.weights:
        own = weights.get(weight.tensor, {}).get("scale", ())
        operand = Operand(
            index=weight.input_index, tensor=weight.tensor, kind="weights", scales=tuple(own), axis=weight.axis
        )
        operands.setdefault(weight.node, []).append(operand)
    for tensor, entry in weights.items() if plan.prequantized else ():  # the plan adds none
        operand = Operand(
            index=entry["input"], tensor=tensor, kind="weights", scales=tuple(entry["scale"]), axis=entry["axis"]
        )
        operands.setdefault(entry["node"], []).append(operand)
    explained = []
    for decision in plan.decisions:
        found = sorted(operands.get(decision.node, ()), key=lambda operand: operand.index)
        explained.append(
            NodeExplanation(
                decision=decision,
                operands=tuple(found),
                fp16=decision.node in halves,
                not_fp16=types.not_fp16.get(decision.node, ""),
            )
        )
    return explained


def select_nodes(nodes: Sequence[NodeExplanation], wanted: str) -> list[NodeExplanation]:
    """Nodes by name or output tensor, else by shell pattern, else by operator type.

    Raises:
        InputError: nothing matches.
    """
    for found in (
        [node for node in nodes if node.decision.node == wanted or wanted in node.decision.outputs],
        [node for node in nodes if fnmatchcase(node.decision.node, wanted)],
        [node for node in nodes if node.decision.op == wanted],
    ):
        if found:
            return found
    near = get_close_matches(wanted, [node.decision.node for node in nodes], n=1, cutoff=0.4)
    raise InputError(
        f"no node is called or matched by {wanted!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
        remedy="give a node name, an output tensor, a pattern such as '*/conv1*' or an operator such as Conv",
    )
