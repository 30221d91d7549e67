"""Options that were typed and do nothing in the mode that was asked for: refused, for commands without a configuration.

`quantize build` has :mod:`pipeline.combinations` for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["RANK_OPTIONS", "refuse_idle"]

RANK_OPTIONS = ("shards", "backend", "rank_timeout")
"""Parameters of a run that torchrun started."""


def refuse_idle(names: Collection[str], need: str, remedy: str) -> None:
    """Refuse the first of the running command's options ``names`` that was typed, whatever its value.

    Args:
        names: parameters that do nothing here.
        need: what they are for, such as ``the engine's layers``.
        remedy: what would give them an effect, such as ``give --engine as well``.

    Raises:
        InputError: one was typed.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        typed = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if parameter.name in names and typed:
            flag = max(parameter.opts, key=len)
            raise InputError(f"{flag} has no effect here: it is for {need}", remedy=f"{remedy}, or leave {flag} out")
