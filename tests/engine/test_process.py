"""Child processes: events, crashes, time limits, the end of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pipeline.engine.process import Sampler, python_command, run_child

ROOT = Path(__file__).resolve().parents[2]


def run(action: str, timeout_s: float | None = 60):
    events: list[dict[str, object]] = []
    return run_child("tests.engine.children", [action], on_event=events.append, timeout_s=timeout_s), events


def test_events_arrive_in_order() -> None:
    ended, events = run("finish")
    assert (ended.status, ended.timed_out) == (0, False)
    assert [event["event"] for event in events] == ["message", "done"]
    assert ended.log == "printed by a library"


def test_a_crash_keeps_what_was_said_before() -> None:
    ended, events = run("crash")
    assert ended.how == "signal SIGSEGV"
    assert [event["event"] for event in events] == ["message"]


def test_a_torn_last_line_is_dropped() -> None:
    ended, events = run("torn")
    assert ended.how == "exit status 3"
    assert [event["event"] for event in events] == ["message"]


def test_a_child_that_takes_too_long_is_killed() -> None:
    start = time.monotonic()
    ended, _ = run("sleep", timeout_s=1)
    assert ended.timed_out
    assert ended.how == "signal SIGKILL"
    assert time.monotonic() - start < 30


def test_an_unknown_signal_has_its_number() -> None:
    from pipeline.engine.process import Ended

    assert Ended(status=-99, timed_out=False, log="").how == "signal 99"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(ROOT)!r})
            from pipeline.engine.process import run_child
            def say(event):
                if event["event"] == "pid":
                    print(event["pid"], flush=True)
            run_child("tests.engine.children", ["pid"], on_event=say, timeout_s=None)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(500):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child outlived its parent")


def test_the_command_puts_the_package_first_and_the_current_folder_nowhere() -> None:
    command = python_command("some.module", "argument")
    paths = command[3].split("\n")
    assert paths[0] == str(ROOT)
    assert "" not in paths
    assert command[4:] == ["some.module", "argument"]


def test_the_sampler_keeps_the_largest_value() -> None:
    values = iter([5, 7, 30, 6, None])
    sampler = Sampler(lambda: next(values, 6), period_s=0.001)
    with sampler:
        time.sleep(0.1)
    assert sampler.growth == 25


def test_a_sampler_that_reads_nothing_says_nothing() -> None:
    with Sampler(lambda: None, period_s=0.001) as sampler:
        pass
    assert sampler.growth is None
