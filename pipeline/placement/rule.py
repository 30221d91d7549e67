"""What a placement rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["ANY", "FIXED", "Fixed", "Rule", "Stage"]

ANY: Final = ("*",)
"""For :attr:`Rule.ops`: every operator."""


class Stage(IntEnum):
    """When a rule runs; within a stage, in the order of the list."""

    KEEP = 0
    """Names nodes that stay float although a later rule would quantise them. Nodes that the user includes are passed
    by."""
    WEIGHTED = 1
    """Quantises the operands of convolutions and matrix products."""
    STRUCTURE = 2
    """Pairs in the paths between them. Run again until nothing changes."""
    RANGE = 3
    """Ranges that follow from the graph."""
    EXPLAIN = 4
    """Says why the remaining nodes stay float. Changes no pair."""


@dataclass(frozen=True)
class Rule:
    """One reason to quantise, or not to quantise, a node.

    ``visit`` is called for every node whose operator is in ``ops``, in graph order, and asks through the draft.
    """

    name: str
    """Unique; what ``rules_off`` and ``quantize explain`` use."""
    stage: Stage
    ops: tuple[str, ...]
    effect: str
    """What it does, one line."""
    reason: str
    """Why, in terms of TensorRT or of accuracy."""
    source: str
    """Where that is known from."""
    visit: Callable[[Draft, ir.Node], None]


@dataclass(frozen=True)
class Fixed:
    """What a decision may name in place of a rule: nothing that looks at nodes, and nothing to switch off."""

    name: str
    effect: str
    reason: str
    source: str


FIXED: Final = (
    Fixed(
        name="user",
        effect="carries out --include and --exclude; a search for mixed precision excludes nodes in the same way",
        reason="what the user asks for by name goes before every rule",
        source="the command line, build.yaml or PlacementConfig",
    ),
    Fixed(
        name="existing",
        effect="keeps the Q/DQ pairs that a model comes with, and adds none",
        reason="the scales are those it was trained or calibrated with; a second quantisation would add its error",
        source="the model file",
    ),
    Fixed(
        name="default",
        effect="leaves every other node float",
        reason="no rule knows an INT8 form of its operator",
        source="ONNX operator definitions",
    ),
)
