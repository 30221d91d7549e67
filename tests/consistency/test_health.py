"""The judgement on a peer, and what can be seen of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.consistency.health import Activity, Beat, judge
from pipeline.consistency.peers import Peer, here

PEER = Peer(rank=2, host="node-b", pid=4711, started="1", machine="", device="x")


@pytest.mark.parametrize(
    ("silent_s", "still_s", "expected"),
    [
        (0.5, 0.5, None),
        (24.9, 24.9, None),
        (24.9, 90.0, None),  # silent: dead or stopped, which is for the limit to say
        (26.0, 3.0, "rank 2 (process 4711 on node-b) has given no sign of life for 26 s; its last word was: batch 7"),
        (1.0, 31.0, "rank 2 (process 4711 on node-b) stalls: batch 7 for 31 s without progress (limit 25 s)"),
    ],
)
def test_judge(silent_s: float, still_s: float, expected: str | None) -> None:
    assert judge(PEER, Beat(9, 30, "batch 7", 1.0), silent_s, still_s, 25.0) == expected


def test_a_beat_survives_the_board() -> None:
    activity = Activity()
    activity.enter("batch 3", patience=2.0)
    beat = activity.beat(5)
    assert Beat.parse(beat.text()) == beat == Beat(5, 1, "batch 3", 2.0)


def test_patience() -> None:
    activity = Activity()
    activity.enter("preparing", patience=4.0)
    assert judge(PEER, activity.beat(1), 1.0, 99.0, 25.0) is None
    assert judge(PEER, activity.beat(1), 1.0, 101.0, 25.0) is not None
    activity.wait(True)
    assert judge(PEER, activity.beat(1), 1.0, 1e6, 25.0) is None
    activity.wait(False)
    assert judge(PEER, activity.beat(1), 1.0, 101.0, 25.0) is not None
    assert judge(PEER, None, 1.0, 26.0, 25.0) is not None  # it has never said anything


def test_this_process_lives() -> None:
    me = here(0)
    assert me.visible
    assert not me.gone()
    assert not PEER.visible


def test_a_process_that_ended_or_was_replaced_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = here(0)
    peer = me.model_copy(update={"pid": process.pid, "started": "0"})
    assert peer.gone()  # another process has that number now
    process.kill()
    process.wait()
    assert peer.gone()


def test_a_zombie_is_gone() -> None:
    from pipeline.consistency import peers

    process = subprocess.Popen([sys.executable, "-c", ""])
    status = peers._status(process.pid)
    assert status is not None
    peer = here(0).model_copy(update={"pid": process.pid, "started": status[1]})
    while not peer.gone():
        pass
    assert peers._status(process.pid) is not None  # still there, and nobody has asked for its exit status
    process.wait()


def test_kill_ends_only_the_process_that_is_meant() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    from pipeline.consistency import peers

    status = peers._status(process.pid)
    assert status is not None
    here(0).model_copy(update={"pid": process.pid, "started": "0"}).kill()
    assert process.poll() is None
    here(0).model_copy(update={"pid": process.pid, "started": status[1]}).kill()
    assert process.wait(10) == -9
