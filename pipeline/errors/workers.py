"""Sweeps over many tensors on all cores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from pipeline.core.ort import cpu_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Workers"]

T = TypeVar("T")
R = TypeVar("R")

_WORTH_THREADS = 1 << 18
"""Values below which handing work to other threads costs more than doing it."""


class Workers:
    """Threads for functions that release the interpreter lock."""

    def __init__(self) -> None:
        self._count = cpu_threads()
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="quantize-errors")

    def map(self, function: Callable[[T], R], items: Sequence[T], *, values: int) -> list[R]:
        """``function`` of every item, in order; ``values`` is how many numbers there are to go through in all."""
        if values < _WORTH_THREADS or self._count == 1 or len(items) < 2:
            return [function(item) for item in items]
        # One task per thread, each with every n-th item: large tensors lie together at the start of most networks.
        parts = [items[start :: self._count] for start in range(self._count)]
        done = list(self._pool.map(lambda part: [function(item) for item in part], parts))
        return [done[index % self._count][index // self._count] for index in range(len(items))]
