"""The parent's side of the child process that runs the user's code."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError, ToolError
from pipeline.core.files import sha256_file
from pipeline.records import Dependency
from pipeline.usercode.child.framing import read_message, write_all, write_message

if TYPE_CHECKING:
    from types import TracebackType

    from pipeline.usercode.spec import CodeSpec

__all__ = ["UserProcess"]

_START = Path(__file__).with_name("start.py")
_POLL_MS = 500
_TAIL_LINES = 15
_TAIL_COLUMNS = 200
_TAIL_BYTES = 16_384
_TERMINATE_S = 2.0
_Array = np.ndarray[Any, np.dtype[Any]]


class UserProcess:
    """One run of the user's code. A context manager: leaving it ends the child and everything the child started."""

    def __init__(self, code: CodeSpec, task: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """Start the child.

        Args:
            code: what to import.
            task: ``{"task": "samples" | "export" | "metric", ...}``, JSON values only.
            timeout_s: seconds after which the child is ended with a :class:`ToolError`; None: never.
        """
        self._code = code
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._opened: list[str] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        child_read, self._write = os.pipe()
        self._read, child_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(_START), str(child_read), str(child_write)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(child_read, child_write),
                start_new_session=True,
            )
        finally:
            os.close(child_read)
            os.close(child_write)
        message = {
            **task,
            "directory": str(code.directory),
            "file": None if code.file is None else str(code.file),
            "module": code.module,
            "attribute": code.attribute,
        }
        with suppress(BrokenPipeError):  # a child that is gone already is explained by receive
            write_message(self._write, message)

    def __enter__(self) -> UserProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        self._end()
        self._output.close()

    def _end(self) -> None:
        # The group outlives the child where the user's code has started processes of its own.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)

    def answer(self, wanted: bool) -> None:
        """Tell the child whether the next sample is wanted."""
        with suppress(BrokenPipeError):
            write_all(self._write, b"1" if wanted else b"0")

    def send(self, header: dict[str, Any], arrays: dict[str, _Array]) -> None:
        """Send the child a message; one that is gone already is explained by :meth:`receive`."""
        with suppress(BrokenPipeError):
            write_message(self._write, header, arrays)

    def receive(self) -> tuple[dict[str, Any], dict[str, _Array]]:
        """The child's next message: its header and arrays.

        Raises:
            InputError: the user's code raised, exited or gave something unusable.
            ToolError: the child was killed by a signal or ran out of time.
        """
        try:
            header, arrays = read_message(self._read_into)
        except EOFError:
            raise self._death() from None
        self._opened.extend(header.pop("opened"))
        if header["kind"] == "complaint":
            raise InputError(f"{self._code.text}: {header['message']}", remedy=header["remedy"])
        if header["kind"] == "error":
            text = f"{self._code.text} failed: {header['message']}\n{header['traceback']}{self._tail()}"
            raise InputError(text, remedy=header.get("remedy"))
        return header, arrays

    def dependencies(self) -> tuple[Dependency, ...]:
        """Files the user's code has read so far, with their present hashes."""
        existing = sorted({path for path in self._opened if Path(path).is_file()})
        return tuple(Dependency(path=path, sha256=sha256_file(Path(path))) for path in existing)

    def opened(self) -> set[str]:
        """Paths of the files the user's code has read so far."""
        return set(self._opened)

    def _read_into(self, buffer: memoryview) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while len(buffer):
            if not poll.poll(_POLL_MS):
                self._check_time()
                # Processes that the user's code forked may hold the pipe open after the child's death.
                if self._process.poll() is not None and not poll.poll(0):
                    raise EOFError
                continue
            count = os.readv(self._read, [buffer])
            if not count:
                raise EOFError
            buffer = buffer[count:]

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise ToolError(
                f"{self._code.text} did not finish within {self._timeout_s:g} s and was ended{self._tail()}",
                remedy="see why it takes so long, or allow more time",
            )

    def _death(self) -> InputError | ToolError:
        try:
            status = self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            return InputError(f"{self._code.text} closed its connection to the pipeline{self._tail()}")
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = f"signal {-status}"
            hint = " (often: out of memory)" if name == "SIGKILL" else ""
            return ToolError(f"{self._code.text} was killed by {name}{hint}{self._tail()}")
        return InputError(f"{self._code.text} ended its process with status {status}{self._tail()}")

    def _tail(self) -> str:
        """The last lines the user's code printed, as text to append to a message."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL_BYTES))
        lines = deque(self._output.read().decode(errors="replace").splitlines(), maxlen=_TAIL_LINES)
        if not any(map(str.strip, lines)):
            return ""
        return "\nlast output:\n" + "\n".join(f"  {line[-_TAIL_COLUMNS:]}" for line in lines)
