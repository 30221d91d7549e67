"""Tasks on a Ray cluster, on this machine or many (optional extra ``cluster``).

Ray starts a lost worker's task again elsewhere. Files are read in place on the machine of the experiment; a worker on
another machine gets them through Ray's object store, once per machine, and keeps them under their hash.
"""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.compare.task import FileSet, perform
from pipeline.core.errors import InputError, QuantizeError, ToolError
from pipeline.core.files import sha256_json, write_bytes
from pipeline.core.lazy import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.compare.task import Done, Task
    from pipeline.core.progress import Progress

__all__ = ["ray_workers"]

_CONNECT_SECONDS: Final = 10.0
_RETRIES: Final = 3
"""How often a task is started again after its worker was lost."""


def machine() -> str:
    """Tells one machine from another: files are shipped between machines only."""
    return f"{socket.gethostname()}-{uuid.getnode():x}"


def unpacked(files: FileSet, contents: Mapping[str, bytes], root: Path) -> FileSet:
    """The files of ``files`` written below ``root``, in a folder named by their hashes; nothing where it exists."""
    folder = root / sha256_json([files.names, files.digests])[:32]
    for name, digest in zip(files.names, files.digests, strict=True):
        if not (folder / name).is_file():
            write_bytes(folder / name, contents[digest])
    return replace(files, folder=folder)


def _remote(task: Task, home: str, store: Mapping[str, Any]) -> Done | QuantizeError:
    """On a worker. A user's error is returned, not raised: Ray would wrap it."""
    import ray

    if machine() != home:
        root = Path(tempfile.gettempdir()) / f"quantize-files-{os.getuid()}"
        files = {}
        for role, entry in task.files.items():
            contents = {digest: ray.get(store[digest]) for digest in entry.digests}
            files[role] = unpacked(entry, contents, root)
        task = replace(task, files=files)
    try:
        return perform(task)
    except QuantizeError as error:
        return error


class _RayWorkers:
    def __init__(self, ray: Any, count: int, *, spread: bool) -> None:
        self.count = count
        self._ray = ray
        self._spread = spread
        self._function = ray.remote(num_cpus=1, max_retries=_RETRIES)(_remote)
        self._store: dict[str, Any] = {}

    def perform(self, task: Task) -> Done:
        if self._spread:
            self._put(task)
        home = machine()
        wanted = {digest: self._store[digest] for digest in _digests(task)} if self._spread else {}
        try:
            result = self._ray.get(self._function.options(name=task.label).remote(task, home, wanted))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            raise ToolError(
                f"{task.label}: its worker was lost {_RETRIES + 1} times: {error}",
                remedy="often memory: give fewer --workers; finished runs are kept",
            ) from error
        if isinstance(result, QuantizeError):
            raise result
        done: Done = result
        return done

    def _put(self, task: Task) -> None:
        for files in task.files.values():
            for name, digest in zip(files.names, files.digests, strict=True):
                if digest not in self._store:
                    self._store[digest] = self._ray.put((files.folder / name).read_bytes())


def _digests(task: Task) -> set[str]:
    return {digest for files in task.files.values() for digest in files.digests}


def _no_cluster(address: str, error: Exception) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address!r}: {error}",
        remedy="`ray start --head` starts one; without --address the work is done on this machine",
    )


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


@contextmanager
def ray_workers(count: int | None, address: str | None, progress: Progress) -> Iterator[_RayWorkers]:
    """Workers on the cluster at ``address``, or on one started here for the length of the block.

    Raises:
        InputError: Ray is not installed, or there is no cluster at ``address``.
    """
    ray = require("ray", extra="cluster", purpose="--address" if address else "--workers")
    if address is not None:
        _check_reachable(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if address is None:
        options.update(num_cpus=count, include_dashboard=False)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        if address is not None:
            raise _no_cluster(address, error) from error
        raise ToolError(f"Ray cannot start here: {error}", remedy="give --workers 1 to do without it") from error
    try:
        nodes = [node for node in ray.nodes() if node.get("Alive")]
        cores = int(ray.cluster_resources().get("CPU", 1))
        workers = _RayWorkers(ray, min(count, cores) if count else cores, spread=len(nodes) > 1)
        progress.note(f"Ray: {workers.count} evaluations at a time on {len(nodes)} machine(s)")
        yield workers
    finally:
        with suppress(Exception):
            ray.shutdown()
