"""Tasks on a Ray cluster, on this machine or many (optional extra ``cluster``).

Ray starts a lost worker's task again elsewhere. Files are read in place on the machine of the experiment; a worker on
another machine gets them through Ray's object store, once per machine, and keeps them under their hash.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import uuid
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.compare.perform import perform
from pipeline.core.errors import InputError, QuantizeError, ToolError
from pipeline.core.files import sha256_json, write_bytes
from pipeline.core.lazy import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.compare.task import Done, FileSet, Task
    from pipeline.core.progress import Progress

__all__ = ["ray_workers"]

_CONNECT_SECONDS: Final = 10.0
_WAIT: Final = "RAY_gcs_server_port_wait_time_s"
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
        known = ray.exceptions
        self._lost = (known.WorkerCrashedError, known.NodeDiedError, known.OutOfMemoryError)
        self._store: dict[str, Any] = {}

    def perform(self, task: Task) -> Done:
        if self._spread:
            self._put(task)
        home = machine()
        wanted = {digest: self._store[digest] for digest in _digests(task)} if self._spread else {}
        try:
            result = self._ray.get(self._function.options(name=task.label).remote(task, home, wanted))
        except self._ray.exceptions.RayTaskError as error:
            if "failed to import on the worker" in str(error.cause):
                raise ToolError(
                    f"{task.label}: a worker cannot load the task: {_last_line(error.cause)}",
                    remedy="install the same version of quantize-trt on every machine of the cluster",
                ) from error
            raise error.cause from error
        except self._lost as error:
            raise ToolError(
                f"{task.label}: its worker was lost {_RETRIES + 1} times: {error}",
                remedy="often memory: give fewer --workers; finished runs are kept",
            ) from error
        except self._ray.exceptions.RayError as error:
            raise ToolError(f"{task.label}: Ray failed: {error}", remedy="finished runs are kept") from error
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


def _no_cluster(address: str, error: BaseException) -> InputError:
    words = _rays_words(error)
    remedy = "`ray start --head` starts one; without --address the work is done on this machine"
    if "InvalidAuthToken" in words or "authentication token" in words:
        remedy = (
            "the cluster wants its token: set RAY_AUTH_MODE=token and put the token that its head has in "
            "~/.ray/auth_token into the same place here, or into RAY_AUTH_TOKEN"
        )
    return InputError(f"no connection to a Ray cluster at {address!r}: {words}", remedy=remedy)


def _rays_words(error: BaseException) -> str:
    """What Ray itself says of the first cause. It hands causes on as the text of a traceback, too."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _last_line(error)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _host_and_port(address: str) -> tuple[str, int] | None:
    """None for ``auto`` and what else names no port."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    return (host.strip("[]"), int(port)) if separator and port.isdigit() else None


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    place = _host_and_port(address)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _on_this_machine(host: str) -> bool:
    """One can listen at an address of this machine only."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(place)
    except OSError:
        return False
    return True


def _offer_token(address: str) -> None:
    """Let Ray show the token of this account to a cluster on this machine, as it does by itself for ``auto`` alone.

    A cluster that is started where ``~/.ray/auth_token`` exists asks for that token (Ray 2.60), and every local
    ``ray.init`` leaves one there. Other machines get no token unless ``RAY_AUTH_MODE=token`` is set.
    """
    place = _host_and_port(address)
    if place is None or not _on_this_machine(place[0]):
        return
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # a Ray without tokens
        return
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextmanager
def _short_wait() -> Iterator[None]:
    """Ray asks a cluster that refuses it once a second, 20 times unless told otherwise."""
    if _WAIT in os.environ:
        yield
        return
    os.environ[_WAIT] = "3"
    try:
        yield
    finally:
        del os.environ[_WAIT]


@contextmanager
def ray_workers(count: int | None, address: str | None, progress: Progress) -> Iterator[_RayWorkers]:
    """Workers on the cluster at ``address``, or on one started here for the length of the block.

    Raises:
        InputError: Ray is not installed, there is no cluster at ``address``, or it does not let us in.
    """
    ray = require("ray", extra="cluster", purpose="--address" if address else "--workers")
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if address is None:
        options.update(num_cpus=count, include_dashboard=False)
        waiting: AbstractContextManager[None] = nullcontext()
    else:
        _check_reachable(address)
        _offer_token(address)
        waiting = _short_wait()
    try:
        with waiting:
            ray.init(address=address or "local", **options)  # None would look for a cluster that runs here
    except (ConnectionError, ValueError, RuntimeError, OSError, ray.exceptions.RayError) as error:
        if address is not None:
            raise _no_cluster(address, error) from error
        raise ToolError(f"Ray cannot start here: {error}", remedy="give --workers 1 to do without it") from error
    try:
        nodes = [node for node in ray.nodes() if node.get("Alive")]
        cores = int(ray.cluster_resources().get("CPU", 1))
        # A client of ray:// may sit outside the cluster.
        spread = len(nodes) > 1 or (address or "").startswith("ray://")
        workers = _RayWorkers(ray, min(count, cores) if count else cores, spread=spread)
        progress.note(f"Ray: {workers.count} evaluations at a time on {len(nodes)} machine(s)")
        yield workers
    finally:
        with suppress(Exception):
            ray.shutdown()
