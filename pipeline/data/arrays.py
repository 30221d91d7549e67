"""``.npy`` and ``.npz`` files as data sources, read sample by sample."""

from __future__ import annotations

import math
import tempfile
import zipfile
import zlib
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.files import sha256_file, sha256_json
from pipeline.data.checking import InputCheck, check_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.data.source import Sample
    from pipeline.records import Dependency, TensorSpec

__all__ = ["NpyFile", "NpzFile", "array_samples"]

Array = np.ndarray[Any, np.dtype[Any]]
_COPY_BYTES = 1 << 20


class _ArrayFile:
    """What both kinds share: identity, and the checks on an array's header."""

    def __init__(self, path: Path, inputs: Sequence[TensorSpec]) -> None:
        self._path = path
        self._checks = {spec.name: InputCheck(spec) for spec in inputs}
        self._length = 0
        self._notes: list[str] = []

    @property
    def length(self) -> int:
        return self._length

    @property
    def names(self) -> None:
        return None

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def dependencies(self) -> tuple[Dependency, ...]:
        return ()

    def count(self, limit: int | None) -> int:
        return self.length if limit is None else min(self.length, limit)

    def describe(self) -> str:
        return f"{self._length} samples in {self._path}"

    def key(self) -> str:
        stat = self._path.stat()
        return sha256_json(
            {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "name": self._path.name, "kind": "arrays"}
        )

    def sha256(self) -> str:
        return sha256_file(self._path)

    def _check_header(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        check = self._checks[name]
        where = str(self._path)
        note = check.check_dtype(dtype, where=where)
        if note is not None:
            self._notes.append(note)
        if not shape:
            raise InputError(
                f"{where}: the data for {name!r} are a single number", remedy="samples lie along the first axis"
            )
        rank = check.rank
        remedy = f"the array needs the samples along its first axis: (samples, ...) with {check.expected()} a sample"
        if rank is not None and len(shape) == rank:
            remedy = f"add the axis of the samples: array[np.newaxis] turns {shape} into one sample"
        elif rank is not None and len(shape) == rank + 2 and shape[1] == 1:
            remedy = f"take the batch axis out of the samples: array[:, 0] turns {shape} into {(shape[0], *shape[2:])}"
        elif (axes := check.other_layout(shape[1:])) is not None:
            whole = (0, *(axis + 1 for axis in axes))
            turned = tuple(shape[axis] for axis in whole)
            remedy = (
                f"the channels are {'last' if axes[0] == 2 else 'first'}, and the model takes them "
                f"{'first' if axes[0] == 2 else 'last'}: array.transpose{whole} turns {shape} into {turned}"
            )
        check.check_shape(shape[1:], where=where, remedy=remedy)
        if shape[0] == 0:
            raise InputError(f"{where}: the data for {name!r} have no samples (shape {shape})")


def array_samples(path: Path) -> int | None:
    """How many samples an ``.npy`` or ``.npz`` has by its headers; None: no array, or arrays of different lengths.

    Raises:
        InputError: it cannot be read.
    """
    shapes = []
    try:
        if path.suffix == ".npy":
            with path.open("rb") as stream:
                shapes.append(_read_header(stream)[0])
        else:
            with zipfile.ZipFile(path) as archive:
                for member in archive.namelist():
                    with archive.open(member) as stream:
                        shapes.append(_read_header(stream)[0])
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OSError) as error:
        written = "np.save" if path.suffix == ".npy" else "np.savez"
        raise InputError(
            f"{path} cannot be read: {error}", remedy=f"it may be truncated or damaged: write it again with {written}"
        ) from error
    lengths = {shape[0] if shape else None for shape in shapes}
    return lengths.pop() if len(lengths) == 1 else None


class NpyFile(_ArrayFile):
    """One array for the model's one input, memory-mapped."""

    def __init__(self, path: Path, inputs: Sequence[TensorSpec]) -> None:
        """Read the header.

        Raises:
            InputError: unreadable or truncated, Python objects, several model inputs, or an array that does not fit.
        """
        super().__init__(path, inputs)
        if len(inputs) != 1:
            names = ", ".join(spec.name for spec in inputs)
            raise InputError(
                f"{path} holds one array, and the model has {len(inputs)} inputs ({names})",
                remedy="give an .npz with one array per input: np.savez(path, "
                + ", ".join(f"{spec.name}=..." for spec in inputs)
                + ")",
            )
        self._name = inputs[0].name
        array = self._open()
        self._check_header(self._name, array.shape, array.dtype)
        self._length = array.shape[0]

    def _open(self) -> Array:
        try:
            with self._path.open("rb") as stream:
                _, _, dtype = _read_header(stream)
            self._checks[self._name].check_dtype(dtype, where=str(self._path))
            opened: Array = np.load(self._path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"{self._path} cannot be read: {error}", remedy="it may be truncated: write it again with np.save"
            ) from error
        return opened

    def read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        array = self._open()
        check = self._checks[self._name]
        for number in range(self._length):
            if wanted(number):
                # A copy, so that no batch keeps the mapping alive.
                yield (
                    number,
                    {self._name: check.convert(np.array(array[number]), where=f"{self._path}, sample {number}")},
                )


