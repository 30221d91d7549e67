"""Plan and scales joined: for each node what was decided, by which rule, and the scales of what it reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.core.errors import InputError
from pipeline.placement.plan import NodeDecision, PlacementPlan
from pipeline.records import Record

__all__ = ["NodeExplanation", "Operand", "explain_nodes", "load_explained", "select_nodes"]


class Operand(Record):
    """One input of a node that reads INT8."""

    index: int
    tensor: str
    kind: str
    """``activation`` or ``weights``."""
    scale: float | None
    """Of an activation; the greatest of per-channel weights; None when no scales are at hand."""
    amax: float | None = None
    channels: int | None = None
    """Number of scales of per-channel weights."""
    axis: int | None = None
    group: tuple[str, ...] = ()
    """All tensors that share the scale, where there are others."""


class NodeExplanation(Record):
    """Everything about one node."""

    decision: NodeDecision
    operands: tuple[Operand, ...]


def load_explained(placement: Path, scales: Path | None) -> tuple[PlacementPlan, dict[str, Any]]:
    """The plan in ``placement.json`` and the content of ``scales.json`` (empty without one).

    Raises:
        InputError: a file is missing or is none of ours.
    """
    try:
        raw = json.loads(placement.read_text())
        plan = PlacementPlan.model_validate({key: raw[key] for key in PlacementPlan.model_fields})
        found = {} if scales is None else json.loads(scales.read_text())
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise InputError(f"{placement} is no placement.json of this program: {error}") from error
    return plan, found


def explain_nodes(plan: PlacementPlan, scales: Mapping[str, Any]) -> list[NodeExplanation]:
    """One explanation per node, in graph order."""
    tensors, weights = scales.get("tensors", {}), scales.get("weights", {})
    groups: dict[str, list[str]] = {}
    for point in plan.activations:
        if point.group is not None:
            groups.setdefault(point.group, []).append(point.tensor)
    operands: dict[str, list[Operand]] = {}
    for point in plan.activations:
        entry = tensors.get(point.tensor, {})
        for node, index in point.consumers:
            operands.setdefault(node, []).append(
                Operand(
                    index=index,
                    tensor=point.tensor,
                    kind="activation",
                    scale=entry.get("scale"),
                    amax=entry.get("amax"),
                    group=tuple(groups.get(point.group or "", ())),
                )
            )
    for weight in plan.weights:
        entry = weights.get(weight.tensor, {})
        own = entry.get("scale") or []
        operands.setdefault(weight.node, []).append(
            Operand(
                index=weight.input_index,
                tensor=weight.tensor,
                kind="weights",
                scale=max(own, default=None),
                amax=max(entry.get("amax") or [], default=None),
                channels=len(own) or None,
                axis=weight.axis,
            )
        )
    return [
        NodeExplanation(
            decision=decision,
            operands=tuple(sorted(operands.get(decision.node, ()), key=lambda operand: operand.index)),
        )
        for decision in plan.decisions
    ]


def select_nodes(nodes: Sequence[NodeExplanation], wanted: str) -> list[NodeExplanation]:
    """Nodes by name, output tensor, shell pattern or operator type, in that order of precedence.

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
        f"no node is called {wanted!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
        remedy="give a node name, an output tensor, a pattern such as '*/conv1*' or an operator such as Conv",
    )
