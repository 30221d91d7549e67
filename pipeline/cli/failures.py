"""How a command ends when it fails: one message, one exit code, and with ``--json`` one document.

The document has ``error``, ``remedy`` and ``exit_code``, whatever failed: a check, a file, an option that click
refuses, or the program itself.
"""

from __future__ import annotations

import errno
import functools
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from pipeline.core.errors import InputError, QuantizeError, ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["JsonCommand", "asks_for_json", "explained", "print_json", "show_usage_error", "usage_errors", "user_errors"]

F = TypeVar("F", bound="Callable[..., Any]")

_PARSERS = ("json.decoder", "yaml.", "codecs", "csv", "zipfile")
"""Modules that read what a user's file holds: their complaints are about the file, not about this program."""
_INTERRUPTED = 130


def print_json(value: Any) -> None:
    """One document on standard output. NaN and infinity, which JSON does not have, are null."""
    import json

    from pipeline.core.files import finite_json

    click.echo(json.dumps(finite_json(value), indent=2, sort_keys=True, allow_nan=False))


class JsonCommand(click.Command):
    """A command whose usage errors are a document as well where ``--json`` is asked for."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with usage_errors(args):
            _refuse_other_encodings(args)
            return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # of a line that is still being typed
            _refuse_empty_paths(self, ctx, args)
        return super().parse_args(ctx, args)


def _refuse_empty_paths(command: click.Command, context: click.Context, arguments: Sequence[str]) -> None:
    """An unset variable of a script, which pathlib takes for the folder that the program runs in."""
    typed = command.make_parser(context).parse_args(list(arguments))[0]
    for parameter in command.get_params(context):
        if isinstance(parameter.type, click.Path) and _has_empty(typed.get(parameter.name or "")):
            raise click.BadParameter("it is empty, and no path", context, parameter)


def _has_empty(value: Any) -> bool:
    return any(_has_empty(each) for each in value) if isinstance(value, (list, tuple)) else value == ""


def _refuse_other_encodings(arguments: Sequence[str]) -> None:
    """onnx, onnxruntime and JSON take no path that is not UTF-8, and each says so in its own way, or not at all."""
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{word!r} is not UTF-8: rename that file or folder") from None


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether ``--json`` is among arguments that could not be parsed."""
    words = list(arguments)
    return "--json" in (words[: words.index("--")] if "--" in words else words)


@contextmanager
def usage_errors(args: Sequence[str]) -> Iterator[None]:
    """Make a document of what click refuses, where ``--json`` is among ``args``; click shows the error itself."""
    typed = tuple(args)  # click takes them out as it parses
    try:
        yield
    except click.ClickException as error:
        show_usage_error(error, typed)
        raise


def show_usage_error(error: click.ClickException, arguments: Sequence[str]) -> None:
    """The document of an error that click shows by itself on standard error."""
    if not asks_for_json(arguments):
        return
    context = getattr(error, "ctx", None)
    remedy = f"`{context.command_path} --help` lists what it takes" if context is not None else None
    print_json({"error": error.format_message(), "remedy": remedy, "exit_code": error.exit_code})


def user_errors(function: F) -> F:
    """Turn an exception into its message and exit code; a traceback only with ``--verbose``.

    With ``--json`` the error is an object on standard output as well, with the figures of the check that failed, so
    that a program reading it always gets JSON.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            said = "interrupted; finished stages are kept, the next run goes on from there"
            if kwargs.get("as_json"):
                print_json({"error": said, "remedy": None, "exit_code": _INTERRUPTED})
            click.echo(said, err=True)
            raise SystemExit(_INTERRUPTED) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of the output has gone, which click ends quietly
            if kwargs.get("verbose"):
                traceback.print_exc()
            _end(explained(error), error, as_json=bool(kwargs.get("as_json")))

    return wrapper  # type: ignore[return-value]


def _end(shown: QuantizeError, cause: Exception, *, as_json: bool) -> NoReturn:
    if as_json:
        said = {"error": shown.message, "remedy": shown.remedy, "exit_code": shown.exit_code}
        with suppress(OSError):  # standard output itself may be what failed
            print_json({**shown.figures, **said})
    click.echo(click.style("error: ", fg="red", bold=True) + shown.message, err=True)
    if shown.remedy:
        click.echo(f"  {shown.remedy}", err=True)
    raise SystemExit(shown.exit_code) from cause


def explained(error: Exception) -> QuantizeError:
    """``error`` as what its user can act on: wrong input where it is about a file, else a bug of this program."""
    from pipeline.core.files import os_error

    if isinstance(error, QuantizeError):
        return error
    if isinstance(error, OSError) and (known := os_error(error)) is not None:
        return known
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text = " ".join(str(error).split())
    if any(module.startswith(_PARSERS) for module in _modules(error)):
        deep = isinstance(error, RecursionError)
        return InputError(
            "a file that was read is nested too deeply" if deep else f"a file that was read is not valid: {text}",
            remedy="is one of the given files of another kind, or damaged? -v shows where it was read",
        )
    if isinstance(error, OSError) and error.errno is not None:
        where = f" at {error.filename}" if error.filename else ""
        return ToolError(f"the system reports an error{where}: {error.strerror}", remedy="-v shows what was done")
    if isinstance(error, MemoryError):
        return ToolError(
            f"the memory of this machine is not enough: {text or kind}",
            remedy="a smaller --batch-size or fewer --samples need less, where the command has them",
        )
    return ToolError(
        f"unexpected {kind}: {text}" if text else f"unexpected {kind}",
        remedy="this is a bug in quantize, please report it with the lines that -v shows",
    )


def _modules(error: Exception) -> Iterator[str]:
    """The modules that ``error`` passed through."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield str(frame.f_globals.get("__name__", ""))
