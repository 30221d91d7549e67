"""The ranks' blackboard: small values under names, kept by torch's TCPStore. One object per thread."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ToolError
from pipeline.core.lazy import require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.consistency.launch import Launch

__all__ = ["Board", "BoardGone", "Questions"]


class BoardGone(ToolError):
    """The process that keeps the board does not answer any more."""


class Questions:
    """The calls that wait for an answer of the board, from any thread. The client itself may wait without end."""

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, float]] = {}

    @contextmanager
    def asking(self, allowed_s: float) -> Iterator[None]:
        """A call that should be answered within ``allowed_s`` seconds."""
        token, now = object(), time.monotonic()
        self._due[token] = (now, now + allowed_s)
        try:
            yield
        finally:
            del self._due[token]

    def overdue_s(self) -> float | None:
        """How long the most overdue call has waited; None when none is overdue."""
        now = time.monotonic()
        return max((now - asked for asked, due in list(self._due.values()) if now > due), default=None)


class Board:
    """A connection of its own: calls of one connection wait for each other, and no thread may hold up another."""

    def __init__(self, launch: Launch, timeout_s: float, questions: Questions, *, limit_s: float, keeper: bool) -> None:
        """Connect, or, for the ``keeper``, open the board.

        Args:
            timeout_s: for connecting, as the client sees it.
            limit_s: for every call, connecting included, as told to ``questions``.

        Raises:
            BoardGone: nobody answers at the address for ``timeout_s`` seconds, or the port is taken.
        """
        distributed = require("torch.distributed", extra="dev", purpose="a run over several ranks")
        where = f"{launch.host}:{launch.port}"
        who = "the launcher" if launch.store_exists else "rank 0"
        self._keeper = f"{who}, which keeps the ranks' common store at {where},"
        self._questions, self._limit_s = questions, limit_s
        try:
            with questions.asking(limit_s):
                self.store: Any = distributed.TCPStore(
                    launch.host,
                    launch.port,
                    is_master=keeper,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=timeout_s),
                )
            self._keys = distributed.PrefixStore(f"quantize/{launch.attempt}", self.store)
        except RuntimeError as error:  # torch's DistError family derives from it
            raise BoardGone(
                f"{self._keeper} cannot be reached: {_first_line(error)}",
                remedy="see whether it has started, and check its address and port (MASTER_ADDR, MASTER_PORT)",
            ) from error

    @property
    def port(self) -> int:
        return int(self.store.port)

    @property
    def keys(self) -> Any:
        """The store under our own prefix, for torch's own use."""
        return self._keys

    def put(self, name: str, value: str) -> None:
        self._call("set", name, value)

    def take(self, name: str) -> str | None:
        """The value, or None where nobody has put one."""
        return self._call("get", name).decode() if self.has(name) else None

    def has(self, name: str) -> bool:
        return bool(self._call("check", [name]))

    def count(self, name: str) -> int:
        """Count one more under ``name``; the new count."""
        return int(self._call("add", name, 1))

    def claim(self, name: str, value: str) -> str:
        """Put ``value`` where nobody has put one; what stands there then."""
        return bytes(self._call("compare_set", name, "", value)).decode()

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            with self._questions.asking(self._limit_s):
                return getattr(self._keys, method)(*arguments)
        except RuntimeError as error:
            raise BoardGone(f"{self._keeper} does not answer: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
