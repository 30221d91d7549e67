"""Import of an optional package at the point of use, with the command that installs it when it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from pipeline.core.errors import InputError

__all__ = ["require"]


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Import ``module`` or raise an :class:`InputError` naming what needs it and the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{purpose} needs the package {module!r}, which cannot be imported: {error}",
            remedy=f"pip install 'quantize-trt[{extra}]'",
        ) from error
