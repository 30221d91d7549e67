"""`quantize rules`: the placement rules."""

from __future__ import annotations

import click

from pipeline.cli.common import console, output_options, print_json, user_errors


@click.command()
@click.argument("name", required=False)
@output_options
@user_errors
def command(name: str | None, as_json: bool, quiet: bool, verbose: bool) -> None:
    """List the rules that decide where Q/DQ pairs go, in the order in which they run; NAME shows one in full.

    A rule is switched off with ``rules_off`` under ``placement`` in build.yaml. Other distributions add rules through
    the entry point quantize.placement_rules.
    """
    from rich.table import Table

    from pipeline.core.errors import InputError, did_you_mean
    from pipeline.placement.rule import all_rules

    rules = all_rules()
    if name is not None:
        chosen = [rule for rule in rules if rule.name == name]
        if not chosen:
            raise InputError(f"no placement rule {name!r}; {did_you_mean(name, [rule.name for rule in rules])}")
        rules = tuple(chosen)
    if as_json:
        fields = ("name", "effect", "reason", "source")
        print_json(
            [
                {field: getattr(rule, field) for field in fields}
                | {"stage": rule.stage.name.lower(), "operators": list(rule.ops)}
                for rule in rules
            ]
        )
        return
    out = console()
    if name is not None:
        (rule,) = rules
        out.print(f"[bold]{rule.name}[/bold] ({rule.stage.name.lower()}; {', '.join(rule.ops)})")
        for label, text in (("does", rule.effect), ("because", rule.reason), ("source", rule.source)):
            out.print(f"  {label}: {text}", markup=False)
        return
    table = Table(title="placement rules", title_justify="left")
    for column in ("rule", "stage", "what it does"):
        table.add_column(column)
    for rule in rules:
        table.add_row(rule.name, rule.stage.name.lower(), rule.effect)
    out.print(table)
