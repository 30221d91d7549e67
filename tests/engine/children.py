"""Misbehaving child processes for the tests of :mod:`pipeline.engine.process`."""

from __future__ import annotations

import os
import signal
import sys
import time

from pipeline.engine.process import Reporter, die_with_parent


def main(arguments: list[str]) -> None:
    """``[what to do, pipe]``."""
    die_with_parent()
    action, descriptor = arguments
    reporter = Reporter(int(descriptor))
    reporter.send("message", severity="warning", source="logger", text="about to fall")
    sys.stdout.write("printed by a library\n")
    sys.stdout.flush()
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif action == "torn":
        os.write(int(descriptor), b'{"event": "mess')
        os._exit(3)
    elif action == "sleep":
        time.sleep(60)
    elif action == "pid":
        reporter.send("pid", pid=os.getpid())
        time.sleep(60)
    reporter.send("done", path=sys.path)
