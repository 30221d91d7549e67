"""Child processes for calls that can end the process: TensorRT has several.

The child reports events, one JSON object a line, through a pipe of its own; what its libraries print goes to a log, of
which the end is shown when it dies. It dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "Reporter", "Sampler", "die_with_parent", "python_command", "run_child"]

_ROOT = Path(__file__).resolve().parents[2]
_BOOT = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(10)); from importlib import import_module; "
    "import_module(sys.argv[2]).main(sys.argv[3:])"
)
_PR_SET_PDEATHSIG = 1
_LOG_BYTES = 4000


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that calls ``module.main(arguments)`` in a new Python with this one's import path.

    The current folder is not on that path: a user's own ``pipeline`` or ``json`` module there cannot get in between.
    """
    paths = [str(_ROOT), *(path for path in sys.path if path and path != str(_ROOT))]
    return [sys.executable, "-c", _BOOT, "\n".join(paths), module, *arguments]


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    """Exit status; negative: the signal that ended it."""
    timed_out: bool
    log: str
    """The end of what the child's libraries printed."""

    @property
    def how(self) -> str:
        if self.status < 0:
            try:
                return f"signal {signal.Signals(-self.status).name}"
            except ValueError:
                return f"signal {-self.status}"
        return f"exit status {self.status}"


def run_child(
    module: str, arguments: list[str], *, on_event: Callable[[dict[str, Any]], None], timeout_s: float | None
) -> Ended:
    """Run ``module.main(arguments + [file descriptor of the pipe])`` and hand its events over as they come.

    An exception from ``on_event`` (an interrupt too) ends the child and goes on.
    """
    receive, send = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(receive, "rb") as events:
        try:
            child = subprocess.Popen(
                python_command(module, *arguments, str(send)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(send,),
                start_new_session=True,
            )
        finally:
            os.close(send)
        late = threading.Event()

        def stop() -> None:
            late.set()
            _kill(child.pid)

        timer = threading.Timer(timeout_s, stop) if timeout_s is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            for line in events:
                if line.endswith(b"\n"):  # else: it died while writing
                    on_event(json.loads(line))
            child.wait()
        except BaseException:
            _kill(child.pid)
            child.wait()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
        text = log.read().decode(errors="replace").strip()
    return Ended(status=child.returncode, timed_out=late.is_set(), log=text)


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class Reporter:
    """The child's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", buffering=1)
        self._lock = threading.Lock()

    def send(self, event: str, **fields: Any) -> None:
        """One event, at once: the parent has it even when the next call ends this process."""
        line = json.dumps({"event": event, **fields})
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends; elsewhere nothing happens."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it ended in between
        os._exit(1)


class Sampler:
    """Calls ``read`` every ``period_s`` in a thread and keeps the largest answer."""

    def __init__(self, read: Callable[[], int | None], period_s: float = 0.05) -> None:
        self._read, self._period_s = read, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.first = read()
        self.largest = self.first

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            value = self._read()
            if value is not None:
                self.largest = value if self.largest is None else max(self.largest, value)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int | None:
        """Largest minus first; None where nothing could be read."""
        return None if self.first is None or self.largest is None else self.largest - self.first
