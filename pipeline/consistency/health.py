"""The watcher: a thread in every rank that shows a sign of life and looks for its neighbour's.

Rank r watches rank r + 1 (a ring: the work does not grow with the number of ranks), and everybody looks for the one
verdict that ends the run. A rank has died when its process is gone (ranks of one machine see that at once) or when it
has given no sign of life for the limit; it stalls when it lives, does not wait for others and has not moved for the
limit. The thread lives beside whatever the rank is doing, also beside a collective operation that never returns.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.consistency.board import Board, BoardGone, Questions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.consistency.peers import Peer

__all__ = ["Activity", "Beat", "Sentinel", "Watcher", "judge"]

_TICK_S = 0.25
_BEAT_S = 1.0
_FRESH_S = 3 * _BEAT_S
"""Only who beats can be said to stall; who does not may have ended."""
_AFTER_SIGTERM_S = 2.0
"""How long a rank that is told to end looks for the reason before it ends without one."""
_GRACE_S = 5.0
"""How long the main thread may take to end by itself once there is a verdict."""


class Activity:
    """What this rank's main thread is doing; written there, read by the watcher."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        self._phase = "starting"
        self._waiting = False
        self._patience = 1.0

    def enter(self, phase: str, *, patience: float) -> None:
        """A new phase, which has to move within ``patience`` times the limit."""
        with self._lock:
            self._step += 1
            self._phase, self._patience = phase, patience

    def move(self) -> None:
        with self._lock:
            self._step += 1

    def wait(self, waiting: bool) -> None:
        with self._lock:
            self._step += 1
            self._waiting = waiting

    def beat(self, number: int) -> Beat:
        with self._lock:
            return Beat(number, self._step, self._phase, 0.0 if self._waiting else self._patience)


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    number: int
    step: int
    """Grows with every batch, phase and wait."""
    phase: str
    patience: float
    """How many limits it may stay without progress; 0: as long as it likes, because it waits for other ranks."""

    def text(self) -> str:
        return json.dumps([self.number, self.step, self.phase, self.patience])

    @classmethod
    def parse(cls, text: str) -> Beat:
        number, step, phase, patience = json.loads(text)
        return cls(number, step, phase, patience)


@dataclass
class _Seen:
    """The last beat of a peer, and when its number and its step last changed here (monotonic seconds)."""

    beat: Beat | None
    alive_at: float
    moved_at: float

    def update(self, beat: Beat | None, now: float) -> None:
        if beat is None or (self.beat is not None and beat.number == self.beat.number):
            return
        if self.beat is None or beat.step != self.beat.step or not beat.patience:
            self.moved_at = now
        self.beat, self.alive_at = beat, now


def judge(peer: Peer, beat: Beat | None, silent_s: float, still_s: float, limit_s: float) -> str | None:
    """What is wrong with a peer that gave its last sign of life ``silent_s`` ago and last moved ``still_s`` ago."""
    phase = beat.phase if beat is not None else "starting"
    if silent_s > limit_s:
        return f"{peer} has given no sign of life for {silent_s:.0f} s; its last word was: {phase}"
    allowed_s = limit_s * (beat.patience if beat is not None else 1.0)
    if allowed_s and still_s > allowed_s and silent_s < _FRESH_S:
        return f"{peer} stalls: {phase} for {still_s:.0f} s without progress (limit {allowed_s:.0f} s)"
    return None


