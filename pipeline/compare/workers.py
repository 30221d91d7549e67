"""Who performs the tasks: threads of this process, or a Ray cluster.

A task's onnxruntime sessions have one thread each and release the interpreter lock while they compute, so threads of
one process use all its cores.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pipeline.compare.perform import perform
from pipeline.core.ort import cpu_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.compare.task import Done, Task
    from pipeline.core.progress import Progress

__all__ = ["Workers", "open_workers"]


class Workers(Protocol):
    """Performs tasks; called from :attr:`count` threads at a time."""

    @property
    def count(self) -> int:
        """Tasks that can run at a time."""

    def perform(self, task: Task) -> Done:
        """Wait for the task's result.

        Raises:
            QuantizeError: as the task says; ToolError when its worker was lost again and again.
        """


class _InProcess:
    def __init__(self, count: int) -> None:
        self.count = count

    def perform(self, task: Task) -> Done:
        return perform(task)


@contextmanager
def open_workers(count: int | None, address: str | None, progress: Progress) -> Iterator[Workers]:
    """The workers for one experiment.

    Args:
        count: tasks at a time; None: one per core of this process, or of the cluster.
        address: of a running Ray cluster; None: Ray on this machine when ``count`` is above 1 and Ray is installed,
            otherwise this process.

    Raises:
        InputError: an address is given and Ray is missing, or the cluster does not answer.
    """
    if address is None and (count is None or count == 1 or not _ray_installed()):
        if count is not None and count > 1:
            progress.note(f"Ray is not installed (extra 'cluster'): {count} evaluations at a time in this process")
        yield _InProcess(count or cpu_threads())
        return
    from pipeline.compare.cluster import ray_workers

    with ray_workers(count, address, progress) as workers:
        yield workers


def _ray_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("ray") is not None
