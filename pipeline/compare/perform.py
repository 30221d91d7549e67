"""A task done in this process: the function that it names, on its files and options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipeline.compare.evaluate import layer_errors, outputs
from pipeline.compare.moments import moments
from pipeline.core.errors import InputError, QuantizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.compare.task import Done, FileSet, Task

__all__ = ["FUNCTIONS", "perform"]

FUNCTIONS: Final[Mapping[str, Callable[[Mapping[str, FileSet], Mapping[str, Any]], Done]]] = {
    "layers": layer_errors,
    "moments": moments,
    "outputs": outputs,
}


def perform(task: Task) -> Done:
    """Do the work in this process.

    Raises:
        QuantizeError: its message begins with the task's label.
    """
    if task.function not in FUNCTIONS:
        raise InputError(f"there is no task {task.function!r}")
    try:
        return FUNCTIONS[task.function](task.files, task.options)
    except QuantizeError as error:
        error.message = f"{task.label}: {error.message}"
        raise
