"""Arrays in ``.npz`` files: written as a stream, equal arrays giving equal bytes, read one member at a time.

A file of batches has the members ``INDEX/samples`` (sample numbers) and ``INDEX/tensors/NAME`` for each batch.
"""

from __future__ import annotations

import zipfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.files import atomic_file
from pipeline.data.batching import Batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["ArchiveWriter", "open_archive", "read_arrays", "read_batches", "write_arrays"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class ArchiveWriter:
    """Adds members to an open archive."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._batches = 0

    def add(self, name: str, array: Array) -> None:
        info = zipfile.ZipInfo(f"{name}.npy")  # ZipInfo's own date: 1980-01-01
        with self._archive.open(info, "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)

    def add_batch(self, samples: tuple[int, ...], tensors: Mapping[str, Array]) -> None:
        prefix = f"{self._batches:06d}"
        self.add(f"{prefix}/samples", np.asarray(samples, np.int64))
        for name in sorted(tensors):
            self.add(f"{prefix}/tensors/{name}", tensors[name])
        self._batches += 1


@contextmanager
def open_archive(path: Path) -> Iterator[ArchiveWriter]:
    """A new archive that replaces ``path`` when the block ends without an error."""
    with atomic_file(path) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        yield ArchiveWriter(archive)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    with open_archive(path) as writer:
        for name in sorted(arrays):
            writer.add(name, arrays[name])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        archive = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read: {error}", remedy="run the experiment again with --fresh") from error
    with archive:
        yield archive


def read_arrays(path: Path) -> dict[str, Array]:
    """Every member.

    Raises:
        InputError: missing or damaged.
    """
    with _opened(path) as archive:
        return {name: archive[name] for name in archive.files}


def read_batches(path: Path) -> Iterator[Batch]:
    """The batches in order, one in memory at a time.

    Raises:
        InputError: missing or damaged.
    """
    with _opened(path) as archive:
        members: dict[str, list[str]] = {}
        for name in archive.files:
            prefix, _, rest = name.partition("/")
            if rest.startswith("tensors/"):
                members.setdefault(prefix, []).append(name)
        for index, prefix in enumerate(sorted(members)):
            samples = tuple(int(number) for number in archive[f"{prefix}/samples"])
            yield Batch(index, samples, {name.split("/", 2)[2]: archive[name] for name in members[prefix]})
