"""Stage 7, package: put the files of the other stages into the artifact folder and write its manifest.

Every new file is first placed beside its target under a temporary name (the step that can run out of disk), then
renamed; the old manifest goes before the first rename and the new one comes last, so that at no moment does a manifest
describe files of another build.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact import MANIFEST, SUMMARY, WORK, Artifact, file_record, write_manifest
from pipeline.core.errors import InputError
from pipeline.core.files import explain_os_errors, fsync_dir, link_or_copy, write_text
from pipeline.core.progress import SILENT, Progress
from pipeline.reports.summary import summary_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.artifact import Manifest

__all__ = ["check_folder", "check_owner", "run"]

_NEXT = "next"


def check_folder(folder: Path, *, force: bool) -> None:
    """Refuse, before anything is written, a folder that holds other things than an artifact or an unfinished build.

    Raises:
        InputError: unless ``force``; always where ``folder`` is a file.
    """
    with explain_os_errors(folder):
        exists = folder.exists()
    if not exists:
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file", remedy="give a folder with --out")
    foreign = sorted(path.name for path in folder.iterdir())
    if foreign and not force and MANIFEST not in foreign and WORK not in foreign:
        raise InputError(
            f"{folder} is not empty and holds no artifact (it has {', '.join(foreign[:3])}"
            f"{' ...' if len(foreign) > 3 else ''})",
            remedy="choose an empty or new folder with --out, or write into it with --force",
        )


def check_owner(folder: Path, source_sha256: str, *, force: bool) -> None:
    """Refuse to replace the artifact of another model.

    Raises:
        InputError: unless ``force``.
    """
    # A build killed while its files were being placed has left its manifest in the staging folder.
    known = [place for place in (folder, folder / WORK / _NEXT) if (place / MANIFEST).is_file()]
    if force or not known:
        return
    owner = Artifact.open(known[0]).manifest
    if owner.source.sha256 != source_sha256:
        raise InputError(
            f"{folder} holds the artifact {owner.name!r} of another model ({owner.source.spec}, "
            f"SHA-256 {owner.source.sha256[:12]}; this one is {source_sha256[:12]})",
            remedy="choose another --out, or replace it with --force",
        )


def run(files: Mapping[str, Path], manifest: Manifest, *, folder: Path, progress: Progress = SILENT) -> Artifact:
    """Place ``files`` (name in the artifact: where it lies now) into ``folder`` and write the manifest last.

    Files of an earlier build that are not in ``files`` are removed.
    """
    staging = folder / WORK / _NEXT
    shutil.rmtree(staging, ignore_errors=True)
    for name, source in files.items():
        link_or_copy(source, staging / name)
    write_text(staging / SUMMARY, summary_markdown(manifest))
    names = [*files, SUMMARY]
    records = {name: file_record(staging / name) for name in names}
    complete = manifest.model_copy(update={"files": records})
    previous = _previous_files(folder)
    write_manifest(staging, complete)
    if in_the_way := [name for name in (*names, MANIFEST) if (folder / name).is_dir()]:
        # Before the old artifact is touched.
        raise InputError(f"{folder / in_the_way[0]} is a folder, and a file belongs there", remedy="remove it")
    with explain_os_errors(folder):
        (folder / MANIFEST).unlink(missing_ok=True)
        for name in previous:
            if name not in names:
                (folder / name).unlink(missing_ok=True)
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(target)
            fsync_dir(target.parent)
        (staging / MANIFEST).replace(folder / MANIFEST)
        fsync_dir(folder)
        shutil.rmtree(staging, ignore_errors=True)
        _remove_empty(folder)
    progress.note(f"artifact written to {folder}")
    return Artifact(folder, complete)


def _previous_files(folder: Path) -> list[str]:
    """Files of the artifact that is being replaced; none where its manifest is missing or damaged."""
    try:
        return list(Artifact.open(folder).manifest.files)
    except InputError:
        return []


def _remove_empty(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        inner = Path(path)
        if inner != folder and WORK not in inner.relative_to(folder).parts and not any(inner.iterdir()):
            inner.rmdir()
