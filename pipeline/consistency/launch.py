"""Which rank this process is, as torchrun or another launcher says in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Launch", "launched", "own_cores", "pin_to_cores"]


@dataclass(frozen=True)
class Launch:
    """The variables that torchrun sets. ``host:port`` is where the ranks' common store listens.

    A launcher that does not set the local ones is taken to start one rank on each machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free port (a single rank on its own)."""
    store_exists: bool = False
    """The launcher keeps the store; otherwise rank 0 does."""
    attempt: str = "0"
    """torchrun's restart count; keeps the keys of two attempts apart."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

        Raises:
            InputError: a variable is no number, the rank is outside the world, or several ranks have no address.
        """
        values = os.environ if environment is None else environment
        rank = _number(values, "RANK", 0)
        size = _number(values, "WORLD_SIZE", 1)
        if not 0 <= rank < size:
            raise InputError(f"RANK is {rank} and WORLD_SIZE is {size}; a rank is between 0 and WORLD_SIZE - 1")
        if size > 1:
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                if not values.get(name):
                    raise InputError(
                        f"WORLD_SIZE is {size} and {name} is not set",
                        remedy="start the ranks with torchrun, which sets it",
                    )
        return cls(
            rank=rank,
            size=size,
            local_rank=_number(values, "LOCAL_RANK", 0),
            local_size=_number(values, "LOCAL_WORLD_SIZE", 1),
            host=values.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(values, "MASTER_PORT", 0),
            store_exists=values.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
            attempt=values.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name} is {text!r}, expected a whole number", remedy="torchrun sets it") from error


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher such as torchrun started this process."""
    values = os.environ if environment is None else environment
    return "RANK" in values and "WORLD_SIZE" in values


def own_cores(cores: list[int], local_rank: int, local_size: int) -> list[int]:
    """The part of a machine's cores that one of its ranks may use: equal neighbouring parts, at least one core."""
    if local_size <= len(cores):
        return cores[local_rank * len(cores) // local_size : (local_rank + 1) * len(cores) // local_size]
    return [cores[local_rank % len(cores)]]


def pin_to_cores(launch: Launch) -> None:
    """Bind this process to its part of the cores, so that the ranks of one machine do not fight for all of them.

    Everything here takes its number of threads from the affinity mask.
    """
    if launch.local_size > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, own_cores(cores, launch.local_rank, launch.local_size))
