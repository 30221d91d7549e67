"""Data for an artifact that is finished: images are preprocessed as its build did, unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT
from pipeline.data.opening import open_source

if TYPE_CHECKING:
    from pipeline.artifact import Manifest
    from pipeline.config import Preprocess
    from pipeline.core.progress import Progress
    from pipeline.data.source import DataSource

__all__ = ["open_again"]


def open_again(
    manifest: Manifest, spec: str, preprocess: Preprocess | None = None, *, progress: Progress = SILENT
) -> DataSource:
    """The source that ``spec`` names, for the model of ``manifest``.

    Args:
        spec: as for :func:`pipeline.data.open_source`.
        preprocess: for images; None: as in the build, which ``progress`` is told.

    Raises:
        InputError: as :func:`pipeline.data.open_source` says; or images without ``preprocess`` for an artifact whose
            manifest does not say how its own were preprocessed.
    """
    if preprocess is None and Path(spec).expanduser().is_dir():
        options = manifest.data.options
        if options is None or options.preprocess is None:
            reason = (
                "its manifest does not say how images are preprocessed: an earlier version wrote it"
                if options is None
                else f"it was built on arrays ({manifest.data.spec}), so it knows no preprocessing of images"
            )
            raise InputError(
                f"{spec} is a folder of images for the artifact {manifest.name!r}; {reason}",
                remedy="give --preprocess as in the build ('none' is pixels / 255)",
            )
        preprocess = options.preprocess
        progress.note(f"images are preprocessed as in the build: {preprocess}")
    return open_source(spec, manifest.inputs, preprocess)
