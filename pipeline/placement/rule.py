"""What a placement rule is, and the list of those in force.

A third-party distribution adds rules in its ``pyproject.toml``; the object is a :class:`Rule` or a sequence of them::

    [project.entry-points."quantize.placement_rules"]
    mine = "my_package.placement:RULES"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from pipeline.core.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipeline.placement.draft import Draft

__all__ = ["ANY", "GROUP", "Rule", "Stage", "all_rules", "rules_in_force"]

GROUP: Final = "quantize.placement_rules"
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


def all_rules() -> tuple[Rule, ...]:
    """Built-in rules and those of other distributions, in the order in which they run.

    Raises:
        InputError: two rules of one name, or an entry point that cannot be loaded or gives no rules.
    """
    from pipeline.placement.rules import BUILT_IN

    rules = list(BUILT_IN)
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            found = point.load()
        except (ImportError, AttributeError) as error:
            raise InputError(f"placement rules {point.name!r} ({point.value}) cannot be loaded: {error}") from error
        extra = [found] if isinstance(found, Rule) else list(found) if isinstance(found, Sequence) else [found]
        if wrong := [item for item in extra if not isinstance(item, Rule)]:
            raise InputError(
                f"placement rules {point.name!r} ({point.value}) hold a {type(wrong[0]).__name__}, expected Rule"
            )
        rules += extra
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"two placement rules are called {twice[0]!r}",
            remedy=f"uninstall one of the distributions that add rules through the entry point {GROUP}",
        )
    return tuple(sorted(rules, key=lambda rule: rule.stage))


def rules_in_force(off: Sequence[str]) -> tuple[Rule, ...]:
    """All rules but those named in ``off``.

    Raises:
        InputError: ``off`` names a rule that does not exist.
    """
    rules = all_rules()
    known = [rule.name for rule in rules]
    for name in off:
        if name not in known:
            raise InputError(
                f"rules_off names the placement rule {name!r}; {did_you_mean(name, known)}",
                remedy="`quantize rules` lists them",
            )
    return tuple(rule for rule in rules if rule.name not in off)
