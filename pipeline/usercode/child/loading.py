"""Import of the user's callable, and what is told of an exception in it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

__all__ = ["Complaint", "WithRemedy", "describe_exception", "is_library", "load_object", "trimmed_traceback"]

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep
_MOST_FRAMES = 12


class Complaint(Exception):
    """The user's code did not crash but gave something unusable; becomes an input error in the parent."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class WithRemedy(Exception):
    """Wraps an exception of the user's code (its cause) about which there is something to advise."""

    def __init__(self, remedy: str) -> None:
        super().__init__(remedy)
        self.remedy = remedy


def load_object(directory: str, file: str | None, module: str | None, attribute: str) -> Any:
    """Import the module with ``directory`` first on ``sys.path`` and return the object.

    Raises:
        Complaint: there is no such attribute.
    """
    sys.path.insert(0, directory)
    if file is not None:
        name = Path(file).stem
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise Complaint(f"{file} cannot be imported")
        found = importlib.util.module_from_spec(spec)
        # Under its own name, so that the file's siblings and pickled classes find it.
        sys.modules[name] = found
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(str(module))
    value: Any = found
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = sorted(n for n in vars(value) if not n.startswith("_")) if hasattr(value, "__dict__") else []
            near = get_close_matches(part, names, n=1, cutoff=0.5)
            raise Complaint(
                f"{file or module} has no {attribute!r}",
                f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names[:20]) or 'nothing'}",
            )
        value = getattr(value, part)
    return value


def is_library(file: str) -> bool:
    """Whether ``file`` belongs to Python or an installed package."""
    paths = sysconfig.get_paths()
    folders = {os.path.realpath(paths[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return os.path.realpath(file).startswith(tuple(folders))


def describe_exception(error: BaseException) -> str:
    """``ValueError: text``, on one line."""
    return " ".join("".join(traceback.format_exception_only(type(error), error)).split())


def trimmed_traceback(error: BaseException) -> str:
    """The traceback, cut to frames in the user's own files where there are any."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN, "<frozen importlib"))
    ]
    own = [frame for frame in frames if not is_library(frame.filename)]
    lines = traceback.format_list((own or frames)[-_MOST_FRAMES:])
    return "".join(lines + traceback.format_exception_only(type(error), error)).rstrip()
