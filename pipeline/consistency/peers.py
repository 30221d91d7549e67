"""Who a rank is, and whether a process on this machine still lives."""

from __future__ import annotations

import os
import platform
import signal
import socket
from contextlib import suppress
from pathlib import Path

from pipeline.records import Record

__all__ = ["Peer", "here"]


class Peer(Record):
    """A rank's process, as it introduces itself to the others."""

    rank: int
    host: str
    pid: int
    started: str
    """The kernel's start time of the process: tells a reused process number."""
    machine: str
    """Boot and process-number namespace: equal where :meth:`gone` can look. Empty where that cannot be known."""
    device: str
    """Processor or GPU, for people and for the note that kinds differ."""

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    @property
    def visible(self) -> bool:
        """Whether this process can see that one."""
        return bool(self.machine) and self.machine == _machine()

    def gone(self) -> bool:
        """Whether the process has ended. Only for a :attr:`visible` peer."""
        status = _status(self.pid)
        return status is None or status[0] in ("Z", "X") or status[1] != self.started

    def kill(self) -> None:
        """End the process at once. Only for a :attr:`visible` peer of this run."""
        if not self.gone():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def here(rank: int, device: str | None = None) -> Peer:
    """This process."""
    status = _status(os.getpid())
    return Peer(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=status[1] if status else "",
        machine=_machine() if status else "",
        device=device or _processor(),
    )


def _status(pid: int) -> tuple[str, str] | None:
    """State letter and start time from ``/proc``; None where there is no such process (or no ``/proc``)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces
    return fields[0], fields[19]


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _processor() -> str:
    """The processor's name, such as ``AMD EPYC 9B14``: another kind rounds float sums in another order."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
