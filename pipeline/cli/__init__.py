"""The command line. This module only lists the commands; each is loaded when it is used, so that help stays fast."""

from __future__ import annotations

import importlib
from typing import Any

import click

from pipeline import __version__
from pipeline.cli.failures import usage_errors
from pipeline.core.errors import did_you_mean

COMMANDS = {
    "build": ("pipeline.cli.build", "Model and data in, verified INT8 artifact with engines out."),
    "init": ("pipeline.cli.init", "Write a commented build.yaml to start from."),
    "inspect": ("pipeline.cli.inspect", "Show an artifact, or one of its engines, as tables."),
    "verify": ("pipeline.cli.verify", "Re-hash an artifact; run its engine on the recorded samples."),
    "calibrate": ("pipeline.cli.calibrate", "The statistics alone: one pass, in shards, merged, under torchrun."),
    "histogram": ("pipeline.cli.histogram", "Draw a tensor's distribution with every calibrator's threshold."),
    "compare": ("pipeline.cli.compare", "Calibration experiments: which calibrator to trust, also under shift."),
    "drift": ("pipeline.cli.drift", "Have the ranges of recent data moved away from the calibrated ones?"),
    "errors": ("pipeline.cli.errors", "Where the accuracy went: the error report, made anew."),
    "diff": ("pipeline.cli.diff", "Two artifacts, layer by layer."),
    "rules": ("pipeline.cli.rules", "The rules that place Q/DQ, with their reasons."),
    "explain": ("pipeline.cli.explain", "Why each node is quantised or not, and with which scale."),
    "consistency": ("pipeline.cli.consistency", "Are the scales the same everywhere?"),
    "bench": ("pipeline.cli.bench", "Measure engines on the card in this machine."),
    "coverage": ("pipeline.cli.coverage", "Which share of real requests the profiles cover."),
    "doctor": ("pipeline.cli.doctor", "Which targets work on this machine, and why the others do not."),
    "completion": ("pipeline.cli.completion", "Print the shell completion script."),
}


class LazyGroup(click.Group):
    """A group whose subcommands are modules with a ``command``, imported on use."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with usage_errors(args):
            return super().make_context(info_name, args, parent, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name][0]}.command is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        with usage_errors(args):
            if args and args[0] not in COMMANDS and not args[0].startswith("-"):
                ctx.fail(f"no such command {args[0]!r}; {did_you_mean(args[0], COMMANDS)}")
            return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantize")
def main() -> None:
    """INT8 quantisation for TensorRT: exact, fast, and honest about every layer."""
