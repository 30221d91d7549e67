"""The child's main function: receive the task, run it, report how it ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, NoReturn

import numpy as np

from .framing import read_message, write_message
from .loading import Complaint, WithRemedy, describe_exception, load_object, trimmed_traceback
from .recording import FileRecorder

__all__ = ["main"]

_PARENT_CHECK_S = 0.5
_Array = np.ndarray[Any, np.dtype[Any]]


def main(read_descriptor: int, write_descriptor: int) -> None:
    """Run one task. Ends the process: 0 when a final message was sent."""
    os.set_inheritable(read_descriptor, False)
    os.set_inheritable(write_descriptor, False)

    def read_into(buffer: memoryview) -> None:
        while len(buffer):
            count = os.readv(read_descriptor, [buffer])
            if not count:
                raise EOFError
            buffer = buffer[count:]

    parent = os.getppid()
    task, _ = read_message(read_into)
    _end_with(parent)
    if task["task"] == "export":
        from . import export  # imports torch, before the user's directory is on the path
    recorder = FileRecorder()

    def send(header: dict[str, Any], arrays: dict[str, _Array]) -> None:
        try:
            write_message(write_descriptor, {**header, "opened": recorder.new_files()}, arrays)
        except BrokenPipeError:
            _end_group()  # the parent has what it wants

    def wants() -> bool:
        answer = os.read(read_descriptor, 1)
        if not answer:
            _end_group()
        return answer == b"1"

    def receive() -> tuple[dict[str, Any], dict[str, _Array]]:
        try:
            return read_message(read_into)
        except EOFError:
            _end_group()  # the parent is gone

    try:
        target = load_object(task["directory"], task["file"], task["module"], task["attribute"])
        if task["task"] == "samples":
            from .samples import send_samples

            send_samples(target, [(name, rank) for name, rank in task["inputs"]], wants, send)
            final: dict[str, Any] = {"kind": "end"}
        elif task["task"] == "metric":
            from .metric import serve_metric

            serve_metric(target, receive, send)
            final = {"kind": "end"}
        else:
            final = {"kind": "end", **export.export(target, task, recorder)}
    except Complaint as complaint:
        final = {"kind": "complaint", "message": complaint.message, "remedy": complaint.remedy}
    except SystemExit as error:
        final = {
            "kind": "error",
            "message": f"it called sys.exit({error.code!r})",
            "traceback": trimmed_traceback(error),
        }
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, WithRemedy) and error.__cause__ is not None else error
        final = {"kind": "error", "message": describe_exception(cause), "traceback": trimmed_traceback(cause)}
        final["remedy"] = error.remedy if isinstance(error, WithRemedy) else None
    send(final, {})
    # No interpreter shutdown: a user's threads and worker processes must not hold up a finished task.
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with(parent: int) -> None:
    """End this process, and those that the user's code has started, when the process ``parent`` dies.

    A closed pipe would be noticed only when the user's code gives something, which may be long after.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        _end_group()

    threading.Thread(target=watch, daemon=True).start()


def _end_group() -> NoReturn:
    """End this process and all that it has started; the group is its own, as the parent has begun a session."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)  # not reached
