"""Logger and error recorder that put TensorRT's messages into one list, in the order they come."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pipeline.engine.records import Message, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipeline.engine.compat import Api

__all__ = ["NO_DRIVER_MARK", "make_error_recorder", "make_logger", "skipped_tactics", "worst_words"]

NO_DRIVER_MARK = "cudaError 35"
"""Without a driver RTX adds a line with this to every error: it says nothing about the error."""

_NO_REASON = ("check", "timing cache")
"""Sources of messages that never say why TensorRT failed."""

_SKIPPED_TACTICS = (
    "Device memory is insufficient to use tactic",
    "insufficient memory on requested size",
    "due to insufficient workspace",
    "do not have sufficient workspace memory",
    "within workspace limit",
    "ran out of scratch memory",
)


def make_logger(api: Api, receive: Callable[[Message], None], *, verbose: bool) -> Any:
    """A TensorRT logger that hands each line to ``receive``. TensorRT keeps one logger per process: the first."""
    trt = api.trt
    severities: dict[Any, Severity] = {
        trt.ILogger.INTERNAL_ERROR: "internal_error",
        trt.ILogger.ERROR: "error",
        trt.ILogger.WARNING: "warning",
        trt.ILogger.INFO: "info",
        trt.ILogger.VERBOSE: "verbose",
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            name: Severity = severities.get(severity, "error")
            if verbose or name != "verbose":
                receive(Message(severity=name, source="logger", text=text))

    return Logger()


def make_error_recorder(api: Api, receive: Callable[[Message], None]) -> Any:
    """A TensorRT error recorder that hands each error to ``receive``.

    RTX 1.7 crashes when a network that its parser filled has one, also an inherited one: give it to the builder after
    ``create_network``. With a recorder set, errors no longer reach the logger.
    """
    trt = api.trt
    errors: list[tuple[Any, str]] = []
    lock = threading.Lock()

    class Recorder(trt.IErrorRecorder):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)

        def num_errors(self) -> int:
            return len(errors)

        def get_error_code(self, index: int) -> Any:
            return errors[index][0]

        def get_error_desc(self, index: int) -> str:
            return errors[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            with lock:
                errors.clear()

        def report_error(self, code: Any, text: str) -> bool:
            with lock:
                errors.append((code, text))
            receive(Message(severity="error", source="error recorder", text=f"{getattr(code, 'name', code)}: {text}"))
            return False

    return Recorder()


def worst_words(messages: Iterable[Message], *, limit: int = 5) -> str:
    """TensorRT's own words for why it failed: its errors, else its warnings, joined; empty when it said nothing."""
    messages = tuple(messages)
    for wanted in (("internal_error", "error"), ("warning",)):
        texts = [
            m.text.strip()
            for m in messages
            if m.severity in wanted and m.source not in _NO_REASON and NO_DRIVER_MARK not in m.text
        ]
        if texts:
            return "\n  ".join(dict.fromkeys(texts[-limit:]))
    return ""


def skipped_tactics(messages: Iterable[Message]) -> tuple[str, ...]:
    """The messages which say that the workspace limit made TensorRT leave kernels out."""
    return tuple(m.text.strip() for m in messages if any(mark in m.text for mark in _SKIPPED_TACTICS))
