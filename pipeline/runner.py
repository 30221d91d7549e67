"""Runs stages: content-hash cache, resume after a kill, one build per folder, atomic finish.

A stage works in ``<work>/.<name>-<key>.partial``. When it returns, its result and the SHA-256 of each file it wrote go
into ``stage.json`` there, and the folder is renamed to ``<work>/<name>-<key>``. The key covers the stage's inputs, its
options and the project's own code, so a finished folder can be taken instead of running the stage again; its files are
re-hashed first. A folder that still has its partial name was never finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from pipeline.core.errors import InputError
from pipeline.core.files import explain_os_errors, fsync_dir, sha256_bytes, sha256_file, sha256_json, write_json
from pipeline.core.progress import SILENT, Progress
from pipeline.records import StageResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Finished", "StageRunner", "code_digest"]

R = TypeVar("R", bound=StageResult)

_RECORD = "stage.json"
_LOCK = "lock"
_KEY_LENGTH = 16


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 over the project's own source, so that results of other code are never taken from the cache."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(
        path
        for package in ("pipeline", "calibrators", "plugins")
        for path in (root / package).rglob("*")
        if path.suffix in (".py", ".cu")
    )
    return sha256_bytes("".join(f"{path.relative_to(root)}:{sha256_file(path)}\n" for path in files).encode())


@dataclass(frozen=True)
class Finished(Generic[R]):
    """A finished stage. ``files`` maps the names of its files to their SHA-256."""

    name: str
    key: str
    result: R
    files: Mapping[str, str]
    seconds: float
    cached: bool


class StageRunner:
    """Runs the stages of one build inside ``work``, which nobody else uses meanwhile."""

    def __init__(self, work: Path, progress: Progress = SILENT) -> None:
        self.work = work
        self.progress = progress
        self._used: set[str] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; of work that failed before a stage left something, no folder stays.

        Raises:
            InputError: another process holds it, or it cannot be written.
        """
        made = [folder for folder in (self.work, *self.work.parents) if not _is_there(folder)]
        handle = self._lock()
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if not any(path.name != _LOCK for path in self.work.iterdir()):
                    (self.work / _LOCK).unlink()
                    for folder in made:
                        folder.rmdir()
            raise
        finally:
            os.close(handle)

    def _lock(self) -> int:
        """The descriptor of the lock's file, held."""
        lock = self.work / _LOCK
        with explain_os_errors(lock):
            try:
                self.work.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # where no folder can be made, such as below /proc
                raise InputError(
                    f"cannot make the folder {self.work}: {error.strerror}", remedy="choose another --out"
                ) from error
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise InputError(
                f"another build (process {holder}) is at work in {self.work.parent}",
                remedy="wait for it to end, or choose another --out",
            ) from error
        try:
            with explain_os_errors(lock):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        if not _same_file(handle, lock):  # removed by its holder, whose work had just failed
            os.close(handle)
            return self._lock()
        return handle

    def run(
        self,
        name: str,
        result_type: type[R],
        inputs: Mapping[str, Any],
        action: Callable[[Path], R],
        *,
        resumes: bool = False,
    ) -> Finished[R]:
        """Take the finished stage from the cache, or run ``action`` in its partial folder and finish it.

        Args:
            name: the stage, such as ``calibrate`` or ``build-rtx``.
            inputs: everything the result depends on, as JSON values: hashes of files, options, tool versions.
            action: gets the folder to write into and returns the result.
            resumes: the stage keeps its own checkpoints, so a partial folder is handed to it again instead of emptied.
        """
        key = sha256_json({"stage": name, "code": code_digest(), "inputs": inputs})[:_KEY_LENGTH]
        folder = self.work / f"{name}-{key}"
        self._used.add(folder.name)
        if (found := self._load(name, key, folder, result_type)) is not None:
            self.progress.note(f"{name}: unchanged, taken from the last run")
            return found
        partial = self.work / f".{name}-{key}.partial"
        with explain_os_errors(partial):
            if not resumes:
                shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True, exist_ok=True)
            start = time.monotonic()
            try:
                result = action(partial)
            except Exception:
                if not resumes or not any(partial.iterdir()):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            seconds = time.monotonic() - start
            files = {
                str(path.relative_to(partial)): sha256_file(path)
                for path in sorted(partial.rglob("*"))
                if path.is_file()
            }
            record = {
                "stage": name,
                "key": key,
                "seconds": seconds,
                "files": files,
                "result": result.model_dump(mode="json"),
            }
            write_json(partial / _RECORD, record)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            fsync_dir(self.work)
        return Finished(name, key, result.at(folder), files, seconds, cached=False)

    def _load(self, name: str, key: str, folder: Path, result_type: type[R]) -> Finished[R] | None:
        try:
            record = json.loads((folder / _RECORD).read_text())
            result = result_type.model_validate_json(json.dumps(record["result"]))
            files: dict[str, str] = record["files"]
            seconds = float(record["seconds"])
        except (OSError, ValueError, KeyError, TypeError, ValidationError):
            return None
        for file, digest in files.items():
            if not _has_digest(folder / file, digest):
                self.progress.note(f"{name}: {file} of the last run is damaged, the stage runs again")
                return None
        for dependency in result.dependencies:
            if not _has_digest(Path(dependency.path), dependency.sha256):
                self.progress.note(f"{name}: {dependency.path} has changed, the stage runs again")
                return None
        return Finished(name, key, result.at(folder), files, seconds, cached=True)

    def prune(self) -> None:
        """Remove the folders of stages this build did not use (other models, other options, killed runs)."""
        for path in self.work.iterdir():
            if path.is_dir() and path.name not in self._used:
                shutil.rmtree(path, ignore_errors=True)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _is_there(folder: Path) -> bool:
    with explain_os_errors(folder):
        return folder.exists()


def _has_digest(path: Path, digest: str) -> bool:
    try:
        return sha256_file(path) == digest
    except OSError:
        return False
