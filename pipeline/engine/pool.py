"""An engine on a card and its slots, each lent to one request at a time, to any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from pipeline.engine.cuda import Device
    from pipeline.engine.loading import LoadedEngine
    from pipeline.engine.slot import Slot

__all__ = ["SlotPool"]


class SlotPool:
    """Owns ``loaded`` and the slots that are added, and gives their memory back."""

    def __init__(self, device: Device, loaded: LoadedEngine) -> None:
        self.device = device
        self.closed = False
        self._loaded = loaded
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._changed = threading.Condition()

    def add(self, slot: Slot) -> None:
        with self._changed:
            self._slots.append(slot)
            self._free.append(slot)
            self._changed.notify()

    def take(self) -> Slot:
        """A free slot; waits for one when all are in use.

        Raises:
            InputError: the pool is closed, or is while this waits.
        """
        with self._changed:
            while not self._free and not self.closed:
                self._changed.wait()
            if self.closed:
                raise InputError("the runner is closed")
            return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        with self._changed:
            if not self.closed:
                self._free.append(slot)
                self._changed.notify()

    def close(self) -> None:
        """Lend no slot any more, wake who waits for one, and give all memory back. Safe to call twice."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._changed.notify_all()
        with self.device.active():
            self.free()

    def free(self) -> None:
        """Give all memory back, inside ``device.active()``; for a pool that was not yet lent from."""
        for slot in self._slots:
            slot.free()
        self._slots, self._free = [], []
        self._loaded.close()
