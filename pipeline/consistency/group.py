"""The ranks of one run: they meet, wait for each other, exchange bytes, and end together with one reason.

Small values go over the board (torch's TCPStore), large ones over torch.distributed (gloo on CPUs, NCCL on GPUs). A
rank waits for others in a loop of its own, never inside a collective, so it can leave when the run ends; a collective
is entered only when all ranks stand before it. What ends the run first is written on the board once, and every rank
takes its reason from there.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.consistency.board import Board, BoardGone, Questions
from pipeline.consistency.health import Activity, Sentinel, Watcher
from pipeline.consistency.peers import Peer, here
from pipeline.consistency.transport import Backend, Transport
from pipeline.consistency.verdict import RanksDiffer, RunEnded, Verdict
from pipeline.core.errors import QuantizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.consistency.launch import Launch

__all__ = ["DEFAULT_LIMIT_S", "PREPARING", "Backend", "Group", "RunEnded"]

DEFAULT_LIMIT_S = 25.0
"""Seconds without a sign of life, or without progress within one batch, after which a rank is given up. torchrun kills
what is left of a run after 30 s more, so a run that stalls is over in less than a minute."""

PREPARING = 20.0
"""Patience, in limits, with what comes before the first batch: exporting a model, hashing the data."""

_ANSWER_EXTRA_S = 2.0
"""A silent board counts as one a little later than a silent rank, so that the watchers name the rank if they can."""
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1
_SETTLE_S = 5.0
"""How long the rank that keeps the board stays for the others."""
_EXPLANATION_S = 3.0
"""How long a failed exchange waits for the watchers to find out which rank is behind it."""


class Group:
    """This process's membership. Use it from one thread."""

    def __init__(
        self,
        launch: Launch,
        *,
        limit_s: float = DEFAULT_LIMIT_S,
        say: Callable[[str], None],
        on_stuck: Callable[[], None],
    ) -> None:
        """Args:
        limit_s: see :data:`DEFAULT_LIMIT_S`.
        say: tells the user why the run ends; called in one rank only, from any thread.
        on_stuck: called when the run has ended and this process's main thread does not return, because it is inside a
            call that nothing can interrupt. Must end the process.
        """
        self.rank, self.size, self.local_rank = launch.rank, launch.size, launch.local_rank
        self.peers: tuple[Peer, ...] = ()
        self.activity = Activity()
        self._launch, self._limit_s, self._on_stuck = launch, limit_s, on_stuck
        self._verdict = Verdict(launch, say)
        self._board: Board | None = None
        self._watcher: Watcher | None = None
        self._questions = Questions()
        self._sentinel = Sentinel(self._questions, fail=self._silent_board, on_stuck=on_stuck)
        self._told_to_end_at: float | None = None
        self._transport: Transport | None = None
        self._gathers = 0

    def join(self, backend: Backend = "auto") -> None:
        """Meet the other ranks.

        Args:
            backend: auto: NCCL where every local rank has a GPU, gloo otherwise.

        Raises:
            BoardGone: the common store is not there.
            ToolError: NCCL is asked for, and this rank has no GPU.
            RunEnded: a rank did not come in time, or another one has failed.
        """
        keeper = self.rank == 0 and not self._launch.store_exists
        answer_s = self._limit_s + _ANSWER_EXTRA_S
        self._sentinel.start()
        self._board = Board(self._launch, self._limit_s, self._questions, limit_s=answer_s, keeper=keeper)
        if self._launch.port == 0:
            self._launch = replace(self._launch, port=self.board.port)
        self._transport = Transport(self._launch, backend)
        with self._on_board():
            self.board.put(f"peer/{self.rank}", here(self.rank, self._transport.device_name).model_dump_json())
            self._meet(self._limit_s)
        if self.size > 1:
            board = Board(self._launch, self._limit_s, self._questions, limit_s=answer_s, keeper=False)
            self._watcher = Watcher(
                board,
                self.rank,
                list(self.peers),
                self.activity,
                limit_s=self._limit_s,
                verdict=lambda: self._verdict.look(board),
                fail=lambda reason: self._verdict.end(reason, board),
                on_stuck=self._on_stuck,
            )
            if self._told_to_end_at is not None:
                self._watcher.told_to_end()
            self._watcher.start()
        self.phase("connecting")
        with self._explained("connecting the ranks"), self._questions.asking(answer_s):
            self._transport.start(self.board, self._limit_s)

    @property
    def board(self) -> Board:
        if self._board is None:
            raise RuntimeError("the group has not been joined")
        return self._board

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the group has not been joined")
        return self._transport

    # -- what the rank is doing --------------------------------------------------------------------------------------

    def phase(self, name: str, *, patience: float = 1.0) -> None:
        """Say what comes now; without progress for ``patience`` times the limit it counts as a stall."""
        self.activity.enter(name, patience=patience)
        self.check()

    def check(self) -> None:
        """Raise :class:`RunEnded` when another rank has ended the run; to be called between two pieces of work."""
        self.activity.move()
        self._verdict.raise_if_ended()

    def told_to_end(self) -> None:
        """For a SIGTERM handler: torchrun sends it when another rank has died, so the reason is looked for first."""
        self._told_to_end_at = self._told_to_end_at or time.monotonic()
        if self._watcher is not None:
            self._watcher.told_to_end()

    def fail(self, error: BaseException) -> None:
        """End the run for every rank because of an error in this one; says nothing if it has ended already."""
        if isinstance(error, QuantizeError):
            text, remedy = error.message, error.remedy
        else:
            text, remedy = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, None
        if not isinstance(error, (RanksDiffer, BoardGone)):
            text = f"rank {self.rank}: {text}"
        if self._board is None:
            self._verdict.end_alone(text, remedy=remedy)
        else:
            self._verdict.end(text, self._board, remedy=remedy)

    def leave(self) -> None:
        """Part in peace: every rank has come to its end."""
        self.phase("leaving")
        self.barrier("leave")
        self.board.put(f"left/{self.rank}", "")
        if self._watcher is not None:
            self._watcher.stop()
        self.transport.stop()
        self._keep_board_until("left")
        self._sentinel.stop()

    def settle(self) -> None:
        """After a failed run, before the process ends: let the others read the reason."""
        with suppress(BoardGone):
            self._keep_board_until("ended")

    def _keep_board_until(self, word: str) -> None:
        """Where this process keeps the board, wait until every living rank has said ``word``."""
        if self.rank or self._launch.store_exists or self._board is None:
            return
        until = time.monotonic() + _SETTLE_S
        waiting: dict[int, Peer] = {}
        self._look_for_peers(waiting)
        del waiting[0]
        while waiting and time.monotonic() < until:
            for rank, peer in list(waiting.items()):
                if self.board.has(f"{word}/{rank}") or (peer.visible and peer.gone()):
                    del waiting[rank]
            time.sleep(_FIRST_POLL_S)

    # -- small values ------------------------------------------------------------------------------------------------

    def barrier(self, name: str) -> None:
        """Wait until every rank has come to the barrier ``name`` (used once in a run)."""
        with self._on_board():
            if self.board.count(f"barrier/{name}") == self.size:
                self.board.put(f"open/{name}", "")
            self._await(f"open/{name}")

    def gather_text(self, name: str, value: str) -> list[str] | None:
        """Every rank's ``value`` in rank 0, None in the others. Ends with a barrier."""
        with self._on_board():
            self.board.put(f"text/{name}/{self.rank}", value)
            self.barrier(f"text/{name}")
            if self.rank:
                return None
            return [self.board.take(f"text/{name}/{rank}") or "" for rank in range(self.size)]

    def announce(self, name: str, value: str | None = None) -> str:
        """Rank 0 gives ``value``, every rank gets it."""
        with self._on_board():
            if self.rank == 0 and value is not None:
                self.board.put(f"said/{name}", value)
                return value
            self._await(f"said/{name}")
            return self.board.take(f"said/{name}") or ""

    # -- large values ------------------------------------------------------------------------------------------------

    def send(self, data: bytes, to: int) -> None:
        """Send bytes to one rank, which has to :meth:`receive` them."""
        with self._explained(f"sending to rank {to}"):
            self.transport.send(data, to)

    def receive(self, source: int) -> bytes:
        with self._explained(f"receiving from rank {source}"):
            return self.transport.receive(source)

    def broadcast(self, data: bytes, source: int) -> bytes:
        """``data`` of rank ``source`` in every rank."""
        with self._explained(f"the broadcast of rank {source}"):
            return self.transport.broadcast(data, source)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of one length, in every rank."""
        self._gathers += 1
        self.barrier(f"gather/{self._gathers}")
        with self._explained("the all-gather"):
            return self.transport.all_gather(data)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _meet(self, limit_s: float) -> None:
        """Wait until every rank has introduced itself; rank 0 collects, and tells the others who is there."""
        until = time.monotonic() + limit_s + (1.0 if self.rank else 0.0)  # rank 0 knows better who is missing
        found: dict[int, Peer] = {}
        while not self.peers:
            if self.rank == 0:
                self._look_for_peers(found)
                if len(found) == self.size:
                    self.board.put("peers", json.dumps([found[rank].model_dump() for rank in range(self.size)]))
            if (text := self.board.take("peers")) is not None:
                self.peers = tuple(Peer.model_validate(entry) for entry in json.loads(text))
                return
            self._verdict.look(self.board)
            self._verdict.raise_if_ended()
            told = self._told_to_end_at is not None and time.monotonic() - self._told_to_end_at > _EXPLANATION_S
            if told or time.monotonic() > until:
                self._look_for_peers(found)
                missing = ", ".join(str(rank) for rank in range(self.size) if rank not in found)
                self._verdict.end(
                    f"rank {missing or 0} of {self.size} did not come"
                    + (", and the launcher ended the run (SIGTERM)" if told else f" within {limit_s:.0f} s"),
                    self.board,
                    remedy="look at the output of the machine it should run on; every rank needs the same WORLD_SIZE",
                )
            time.sleep(_LAST_POLL_S)

    def _look_for_peers(self, found: dict[int, Peer]) -> None:
        for rank in range(self.size):
            if rank not in found and (text := self.board.take(f"peer/{rank}")) is not None:
                found[rank] = Peer.model_validate_json(text)

    def _await(self, name: str) -> None:
        pause = _FIRST_POLL_S
        self.activity.wait(True)
        while not self.board.has(name):
            self._verdict.raise_if_ended()
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
        self.activity.wait(False)

    @contextmanager
    def _on_board(self) -> Iterator[None]:
        try:
            yield
        except BoardGone as error:
            self._explain(error.message)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Around a collective: torch's own errors become the run's one reason."""
        self._verdict.raise_if_ended()
        try:
            yield
        except RuntimeError as error:
            self._explain(f"{what} failed: {str(error).strip().splitlines()[0]}")

    def _explain(self, otherwise: str) -> None:
        """The verdict of the watchers if they find one, else ``otherwise``; raises in any case."""
        until = time.monotonic() + _EXPLANATION_S
        while time.monotonic() < until:
            self._verdict.raise_if_ended()
            time.sleep(_LAST_POLL_S)
        self._verdict.end(f"rank {self.rank}: {otherwise}", self.board)
        self._verdict.raise_if_ended()

    def _silent_board(self, waited_s: float) -> None:
        """For the sentinel: the board does not answer, so every rank is on its own."""
        keeper = "the launcher" if self._launch.store_exists else self.peers[0] if self.peers else "rank 0"
        self._verdict.end_alone(
            f"{keeper}, which keeps the ranks' common store, has given no sign of life for {waited_s:.0f} s"
        )
        if isinstance(keeper, Peer) and keeper.visible:
            keeper.kill()  # it cannot end by itself, and torchrun would wait 30 s for it
