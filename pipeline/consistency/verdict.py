"""The one reason why a run over several ranks has ended early, and who tells the user."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.consistency.board import BoardGone
from pipeline.core.errors import CheckFailed, ToolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.consistency.board import Board
    from pipeline.consistency.launch import Launch

__all__ = ["RanksDiffer", "RunEnded", "Verdict"]

_REMEDY = (
    "no partial result was written; start the run again (--rank-timeout sets how long a rank may take for one step)"
)


class RunEnded(ToolError):
    """The run over several ranks has ended early, for the reason that the first rank to know it gave."""


class RanksDiffer(CheckFailed):
    """The ranks hold different things; the message says which ranks."""


class Verdict:
    """Written on the board once, by the first rank that knows a reason; that rank says it. Used from any thread."""

    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self._launch, self._say = launch, say
        self._lock = threading.Lock()
        self._stands: dict[str, Any] | None = None

    def raise_if_ended(self) -> None:
        if self._stands is not None:
            raise RunEnded(self._stands["message"], remedy=self._stands["remedy"])

    def look(self, board: Board) -> bool:
        """Whether the run has ended, here or in another rank."""
        if self._stands is None and (text := board.take("verdict")) is not None:
            self._stands = json.loads(text)
            board.put(f"ended/{self._launch.rank}", "")
        return self._stands is not None

    def end(self, reason: str, board: Board, *, remedy: str | None = None) -> None:
        """Give the run's reason, which names the rank it is about, unless there is one."""
        with self._lock:
            if self._stands is not None:
                return
            mine = {"by": self._launch.rank, "message": reason, "remedy": remedy or _REMEDY}
            written = json.dumps(mine)
            try:
                stands = board.claim("verdict", written)
                board.put(f"ended/{self._launch.rank}", "")
                speaks = stands == written
            except BoardGone:
                stands, speaks = written, self._first_on_machine()
            self._stands = json.loads(stands)
            if speaks:
                self._say(f"{reason}\n{mine['remedy']}")

    def end_alone(self, reason: str, *, remedy: str | None = None) -> None:
        """Give the reason where the board does not answer. Takes no lock: its holder may be waiting for the board."""
        if self._stands is None:
            self._stands = {"by": self._launch.rank, "message": reason, "remedy": remedy or _REMEDY}
            if self._first_on_machine():
                self._say(f"{reason}\n{remedy or _REMEDY}")

    def _first_on_machine(self) -> bool:
        """Without a board, the first rank of each machine that knows a reason says it; an empty file makes it first.

        The file's name is that of this run: where the board was, the attempt, and the launcher's process.
        """
        launch = self._launch
        name = f"quantize-{launch.host}-{launch.port}-{launch.attempt}-{os.getppid()}.ended"
        try:
            (Path(tempfile.gettempdir()) / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # a full or read-only disk: better twice than never
            return True
        return True
