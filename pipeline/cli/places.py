"""Where a command may write: beside what it reads, not onto it, and not into an artifact, which knows its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_out_file", "check_out_folder"]


def check_out_folder(folder: Path) -> None:
    """Find out, before long work, whether results may go into ``folder``; leaves nothing behind.

    Raises:
        InputError: nothing can be written there, or it lies in an artifact.
    """
    from pipeline.core.files import check_can_make

    _refuse_artifact(folder)
    check_can_make(folder)


def check_out_file(path: Path, *, inputs: Iterable[str | Path] = ()) -> None:
    """As :func:`check_out_folder`, of one file.

    Args:
        inputs: what the command reads; what is no path does no harm.

    Raises:
        InputError: it cannot be written, is one of ``inputs``, or lies in an artifact.
    """
    from pipeline.core.errors import InputError
    from pipeline.core.files import check_can_write

    for read in inputs:
        if _same(path, Path(read)):
            raise InputError(
                f"cannot write {path}: it is read here, and would be replaced",
                remedy="name another file for the result",
            )
    _refuse_artifact(path)
    check_can_write(path)


def _same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except (OSError, ValueError):  # one of them does not exist, or is no path
        return False


def _refuse_artifact(path: Path) -> None:
    from pipeline.artifact import Artifact
    from pipeline.core.errors import InputError

    for folder in (path, *path.absolute().parents):
        try:
            Artifact.open(folder)
        except InputError:  # no manifest, or another program's
            continue
        raise InputError(
            f"cannot write {path}: the artifact {folder} knows its files, and `quantize verify` would call it damaged",
            remedy="choose a place outside; `quantize errors` without --out renews the artifact's own reports",
        )
