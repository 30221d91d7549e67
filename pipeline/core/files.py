"""Atomic files and content hashes.

A file written here appears whole or not at all: it is written beside its target, flushed to the disk (fsync),
then renamed (POSIX ``rename`` is atomic within a file system).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "atomic_file",
    "canonical_json",
    "check_can_make",
    "check_can_write",
    "copy_file",
    "explain_os_errors",
    "finite_json",
    "fsync_dir",
    "link_or_copy",
    "os_error",
    "sha256_bytes",
    "sha256_file",
    "sha256_json",
    "write_bytes",
    "write_json",
    "write_text",
]

_CHUNK_BYTES = 1 << 20
_TEMP_SUFFIX = ".tmp"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ETXTBSY)
_OTHER_KIND = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY)
_BESIDE = "a file and a folder are in each other's place there"


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a missing right or a folder that cannot be made into an :class:`InputError` naming ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise InputError(
                f"no space left on the disk while writing {path}",
                remedy="free some space or choose another --out; finished stages are kept for the next run",
            ) from error
        if error.errno in _REFUSED or (error.errno == errno.ENOENT and _is_on_the_way(error.filename, path)):
            raise InputError(
                f"cannot write {path}: {error.strerror}", remedy="choose a folder you can write to with --out"
            ) from error
        if error.errno in _OTHER_KIND:
            raise InputError(f"cannot write {path}: {error.strerror}", remedy=_BESIDE) from error
        raise


def _is_on_the_way(name: str | None, path: Path) -> bool:
    """Whether what is missing is a folder of ``path`` or beside it, and no other file that is read meanwhile."""
    if not isinstance(name, str):
        return False
    missing, wanted = Path(name).absolute(), path.absolute()
    return missing == wanted or missing in wanted.parents or missing.parent in (wanted, wanted.parent)


def os_error(error: OSError) -> InputError | None:
    """What a user can do about ``error``; None where it does not tell of a file that they gave."""
    if error.errno in _FULL:
        where = f" while writing {error.filename}" if error.filename else ""
        return InputError(f"no space left on the disk{where}", remedy="free some space or write elsewhere")
    remedies = {
        **dict.fromkeys(_REFUSED, "choose a place that you can read and write"),
        **dict.fromkeys(_OTHER_KIND, _BESIDE),
        errno.ENOENT: "is the name right, and is its folder there?",
    }
    if error.errno not in remedies or not error.filename:
        return None
    return InputError(f"{os.fsdecode(error.filename)}: {error.strerror}", remedy=remedies[error.errno])


def check_can_make(folder: Path) -> None:
    """Find out, before long work, whether files can be written into ``folder``; leaves nothing behind.

    Raises:
        InputError: they cannot.
    """
    _try_folder(Path(folder).absolute(), Path(folder).absolute())


def _try_folder(folder: Path, said: Path) -> None:
    with explain_os_errors(said):
        made = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=_TEMP_SUFFIX):
                pass
        finally:
            for each in made:
                with suppress(OSError):  # never made, or someone else's files are in it by now
                    each.rmdir()


def check_can_write(path: Path) -> None:
    """As :func:`check_can_make`, of one file.

    Raises:
        InputError: it cannot be written, or a folder, a device or a pipe has its name.
    """
    path = Path(path)
    _refuse_device(path)
    with explain_os_errors(path):
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder", remedy="name a file in it")
    _try_folder(path.absolute().parent, path)


def _refuse_device(path: Path) -> None:
    """A rename would put a file in its place: as root even in that of /dev/null."""
    try:
        mode = path.stat().st_mode  # behind links: /dev/stdout is one
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"cannot write {path}: it is a device or a pipe, and no file", remedy="name a file")


def finite_json(value: Any) -> Any:
    """``value`` with None for each number that JSON does not have, NaN and the infinities; as pydantic writes them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item) for item in value]
    return value


def fsync_dir(folder: Path) -> None:
    """Make a rename inside ``folder`` durable. Does nothing where a folder cannot be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that replaces ``path`` when the block ends without an error, and leaves no trace otherwise."""
    path = Path(path)
    _refuse_device(path)
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMP_SUFFIX)
        temp = Path(name)
        try:
            with os.fdopen(handle, "w+b") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temp.chmod(0o666 & ~_umask())
            temp.replace(path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Sorted keys, two-space indent, newline at the end; NaN and infinity are refused (not JSON)."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def link_or_copy(source: Path, target: Path) -> None:
    """Put ``source`` at ``target`` atomically: a hard link where the file system allows, a copy otherwise.

    Only for files of the project's own: writing into one of two links changes both.
    """
    with _placed(target) as temp:
        try:
            os.link(source, temp)
        except OSError:
            _copy(source, temp)


def copy_file(source: Path, target: Path) -> None:
    """Put a copy of ``source`` at ``target`` atomically."""
    with _placed(target) as temp:
        _copy(source, temp)


@contextmanager
def _placed(target: Path) -> Iterator[Path]:
    """A path beside ``target`` that is renamed to it when the block ends without an error."""
    _refuse_device(target)
    with explain_os_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = target.with_name(f".{target.name}.{os.getpid()}{_TEMP_SUFFIX}")
        temp.unlink(missing_ok=True)
        try:
            yield temp
            temp.replace(target)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        fsync_dir(target.parent)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as stream:
        os.fsync(stream.fileno())


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no white space, shortest round-trip floats, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_json(value: Any) -> str:
    return sha256_bytes(canonical_json(value).encode())
