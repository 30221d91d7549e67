"""The ranks of one run: they meet, wait for each other, exchange bytes, and end together with one reason.

Small values go over the board (torch's TCPStore), large ones over torch.distributed (gloo on CPUs, NCCL on GPUs). A
rank waits for others in a loop of its own, never inside a collective, so it can leave when the run ends; a collective
is entered only when all ranks stand before it. What ends the run first is written on the board once, and every rank
takes its reason from there.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from pipeline.consistency.board import Board, BoardGone
from pipeline.consistency.health import Activity, Watcher
from pipeline.consistency.peers import Peer, here
from pipeline.core.errors import QuantizeError, ToolError
from pipeline.core.lazy import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.consistency.launch import Launch

__all__ = ["DEFAULT_LIMIT_S", "PREPARING", "Group", "RunEnded"]

DEFAULT_LIMIT_S = 25.0
"""Seconds without a sign of life, or without progress within one batch, after which a rank is given up. torchrun kills
what is left of a run after 30 s more, so a run that stalls is over in less than a minute."""

PREPARING = 20.0
"""Patience, in limits, with what comes before the first batch: exporting a model, hashing the data."""

_JOIN_EXTRA_S = 20.0
"""Starting Python and importing torch may take so much longer on one machine than on another."""
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1
_EXPLANATION_S = 3.0
"""How long a failed exchange waits for the watchers to find out which rank is behind it."""

Backend = Literal["auto", "gloo", "nccl"]


class RunEnded(ToolError):
    """The run over several ranks has ended early, for the reason that the first rank to know it gave."""


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
        self.rank, self.size = launch.rank, launch.size
        self.device = "cpu"
        self.peers: tuple[Peer, ...] = ()
        self.activity = Activity()
        self._launch, self._limit_s, self._say, self._on_stuck = launch, limit_s, say, on_stuck
        self._lock = threading.Lock()
        self._verdict: dict[str, Any] | None = None
        self._board: Board | None = None
        self._watcher: Watcher | None = None
        self._told_to_end_at: float | None = None
        self._distributed: Any = None
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
        self._board = Board(self._launch, self._limit_s + _JOIN_EXTRA_S, keeper=keeper)
        if self._launch.port == 0:
            self._launch = replace(self._launch, port=self.board.port)
        self.device, chosen = _choose_device(self._launch, backend)
        self.board.put(f"peer/{self.rank}", here(self.rank, _device_name(self.device)).model_dump_json())
        with self._on_board():
            self._meet(self._limit_s + _JOIN_EXTRA_S)
        if self.size > 1:
            board = Board(self._launch, self._limit_s, keeper=False)
            self._watcher = Watcher(
                board,
                self.rank,
                list(self.peers),
                self.activity,
                limit_s=self._limit_s,
                verdict=lambda: self._look_for_verdict(board),
                fail=lambda reason: self._end(reason, board=board),
                on_stuck=self._on_stuck,
            )
            if self._told_to_end_at is not None:
                self._watcher.told_to_end()
            self._watcher.start()
        self.phase("connecting")
        with self._explained("connecting the ranks"):
            self._distributed = _start(self._launch, self.board, chosen, self.device, self._limit_s)

    @property
    def board(self) -> Board:
        if self._board is None:
            raise RuntimeError("the group has not been joined")
        return self._board

    @property
    def backend(self) -> str:
        return str(self._distributed.get_backend())

    # -- what the rank is doing --------------------------------------------------------------------------------------

    def phase(self, name: str, *, patience: float = 1.0) -> None:
        """Say what comes now; without progress for ``patience`` times the limit it counts as a stall."""
        self.activity.enter(name, patience=patience)
        self.check()

    def check(self) -> None:
        """Raise :class:`RunEnded` when another rank has ended the run; to be called between two pieces of work."""
        self.activity.move()
        self._raise_verdict()

    def told_to_end(self) -> None:
        """For a SIGTERM handler: torchrun sends it when another rank has died, so the reason is looked for first."""
        self._told_to_end_at = self._told_to_end_at or time.monotonic()
        if self._watcher is not None:
            self._watcher.told_to_end()

    def fail(self, error: BaseException) -> None:
        """End the run for every rank because of an error in this one; says nothing if it has ended already."""
        if isinstance(error, QuantizeError):
            self._end(error.message, remedy=error.remedy)
        else:
            self._end(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def leave(self) -> None:
        """Part in peace: every rank has come to its end."""
        self.phase("leaving")
        self.barrier("leave")
        self.board.put(f"left/{self.rank}", "")
        if self._watcher is not None:
            self._watcher.stop()
        self._distributed.destroy_process_group()
        if self.rank == 0:  # it may keep the board, which the others still read
            until = time.monotonic() + self._limit_s
            while time.monotonic() < until and not all(self.board.has(f"left/{rank}") for rank in range(self.size)):
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
            self._distributed.send(self._tensor([len(data)]), to)
            self._distributed.send(self._bytes(data), to)

    def receive(self, source: int) -> bytes:
        with self._explained(f"receiving from rank {source}"):
            length = self._tensor([0])
            self._distributed.recv(length, source)
            buffer = self._bytes(bytes(int(length.item())))
            self._distributed.recv(buffer, source)
            return bytes(buffer.cpu().numpy())

    def broadcast(self, data: bytes, source: int) -> bytes:
        """``data`` of rank ``source`` in every rank."""
        with self._explained(f"the broadcast of rank {source}"):
            length = self._tensor([len(data)])
            self._distributed.broadcast(length, source)
            buffer = self._bytes(data if self.rank == source else bytes(int(length.item())))
            self._distributed.broadcast(buffer, source)
            return bytes(buffer.cpu().numpy())

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of one length, in every rank."""
        self._gathers += 1
        self.barrier(f"gather/{self._gathers}")
        with self._explained("the all-gather"):
            own = self._bytes(data)
            buffers = [self._bytes(bytes(len(data))) for _ in range(self.size)]
            self._distributed.all_gather(buffers, own)
            return [bytes(buffer.cpu().numpy()) for buffer in buffers]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _tensor(self, values: Sequence[int]) -> Any:
        import torch

        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def _bytes(self, data: bytes) -> Any:
        import torch

        return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(self.device)

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
            self._look_for_verdict(self.board)
            self._raise_verdict()
            told = self._told_to_end_at is not None and time.monotonic() - self._told_to_end_at > _EXPLANATION_S
            if told or time.monotonic() > until:
                self._look_for_peers(found)
                missing = ", ".join(str(rank) for rank in range(self.size) if rank not in found)
                self._end(
                    f"rank {missing or 0} of {self.size} did not come"
                    + (", and the launcher ended the run (SIGTERM)" if told else f" within {limit_s:.0f} s"),
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
            self._raise_verdict()
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
        self._raise_verdict()
        try:
            yield
        except RuntimeError as error:
            self._explain(f"{what} failed: {str(error).strip().splitlines()[0]}")

    def _explain(self, otherwise: str) -> None:
        """The verdict of the watchers if they find one, else ``otherwise``; raises in any case."""
        until = time.monotonic() + _EXPLANATION_S
        while time.monotonic() < until:
            self._raise_verdict()
            time.sleep(_LAST_POLL_S)
        self._end(otherwise)
        self._raise_verdict()

    def _look_for_verdict(self, board: Board) -> bool:
        """Whether the run has ended, here or in another rank."""
        if self._verdict is None and (text := board.take("verdict")) is not None:
            self._verdict = json.loads(text)
        return self._verdict is not None

    def _raise_verdict(self) -> None:
        if self._verdict is not None:
            raise RunEnded(self._verdict["message"], remedy=self._verdict["remedy"])

    def _end(self, reason: str, *, remedy: str | None = None, board: Board | None = None) -> None:
        """Give the run's one reason if nobody has; the rank that does also says it to the user."""
        with self._lock:
            if self._verdict is not None:
                return
            text = reason if "rank" in reason else f"rank {self.rank}: {reason}"
            written = json.dumps({"by": self.rank, "message": text, "remedy": remedy or _REMEDY})
            try:
                stands = (board or self.board).claim("verdict", written)
            except BoardGone:
                stands = written  # every rank is on its own now and says what it knows
            self._verdict = json.loads(stands)
            if stands == written:
                self._say(f"{text}\n{remedy or _REMEDY}")


_REMEDY = (
    "no partial result was written; start the run again (--rank-timeout sets how long a rank may take for one step)"
)


def _choose_device(launch: Launch, backend: Backend) -> tuple[str, str]:
    """Device and backend of this rank."""
    torch = require("torch", extra="dev", purpose="a run over several ranks")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "gloo" or (backend == "auto" and gpus < launch.local_size):
        return "cpu", "gloo"
    if gpus <= launch.local_rank:
        raise ToolError(
            f"rank {launch.rank} needs GPU {launch.local_rank}, this machine shows {gpus}",
            remedy="start at most one rank for each GPU, or take --backend gloo",
        )
    torch.cuda.set_device(launch.local_rank)
    return f"cuda:{launch.local_rank}", "nccl"


def _device_name(device: str) -> str | None:
    if device == "cpu":
        return None
    import torch

    return str(torch.cuda.get_device_name(device))


def _start(launch: Launch, board: Board, backend: str, device: str, limit_s: float) -> Any:
    import torch
    import torch.distributed as distributed

    distributed.init_process_group(
        backend,
        store=distributed.PrefixStore("torch", board.keys),
        rank=launch.rank,
        world_size=launch.size,
        timeout=timedelta(seconds=limit_s),
        device_id=torch.device(device) if device != "cpu" else None,
    )
    return distributed
