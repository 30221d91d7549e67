"""The command line in processes forked from one that has imported the packages of others: it starts in milliseconds.

``python -m pipeline.cli`` spends most of a small build on importing seaborn, scipy, numba, sympy and onnxruntime. Here
a server imports those, and nothing of the project: each command is a process of its own in which ``pipeline.cli`` runs
as ``__main__``, is imported anew, and starts its threads. What a fresh interpreter may do differently is for tests that
start one.

    python -m tests.forked_cli < requests

A request is a line ``{"args", "out", "err", "timeout"}``; the answer is a line with the exit status, null when the time
was up.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.forked_ranks import fork

ROOT = Path(__file__).resolve().parents[1]
OTHERS = (
    "numpy", "pydantic", "yaml", "rich.table", "rich.progress", "rich.console", "onnx", "onnx.reference", "onnxruntime",
    "onnx_ir", "onnxscript.optimizer", "onnxscript.rewriter", "pandas", "matplotlib.backends.backend_agg",
    "matplotlib.pyplot", "seaborn",
)  # fmt: skip


def _command(arguments: Sequence[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the requests are not the command's
    sys.argv = ["quantize", *arguments]
    runpy.run_module("pipeline.cli", run_name="__main__", alter_sys=True)


def _run(arguments: Sequence[str], out: Path, err: Path, timeout: float) -> int | None:
    pid = fork(functools.partial(_command, arguments), {}, out, err)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def _serve() -> None:
    import numba

    for module in OTHERS:
        importlib.import_module(module)
    numba.njit(lambda: 0)()  # the first compilation loads numba's registries
    for line in sys.stdin:
        wanted = json.loads(line)
        status = _run(wanted["args"], Path(wanted["out"]), Path(wanted["err"]), wanted["timeout"])
        print(json.dumps(status), flush=True)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One for each process that asks; it ends with its standard input."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.forked_cli"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(started.communicate)
    return started


def quantize(*arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """``quantize ARGUMENTS`` as :func:`subprocess.run` gives it.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
    """
    words: list[str] = [str(word) for word in arguments]
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        request: dict[str, Any] = {"args": words, "out": str(out), "err": str(err), "timeout": timeout}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server has ended"
        status = json.loads(answer)
        if status is None:
            raise subprocess.TimeoutExpired(words, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


if __name__ == "__main__":
    _serve()
