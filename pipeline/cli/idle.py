"""Options that do nothing in the mode that was asked for.

:func:`refuse_idle` is for commands without a configuration. Those with one have a table (:mod:`pipeline.combinations`):
:func:`without_idle` leaves out what comes from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pipeline.combinations import Idle
    from pipeline.core.progress import Progress

__all__ = ["RANK_OPTIONS", "refuse_idle", "without_idle"]

T = TypeVar("T")

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


def without_idle(
    values: dict[str, Any],
    asked: Callable[[dict[str, Any]], tuple[T, Sequence[Idle]]],
    *,
    typed: Collection[str],
    origin: str,
    progress: Progress,
) -> tuple[T, Sequence[Idle]]:
    """What ``values`` ask for without what comes from the file and does nothing: a warning each, for one file may serve
    several machines.

    Args:
        values: of the configuration.
        asked: what they ask for, and which of them do nothing; asked again where some were left out, for others may
            have needed those.
        typed: keys of options from the command line, dotted.
        origin: the file.

    Returns:
        The last answer; only options that were typed are left in it.
    """
    while True:
        found, idle = asked(values)
        from_file = [each for each in idle if each.option.key not in typed]
        if not from_file:
            return found, idle
        for each in from_file:
            progress.warn(f"{origin}: {each.option.key} has no effect here: {each.reason}")
            values = _without(values, each.option.key)


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    first, dot, rest = key.partition(".")
    if dot:
        return {**values, first: _without(values[first], rest)}
    return {name: value for name, value in values.items() if name != first}