class NpzFile(_ArrayFile):
    """One array per model input; members are decompressed as a stream, one sample of each at a time."""

    def __init__(self, path: Path, inputs: Sequence[TensorSpec]) -> None:
        """Read the directory and each member's header.

        Raises:
            InputError: unreadable or truncated, Python objects, names that are not the model's, or arrays that do
                not fit.
        """
        super().__init__(path, inputs)
        lengths: dict[str, int] = {}
        with self._explained(), zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            check_names(members, inputs, where=str(path))
            self._members = {spec.name: members[spec.name] for spec in inputs}
            for name, member in self._members.items():
                with archive.open(member) as stream:
                    shape, _, dtype = _read_header(stream)
                    header_bytes = stream.tell()
                self._check_header(name, shape, dtype)
                found = archive.getinfo(member).file_size - header_bytes
                if found != (expected := math.prod(shape) * dtype.itemsize):
                    raise ValueError(
                        f"{member} is said to have the shape {shape}, which is {expected} bytes, and has {found}"
                    )
                lengths[name] = shape[0]
        (first, self._length), *rest = lengths.items()
        for name, length in rest:
            if length != self._length:
                raise InputError(
                    f"{path}: {first!r} has {self._length} samples and {name!r} has {length}",
                    remedy="every array needs the same samples along its first axis",
                )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OSError) as error:
            raise InputError(
                f"{self._path} cannot be read: {error}",
                remedy="it may be truncated or damaged: write it again with np.savez",
            ) from error

    def read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        with ExitStack() as stack:
            with self._explained():
                archive = stack.enter_context(zipfile.ZipFile(self._path))
                readers = {
                    name: _MemberReader(stack.enter_context(archive.open(member)), stack)
                    for name, member in self._members.items()
                }
            for number in range(self._length):
                take = wanted(number)
                with self._explained():
                    sample = {name: reader.next(take) for name, reader in readers.items()}
                if take:
                    where = f"{self._path}, sample {number}"
                    yield (
                        number,
                        {
                            name: self._checks[name].convert(array, where=where)
                            for name, array in sample.items()
                            if array is not None
                        },
                    )
            with self._explained():
                for reader in readers.values():
                    reader.finish()


class _MemberReader:
    """Rows of one array inside a zip archive, in order."""

    def __init__(self, stream: IO[bytes], stack: ExitStack) -> None:
        self._stream = stream
        shape, fortran, self._dtype = _read_header(stream)
        self._shape = shape[1:]
        self._row_bytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        self._columns: Array | None = None
        self._row = 0
        if fortran and len(shape) > 1:
            # Column-major: a sample's values are spread over the whole member, so it goes to a mapped temporary file.
            spill = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            while chunk := stream.read(_COPY_BYTES):
                spill.write(chunk)
            spill.flush()
            self._columns = np.memmap(spill, dtype=self._dtype, mode="r", shape=shape, order="F")

    def next(self, take: bool) -> Array | None:
        """The next row, or None when it is only passed over."""
        if self._columns is not None:
            self._row += 1
            return np.array(self._columns[self._row - 1], order="C") if take else None
        if not take:
            self._skip()
            return None
        data = self._stream.read(self._row_bytes)
        if len(data) != self._row_bytes:
            raise EOFError("the array ends early")
        return np.frombuffer(data, dtype=self._dtype).reshape(self._shape)

    def _skip(self) -> None:
        left = self._row_bytes
        while left:
            chunk = self._stream.read(min(left, _COPY_BYTES))
            if not chunk:
                raise EOFError("the array ends early")
            left -= len(chunk)

    def finish(self) -> None:
        """Read to the end of the member, where zipfile compares the checksum."""
        while self._stream.read(_COPY_BYTES):
            pass


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether column-major, and dtype."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version in ((2, 0), (3, 0)):
        # 3.0 differs from 2.0 only by UTF-8 field names, which plain arrays have none of.
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"unknown .npy version {version}")
