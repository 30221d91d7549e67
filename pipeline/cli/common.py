"""What the commands share: progress on the terminal and common options; how they end: :mod:`pipeline.cli.failures`."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.cli.failures import JsonCommand, print_json, user_errors
from pipeline.core.progress import Progress, SilentProgress, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console

__all__ = [
    "JsonCommand",
    "LineProgress",
    "QuietProgress",
    "RememberingProgress",
    "TerminalProgress",
    "console",
    "make_progress",
    "output_options",
    "preprocess_option",
    "print_json",
    "same_stream",
    "user_errors",
]

F = TypeVar("F", bound="Callable[..., Any]")
_LINE_SECONDS = 5.0
_FREE_WIDTH = 160
"""Columns of what goes into a file or a pipe, where rich would break names and sentences at 80."""


def console() -> Console:
    """Standard output, for results. Text is printed as it is: names and messages may have brackets in them."""
    from rich.console import Console

    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, markup=False, soft_wrap=False, width=_FREE_WIDTH if free else None)


class TerminalProgress:
    """Bars with rate and time left, on standard error."""

    def __init__(self, *, verbose: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._verbose = verbose

    @contextmanager
    def task(self, description: str, *, total: int | None, unit: str) -> Iterator[Task]:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TaskID,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self._console, transient=False) as bars:
            identifier: TaskID = bars.add_task(description, total=total, rate="")
            start = time.monotonic()

            class _Bar:
                def advance(self, steps: int = 1) -> None:
                    done = bars.tasks[0].completed + steps
                    rate = "" if total == 1 else _rate(done, time.monotonic() - start)
                    bars.update(identifier, advance=steps, rate=rate)

            yield _Bar()

    def note(self, message: str) -> None:
        self._console.print(f"[dim]{_escape(message)}[/dim]")

    def warn(self, message: str) -> None:
        self._console.print(f"[yellow]warning:[/yellow] {_escape(message)}")


class LineProgress:
    """Plain lines on standard error: at the start, every few seconds and at the end of a step."""

    @contextmanager
    def task(self, description: str, *, total: int | None, unit: str) -> Iterator[Task]:
        start = last = time.monotonic()
        done = 0
        whole = "" if total is None else f"/{total}"

        class _Lines:
            def advance(self, steps: int = 1) -> None:
                nonlocal done, last
                done += steps
                now = time.monotonic()
                if done and now - last >= _LINE_SECONDS and done != total:  # the end has a line of its own
                    last = now
                    left = "" if total is None else f", {max(total - done, 0) * (now - start) / done:.0f} s left"
                    click.echo(f"{description}: {done}{whole} {unit}, {_rate(done, now - start)}{left}", err=True)

        click.echo(f"{description} ...", err=True)
        yield _Lines()
        seconds = time.monotonic() - start
        if total == 1:
            click.echo(f"{description}: {'done' if done else 'not done'} in {seconds:.1f} s", err=True)
            return
        rate_text = f" ({_rate(done, seconds)})" if done else ""
        click.echo(f"{description}: {done}{whole} {unit} in {seconds:.1f} s{rate_text}", err=True)

    def note(self, message: str) -> None:
        click.echo(message, err=True)

    def warn(self, message: str) -> None:
        click.echo(f"warning: {message}", err=True)


class RememberingProgress:
    """Passes everything on, and keeps the warnings."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.warned: set[str] = set()

    def task(self, description: str, *, total: int | None, unit: str) -> AbstractContextManager[Task]:
        return self._progress.task(description, total=total, unit=unit)

    def note(self, message: str) -> None:
        self._progress.note(message)

    def warn(self, message: str) -> None:
        self.warned.add(message)
        self._progress.warn(message)


class QuietProgress(SilentProgress):
    """Warnings alone, on standard error."""

    def warn(self, message: str) -> None:
        click.echo(f"warning: {message}", err=True)


def _rate(done: float, seconds: float) -> str:
    """``12.0/s``, or of what is slower than one a second ``8.5 s each``."""
    if not done:
        return ""
    seconds = max(seconds, 1e-6)
    return f"{done / seconds:.1f}/s" if done >= seconds else f"{seconds / done:.1f} s each"


def same_stream() -> bool:
    """Standard output and standard error go to one place, such as a terminal."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):  # no file behind one of them
        return False


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def make_progress(*, quiet: bool, verbose: bool = False) -> Progress:
    if quiet:
        return QuietProgress()
    return (
        TerminalProgress(verbose=verbose)
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        else LineProgress()
    )


preprocess_option = click.option(
    "--preprocess",
    help="Images: preset or key=value;... (resize, crop, mean, std, channels, layout). mean and std are in the order "
    "of the channels as fed; a preset's follow channels: 'imagenet;channels=bgr'.",
)
"""Of the commands that read data for the first time; others take what the build recorded."""


def output_options(function: F) -> F:
    """``--json``, ``--quiet`` and ``-v``, passed on as ``as_json``, ``quiet`` and ``verbose``."""
    function = click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")(function)
    function = click.option("-q", "--quiet", is_flag=True, help="Only warnings on standard error.")(function)
    return click.option("--json", "as_json", is_flag=True, help="Machine-readable summary on standard output.")(
        function
    )
