"""Ranks forked from one process that has imported everything: a run then starts in milliseconds, not seconds."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["PRELOADED", "fork", "free_port", "preload", "rank_environment"]

PRELOADED = (
    "onnxruntime", "torch.distributed", "calibrators.accumulate", "pipeline.consistency.opening",
    "pipeline.consistency.ranks", "pipeline.export", "pipeline.prepare", "pipeline.placement.planner",
)  # fmt: skip
"""What every rank needs."""


def preload(modules: Iterable[str]) -> None:
    """Import ``modules`` before the ranks are forked."""
    for module in modules:
        importlib.import_module(module)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of one machine whose store listens on ``port``."""
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def fork(function: Callable[[], object], environment: dict[str, str], out: Path, err: Path | None = None) -> int:
    """Run ``function`` in a child whose standard output goes to ``out`` and standard error to ``err``.

    Args:
        err: None: ``out`` gets both.

    Returns:
        The child's process number; its exit status is that of a :class:`SystemExit`, 1 after another exception, else 0.
    """
    for path in filter(None, (out, err)):
        path.touch()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        first = os.open(out, os.O_WRONLY)
        os.dup2(first, 1)
        os.dup2(first if err is None else os.open(err, os.O_WRONLY), 2)
        os.environ.update(environment)
        function()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
