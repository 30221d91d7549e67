"""Progress as a typed callback: library code reports, the command line draws.

Stages take a :class:`Progress`; :data:`SILENT` is the default for use from Python.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = ["SILENT", "Progress", "SilentProgress", "Task"]


class Task(Protocol):
    """One long step in progress."""

    def advance(self, steps: int = 1) -> None:
        """``steps`` more units are done."""


class Progress(Protocol):
    """Where a stage says what it does."""

    def task(self, description: str, *, total: int | None, unit: str) -> AbstractContextManager[Task]:
        """Open a step of ``total`` units (None: unknown); ``unit`` is a plural noun, such as ``images``."""

    def note(self, message: str) -> None:
        """A line worth reading: what was decided or skipped, and why."""

    def warn(self, message: str) -> None:
        """A line the user should act on."""


class _SilentTask:
    def advance(self, steps: int = 1) -> None:
        """Say nothing."""


class SilentProgress:
    """Reports nothing."""

    @contextmanager
    def task(self, description: str, *, total: int | None, unit: str) -> Iterator[Task]:
        yield _SilentTask()

    def note(self, message: str) -> None:
        """Say nothing."""

    def warn(self, message: str) -> None:
        """Say nothing."""


SILENT: Progress = SilentProgress()
