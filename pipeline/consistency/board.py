"""The ranks' blackboard: small values under names, kept by torch's TCPStore. One object per thread."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ToolError
from pipeline.core.lazy import require

if TYPE_CHECKING:
    from pipeline.consistency.launch import Launch

__all__ = ["Board", "BoardGone"]


class BoardGone(ToolError):
    """The process that keeps the board does not answer any more."""


class Board:
    """A connection of its own: calls of one connection wait for each other, and no thread may hold up another."""

    def __init__(self, launch: Launch, timeout_s: float, *, keeper: bool) -> None:
        """Connect, or, for the ``keeper``, open the board.

        Raises:
            BoardGone: nobody answers at the address for ``timeout_s`` seconds, or the port is taken.
        """
        distributed = require("torch.distributed", extra="dev", purpose="a run over several ranks")
        self._where = f"{launch.host}:{launch.port}"
        try:
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
                f"rank {launch.rank} cannot reach the ranks' common store at {self._where}: {_first_line(error)}",
                remedy="check that the first machine has started, and its address and port (MASTER_ADDR, MASTER_PORT)",
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
            return getattr(self._keys, method)(*arguments)
        except RuntimeError as error:
            raise BoardGone(
                f"the ranks' common store at {self._where} does not answer: {_first_line(error)}"
            ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
