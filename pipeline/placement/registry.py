"""The placement rules in force: the built-in ones and those of other distributions.

A third-party distribution adds rules in its ``pyproject.toml``; the object is a :class:`Rule` or a sequence of them::

    [project.entry-points."quantize.placement_rules"]
    mine = "my_package.placement:RULES"
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Final

from pipeline.core.errors import InputError, did_you_mean
from pipeline.placement.rule import FIXED, Rule
from pipeline.placement.rules import BUILT_IN

__all__ = ["GROUP", "all_rules", "rules_in_force"]

GROUP: Final = "quantize.placement_rules"


def all_rules() -> tuple[Rule, ...]:
    """Built-in rules and those of other distributions, in the order in which they run.

    Raises:
        InputError: two rules of one name, a rule with a name of ``FIXED``, or an entry point that cannot be loaded or
            gives no rules.
    """
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
    names = [*(rule.name for rule in rules), *(fixed.name for fixed in FIXED)]
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
        if name in {fixed.name for fixed in FIXED}:
            raise InputError(
                f"rules_off names {name!r}, which is no rule and cannot be switched off",
                remedy="`quantize rules` lists the rules",
            )
        if name not in known:
            raise InputError(
                f"rules_off names the placement rule {name!r}; {did_you_mean(name, known)}",
                remedy="`quantize rules` lists them",
            )
    return tuple(rule for rule in rules if rule.name not in off)
