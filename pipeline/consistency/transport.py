"""Bytes between ranks through torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from pipeline.core.errors import ToolError
from pipeline.core.lazy import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.consistency.board import Board
    from pipeline.consistency.launch import Launch

__all__ = ["Backend", "Transport"]

Backend = Literal["auto", "gloo", "nccl"]


class Transport:
    """One process group. Every method raises torch's RuntimeError when the exchange fails."""

    def __init__(self, launch: Launch, backend: Backend) -> None:
        """Choose the device; auto: NCCL where every local rank has a GPU, gloo otherwise.

        Raises:
            ToolError: NCCL is asked for, and this rank has no GPU.
        """
        self._torch = require("torch", extra="dev", purpose="a run over several ranks")
        cuda = self._torch.cuda
        gpus = cuda.device_count() if cuda.is_available() else 0
        self._launch = launch
        self.device, self.backend = "cpu", "gloo"
        self.device_name: str | None = None
        """The GPU's name; None on the CPU."""
        if backend == "gloo" or (backend == "auto" and gpus < launch.local_size):
            return
        if gpus <= launch.local_rank:
            raise ToolError(
                f"rank {launch.rank} needs GPU {launch.local_rank}, this machine shows {gpus}",
                remedy="start at most one rank for each GPU, or take --backend gloo",
            )
        cuda.set_device(launch.local_rank)
        self.device, self.backend = f"cuda:{launch.local_rank}", "nccl"
        self.device_name = str(cuda.get_device_name(launch.local_rank))

    def start(self, board: Board, limit_s: float) -> None:
        """Connect with the other ranks, which all have to call this."""
        import torch.distributed as distributed

        distributed.init_process_group(
            self.backend,
            store=distributed.PrefixStore("torch", board.keys),
            rank=self._launch.rank,
            world_size=self._launch.size,
            timeout=timedelta(seconds=limit_s),
            device_id=self._torch.device(self.device) if self.device != "cpu" else None,
        )
        self._distributed: Any = distributed

    def stop(self) -> None:
        self._distributed.destroy_process_group()

    def send(self, data: bytes, to: int) -> None:
        self._distributed.send(self._numbers([len(data)]), to)
        self._distributed.send(self._tensor(data), to)

    def receive(self, source: int) -> bytes:
        length = self._numbers([0])
        self._distributed.recv(length, source)
        buffer = self._tensor(bytes(int(length.item())))
        self._distributed.recv(buffer, source)
        return self._data(buffer)

    def broadcast(self, data: bytes, source: int) -> bytes:
        length = self._numbers([len(data)])
        self._distributed.broadcast(length, source)
        buffer = self._tensor(data if self._launch.rank == source else bytes(int(length.item())))
        self._distributed.broadcast(buffer, source)
        return self._data(buffer)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, which have to be of one length."""
        buffers = [self._tensor(bytes(len(data))) for _ in range(self._launch.size)]
        self._distributed.all_gather(buffers, self._tensor(data))
        return [self._data(buffer) for buffer in buffers]

    def _numbers(self, values: Sequence[int]) -> Any:
        return self._torch.tensor(list(values), dtype=self._torch.int64, device=self.device)

    def _tensor(self, data: bytes) -> Any:
        whole = self._torch.frombuffer(bytearray(data or b"\0"), dtype=self._torch.uint8)
        return whole[: len(data)].to(self.device)

    def _data(self, buffer: Any) -> bytes:
        return bytes(buffer.cpu().numpy())
