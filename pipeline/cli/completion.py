"""`quantize completion SHELL`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from pipeline.cli.common import JsonCommand


@click.command(cls=JsonCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    bash and zsh: eval "$(quantize completion bash)"; fish: quantize completion fish | source
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    root = ctx.find_root()
    click.echo(kind(root.command, {}, "quantize", "_QUANTIZE_COMPLETE").source())
