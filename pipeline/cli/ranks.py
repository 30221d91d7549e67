"""What commands share when torchrun starts them: meet the other ranks, end together, one voice."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from pipeline.cli.failures import explained, print_json
from pipeline.core.errors import QuantizeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.consistency.group import Backend, Group

__all__ = ["rank_session"]

_INTERRUPTED = 130


@contextmanager
def rank_session(
    *, backend: Backend = "auto", limit_s: float, verbose: bool = False, as_json: bool = False
) -> Iterator[Group]:
    """This process's :class:`Group` for the length of the block.

    An error in any rank ends the block in all of them, and the process with the error's exit code: one rank says why,
    with ``as_json`` as a document on its standard output too, and the others are silent. The process ends with
    ``os._exit``, because a collective that a dead rank has left behind would hold up an ordinary exit.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its own warnings about lost peers would drown the reason

    from pipeline.consistency.group import Group, RunEnded
    from pipeline.consistency.launch import Launch, pin_to_cores

    launch = Launch.from_environment()
    pin_to_cores(launch)
    codes = [RunEnded.exit_code]  # the watchers' reasons; an error of this rank brings its own

    def say(text: str) -> None:
        _say(text, codes[-1], as_json=as_json)

    group = Group(launch, limit_s=limit_s, say=say, on_stuck=lambda: _end(1))
    earlier = signal.signal(signal.SIGTERM, lambda *_: group.told_to_end())
    try:
        group.join(backend)
        yield group
        group.leave()
    except BaseException as error:
        if verbose:
            traceback.print_exc()
        shown = explained(error) if isinstance(error, Exception) else error
        interrupted = isinstance(error, KeyboardInterrupt)
        codes.append(_INTERRUPTED if interrupted else shown.exit_code if isinstance(shown, QuantizeError) else 1)
        if not isinstance(error, RunEnded):
            group.fail(shown)
        group.settle()
        _end(codes[-1])
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _say(text: str, code: int, *, as_json: bool) -> None:
    first, _, rest = text.partition("\n")
    if as_json:
        print_json({"error": first, "remedy": rest or None, "exit_code": code})
    lines = [click.style("error: ", fg="red", bold=True) + first, *(f"  {line}" for line in rest.splitlines())]
    click.echo("\n".join(lines), err=True)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
