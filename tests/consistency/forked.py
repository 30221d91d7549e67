"""Runs of several ranks, forked from one process that has imported everything: a run then takes a second, not twenty.

    python -m tests.consistency.forked < runs.json

``runs``: name to a list of command lines, one for each rank; the first word is the module. Prints, for each run, the
ranks' exit status, standard output and standard error.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.forked_ranks import PRELOADED, fork, free_port, preload, rank_environment

COMMAND_LINE = ("pipeline.cli.consistency", "pipeline.cli.calibrate", "pipeline.calibrate", "pipeline.quantize")
COMMANDS = {"pipeline.consistency": "pipeline.cli.consistency:command", "pipeline.cli": "pipeline.cli:main"}
LONGEST_S = 120.0


def command(arguments: list[str]) -> None:
    """The command of a module, as ``python -m`` would run it."""
    module, _, name = COMMANDS[arguments[0]].partition(":")
    getattr(importlib.import_module(module), name)(arguments[1:])


def run(ranks: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    port = free_port()
    started = []
    for rank, arguments in enumerate(ranks):
        files = (folder / f"{rank}.out", folder / f"{rank}.err")
        environment = rank_environment(rank, len(ranks), port)
        started.append((fork(functools.partial(command, arguments), environment, *files), files))
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
    preload((*PRELOADED, *COMMAND_LINE))
    results = {}
    for name, ranks in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(ranks, Path(folder))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
