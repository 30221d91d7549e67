"""Runs of several ranks, forked from one process that has imported everything: a run then takes a second, not twenty.

    python -m tests.consistency.forked < runs.json

``runs``: name to a list of command lines, one for each rank; the first word is the module. Prints, for each run, the
ranks' exit status, standard output and standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch.distributed", "onnxruntime", "calibrators.accumulate", "pipeline.cli.consistency", "pipeline.cli.calibrate",
    "pipeline.consistency.opening", "pipeline.consistency.ranks", "pipeline.export", "pipeline.prepare",
    "pipeline.placement.planner", "pipeline.calibrate", "pipeline.quantize",
)  # fmt: skip
COMMANDS = {"pipeline.consistency": "pipeline.cli.consistency:command", "pipeline.cli": "pipeline.cli:main"}
LONGEST_S = 120.0


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def child(arguments: list[str], environment: dict[str, str], files: tuple[Path, Path]) -> int:
    """Fork a rank; its process number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for descriptor, path in zip((1, 2), files, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ.update(environment)
        module, _, name = COMMANDS[arguments[0]].partition(":")
        getattr(importlib.import_module(module), name)(arguments[1:])
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(ranks: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    base = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1"}
    base["MASTER_PORT"] = str(free_port())
    started = []
    for rank, arguments in enumerate(ranks):
        environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        files = (folder / f"{rank}.out", folder / f"{rank}.err")
        started.append((child(arguments, environment, files), files))
    done = []
    until = time.monotonic() + LONGEST_S
    for pid, (out, err) in started:
        ended = 0
        while not ended and time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        if not ended:
            os.kill(pid, 9)
            _, status = os.waitpid(pid, 0)
        done.append({"status": os.waitstatus_to_exitcode(status), "out": out.read_text(), "err": err.read_text()})
    return done


def main() -> None:
    runs: dict[str, list[list[str]]] = json.load(sys.stdin)
    for module in PRELOADED:
        importlib.import_module(module)
    results = {}
    for name, ranks in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(ranks, Path(folder))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
