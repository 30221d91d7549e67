"""One piece of work that any process on any machine can do: which function, on which files, with which options.

A task holds paths, hashes and JSON values only, and its result is a mapping of arrays; so it can be sent anywhere, and
the result depends on nothing but the task: every onnxruntime session in it has one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError, QuantizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.records import Dependency

__all__ = ["Arrays", "Done", "FileSet", "Task", "perform"]

Arrays: TypeAlias = "dict[str, np.ndarray[Any, np.dtype[Any]]]"


@dataclass(frozen=True)
class FileSet:
    """A file and those it refers to, all in one folder."""

    folder: Path
    names: tuple[str, ...]
    """The file itself first."""
    digests: tuple[str, ...]
    """SHA-256 of each."""

    @property
    def path(self) -> Path:
        return self.folder / self.names[0]


@dataclass(frozen=True)
class Done:
    """What a task gives back."""

    arrays: Arrays
    dependencies: tuple[Dependency, ...] = ()
    """Files that the user's code read."""


@dataclass(frozen=True)
class Task:
    """``function`` is a key of :data:`FUNCTIONS`; it says which files and options it takes."""

    label: str
    """For messages and progress."""
    function: str
    files: Mapping[str, FileSet]
    options: Mapping[str, Any]


def perform(task: Task) -> Done:
    """Do the work in this process.

    Raises:
        QuantizeError: its message begins with the task's label.
    """
    from pipeline.compare.evaluate import layer_errors, outputs
    from pipeline.compare.moments import moments

    functions: dict[str, Callable[[Mapping[str, FileSet], Mapping[str, Any]], Done]] = {
        "layers": layer_errors,
        "moments": moments,
        "outputs": outputs,
    }
    if task.function not in functions:
        raise InputError(f"there is no task {task.function!r}")
    try:
        return functions[task.function](task.files, task.options)
    except QuantizeError as error:
        error.message = f"{task.label}: {error.message}"
        raise
