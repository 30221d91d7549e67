"""Ranks forked from one process that has imported everything: a run then starts in milliseconds, not seconds."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

__all__ = ["PRELOADED", "fork", "free_port", "preload", "rank_environment"]

PRELOADED = (
    "onnxruntime", "torch.distributed", "onnx_ir", "onnxscript.optimizer", "onnxscript.rewriter",
    "calibrators.accumulate", "calibrators.mse", "calibrators.error", "pipeline.activations",
    "pipeline.core.ort_capture",
    "pipeline.consistency.launch", "pipeline.consistency.opening", "pipeline.consistency.ranks",
    "pipeline.consistency.report", "pipeline.export", "pipeline.prepare", "pipeline.placement.planner",
    "pipeline.placement.existing", "pipeline.placement.patterns", "pipeline.placement.rules.explain",
)  # fmt: skip
"""What every rank needs, and would import after the fork otherwise: sympy under onnx_ir alone takes half a second."""


def preload(modules: Iterable[str]) -> None:
    """Import ``modules`` and load the compiled loops of the statistic before the ranks are forked; starts no thread."""
    for module in modules:
        importlib.import_module(module)
    from calibrators.accumulate import BatchAccumulator

    some = BatchAccumulator()
    some.add(np.ones((1, 8), np.float32))
    some.statistics(0)


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