class Watcher(threading.Thread):
    """Beats, watches the neighbour, and sees to it that the process ends when the run has ended."""

    def __init__(
        self,
        board: Board,
        rank: int,
        peers: list[Peer],
        activity: Activity,
        *,
        limit_s: float,
        verdict: Callable[[], bool],
        fail: Callable[[str], None],
        on_stuck: Callable[[], None],
    ) -> None:
        """Args:
        board: a connection of this thread's own.
        verdict: looks whether the run has ended early.
        fail: ends the run for all ranks, with a reason.
        on_stuck: called when the main thread has not ended in time after the verdict.
        """
        super().__init__(name="quantize-ranks", daemon=True)
        self._board, self._rank, self._peers, self._activity = board, rank, peers, activity
        self._limit_s, self._verdict, self._fail, self._on_stuck = limit_s, verdict, fail, on_stuck
        self._stop_event = threading.Event()
        self._told_to_end_at: float | None = None

    def told_to_end(self) -> None:
        """SIGTERM has come: torchrun sends it when another rank has died, so look at all of them before obeying."""
        if self._told_to_end_at is None:
            self._told_to_end_at = time.monotonic()

    def stop(self) -> None:
        self._stop_event.set()
        if self is not threading.current_thread() and self.is_alive():
            self.join(timeout=2 * _BEAT_S)

    def run(self) -> None:
        now = time.monotonic()
        neighbour = self._peers[(self._rank + 1) % len(self._peers)]
        seen = _Seen(None, now, now)
        beats, next_beat, verdict_at = 0, now, None
        while not self._stop_event.wait(_TICK_S):
            now = time.monotonic()
            if verdict_at is not None:
                if now - verdict_at > _GRACE_S:
                    self._on_stuck()
                    return
                continue
            try:
                if self._verdict():
                    verdict_at = now
                    continue
                if now >= next_beat:
                    beats, next_beat = beats + 1, now + _BEAT_S
                    self._board.put(f"beat/{self._rank}", self._activity.beat(beats).text())
                    text = self._board.take(f"beat/{neighbour.rank}")
                    seen.update(None if text is None else Beat.parse(text), now)
                if reason := self._reason(neighbour, seen, now):
                    self._fail(reason)
            except BoardGone as error:
                dead = next((peer for peer in self._peers if peer.visible and peer.gone()), None)
                self._fail(f"{dead} died" if dead is not None else error.message)

    def _reason(self, neighbour: Peer, seen: _Seen, now: float) -> str | None:
        if neighbour.rank == self._rank:
            return None
        suspects = [neighbour]
        if self._told_to_end_at is not None:
            suspects = [peer for peer in self._peers if peer.rank != self._rank]
        for peer in suspects:
            if peer.visible and peer.gone() and not self._board.has(f"left/{peer.rank}"):
                text = self._board.take(f"beat/{peer.rank}")
                phase = Beat.parse(text).phase if text is not None else "starting"
                return f"{peer} died; its last word was: {phase}"
        if self._told_to_end_at is not None:
            ended = now - self._told_to_end_at > _AFTER_SIGTERM_S
            return f"rank {self._rank} (process {os.getpid()}) was told to end (SIGTERM)" if ended else None
        silent_s = now - seen.alive_at
        reason = judge(neighbour, seen.beat, silent_s, now - seen.moved_at, self._limit_s)
        if reason is None or self._board.has(f"left/{neighbour.rank}"):
            return None
        if silent_s > self._limit_s and neighbour.visible:
            neighbour.kill()  # it cannot end by itself, and torchrun would wait 30 s for it
        return reason


class Sentinel(threading.Thread):
    """Ends the process when the board does not answer.

    Whoever asks a stopped keeper, or one behind a broken network, waits without end, the watcher included. This thread
    asks nobody.
    """

    def __init__(self, questions: Questions, *, fail: Callable[[float], None], on_stuck: Callable[[], None]) -> None:
        """Args:
        fail: ends the run in this rank, given how long a call has waited.
        on_stuck: ends the process.
        """
        super().__init__(name="quantize-sentinel", daemon=True)
        self._questions, self._fail, self._on_stuck = questions, fail, on_stuck
        self._stop_event = threading.Event()

    def stop(self) -> None:
        self._stop_event.set()

    def run(self) -> None:
        while not self._stop_event.wait(_TICK_S):
            waited_s = self._questions.overdue_s()
            if waited_s is not None:
                self._fail(waited_s)
                self._stop_event.wait(_TICK_S)  # the main thread may be free to end in order
                self._on_stuck()
                return
