"""`quantize rules`: the placement rules in force, with their reasons and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.cli.common import JsonCommand, console, output_options, print_json, user_errors
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from pipeline.placement.rule import Fixed, Rule


@click.command(cls=JsonCommand)
@click.argument("names", nargs=-1)
@output_options
@user_errors
def command(names: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool) -> None:
    """List the rules that place Q/DQ, in the order in which they run; with NAMES, those, in full.

    The last ones, of stage "fixed", are no rules: what else a decision in `quantize explain` can name.

    A rule is switched off with `quantize build --rule-off NAME`; a package adds its own under the entry-point group
    quantize.placement_rules.
    """
    from pipeline.core.errors import InputError, did_you_mean
    from pipeline.placement.registry import all_rules
    from pipeline.placement.rule import FIXED

    rules: dict[str, Rule | Fixed] = {rule.name: rule for rule in all_rules()} | {each.name: each for each in FIXED}
    if unknown := [name for name in names if name not in rules]:
        raise InputError(f"no rule {unknown[0]!r}; {did_you_mean(unknown[0], rules)}")
    chosen = [rules[name] for name in names] or list(rules.values())
    if as_json:
        print_json([_record(rule) for rule in chosen])
        return
    columns = ("operators", "effect", *(("reason", "source") if names else ()))
    table = new_table("placement rules", ("rule", "word"), *((name, "text") for name in columns), lines=bool(names))
    for rule in chosen:
        record = _record(rule)
        add_row(table, *(record[key] for key in ("name", *columns)))
    print_table(console(), table)


def _record(rule: Rule | Fixed) -> dict[str, str]:
    from pipeline.placement.rule import ANY, Rule

    record = {"name": rule.name, "stage": "fixed", "operators": "all, and cannot be switched off"}
    if isinstance(rule, Rule):
        operators = "all" if rule.ops == ANY else ", ".join(rule.ops)
        record |= {"stage": rule.stage.name.lower(), "operators": operators}
    return record | {"effect": rule.effect, "reason": rule.reason, "source": rule.source}
