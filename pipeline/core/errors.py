"""The user-facing error family. Anything else that escapes is a bug: the command line says so, `-v` shows where.

A message names the tensor, file or option, the value found and what was expected; ``remedy`` says what to do.
Only the command line turns these into text and an exit code.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["CheckFailed", "InputError", "QuantizeError", "ToolError", "did_you_mean"]


class QuantizeError(Exception):
    """Root of the family. ``exit_code`` is the process exit status the command line uses.

    Attributes:
        figures: what was measured before it was found wrong, as JSON values: ``--json`` shows them with the message.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, remedy: str | None = None, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.figures = dict(figures or {})

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class InputError(QuantizeError):
    """Something the user gave is wrong: a file, an option, data, a model (exit code 2)."""


class CheckFailed(QuantizeError):
    """The input was fine and a check on the result failed: a hash, a tolerance, a consistency test (exit code 1)."""

    exit_code: ClassVar[int] = 1


class ToolError(QuantizeError):
    """A tool underneath failed or died: TensorRT, onnxruntime, a child process (exit code 1)."""

    exit_code: ClassVar[int] = 1


_MOST_KNOWN = 40
"""Names that a message lists: all placement rules, but not every tensor of a network."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'entropy'? known: ..."`` for an unknown ``name``."""
    options = sorted(known)
    near = get_close_matches(name, options, n=1, cutoff=0.5)
    more = f" and {len(options) - _MOST_KNOWN} more" if len(options) > _MOST_KNOWN else ""
    known_text = f"known: {', '.join(options[:_MOST_KNOWN])}{more}" if options else "none is known"
    return f"did you mean {near[0]!r}? {known_text}" if near else known_text
