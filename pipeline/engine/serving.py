"""What everything that answers requests has in common, whether one engine stands behind it or two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.feeds import as_taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pipeline.config import Profile
    from pipeline.engine.cuda import Device
    from pipeline.engine.pool import SlotPool
    from pipeline.engine.profiles import Shape
    from pipeline.engine.slot import Slot
    from pipeline.records import TensorSpec

__all__ = ["Arrays", "Pending", "Request", "Serving"]

Arrays = dict[str, np.ndarray]
Self = TypeVar("Self", bound="Serving")


class Request:
    """A slot in use. ``inputs`` are pinned arrays to fill; the results of ``wait`` are pinned arrays too.

    Both are the slot's own memory: copy what must outlive :meth:`release`.
    """

    def __init__(self, pool: SlotPool, slot: Slot, shapes: Mapping[str, Shape]) -> None:
        self._pool, self._slot = pool, slot
        self.inputs: Arrays = slot.prepare(shapes)

    def copy_in(self) -> None:
        """Enqueue the copies of the inputs to the card."""
        with self._active() as slot:
            slot.copy_in()

    def execute(self) -> None:
        """Enqueue the computation alone."""
        with self._active() as slot:
            slot.execute()

    def copy_out(self) -> None:
        """Enqueue the copies of the outputs to the host."""
        with self._active() as slot:
            slot.copy_out()

    def submit(self) -> None:
        """Enqueue everything and return at once."""
        with self._active() as slot:
            slot.copy_in()
            slot.execute()
            slot.copy_out()

    def wait(self) -> Arrays:
        """Wait for what was enqueued; the outputs."""
        with self._active() as slot:
            return slot.finish()

    @property
    def stream(self) -> Any:
        """The slot's stream, for events of a measurement."""
        return self._slot.stream

    def release(self) -> None:
        """Give the slot back. Safe to call twice."""
        slot, self._slot = self._slot, None  # type: ignore[assignment]
        if slot is not None:
            self._pool.give_back(slot)

    @contextmanager
    def _active(self) -> Iterator[Slot]:
        if self._slot is None:
            raise InputError("this request was released", remedy="use a request inside its `with` block")
        if self._pool.closed:
            raise InputError("the runner is closed")
        with self._pool.device.active():
            yield self._slot


class Pending:
    """A request on its way, from :meth:`Serving.submit`. Its slot is free again after :meth:`result`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._outputs: Arrays | None = None

    def result(self) -> Arrays:
        """Wait; the outputs, in memory of their own."""
        if self._outputs is None:
            try:
                self._outputs = {name: values.copy() for name, values in self._request.wait().items()}
            finally:
                self._request.release()
        return self._outputs


class Serving(ABC):
    """Answers requests from any thread; a context manager that gives the card's memory back at its end."""

    device: Device
    in_flight: int
    """Requests that may be on the card at a time."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    @abstractmethod
    def profiles(self) -> tuple[Profile, ...]:
        """The shapes that are answered."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Memory of the card that loading took: weights, scratch, without inputs and outputs."""

    @property
    @abstractmethod
    def uncaptured(self) -> Mapping[str, str]:
        """Shapes that run without a CUDA graph although one was asked for, and why."""

    def taken(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Recorded inputs in the engine's types: float32 as float16 where it takes that (:func:`as_taken`)."""
        return as_taken(feeds, {spec.name: spec.dtype for spec in self.inputs})

    @abstractmethod
    def open_request(self, shapes: Mapping[str, Shape]) -> Request:
        """As :meth:`request`, for code that calls :meth:`Request.release` itself."""

    @abstractmethod
    def check(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """The feeds as contiguous arrays of the engine's types.

        An array that is not contiguous is copied, with a warning the first time.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for what is on the card and give all memory back. Safe to call twice."""

    def plan_for(self, shapes: Mapping[str, Shape]) -> Literal["int8", "float"] | None:
        """Which of two plans answers requests of ``shapes``; None where there is one."""
        return None

    @contextmanager
    def request(self, shapes: Mapping[str, Shape]) -> Iterator[Request]:
        """A free slot for inputs of these shapes; waits for one when all are in use.

        Raises:
            InputError: an input is unknown or missing, or no profile allows the shapes.
        """
        request = self.open_request(shapes)
        try:
            yield request
        finally:
            request.release()

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run one request and wait for it."""
        return self.submit(feeds).result()

    def submit(self, feeds: Mapping[str, np.ndarray]) -> Pending:
        """Start one request; waits only when ``in_flight`` others are on their way.

        Raises:
            InputError: a name, dtype or shape that the engine does not take; input and expectation are named.
        """
        arrays = self.check(feeds)
        request = self.open_request({name: values.shape for name, values in arrays.items()})
        try:
            for name, values in arrays.items():
                np.copyto(request.inputs[name], values)
            request.submit()
        except BaseException:
            request.release()
            raise
        return Pending(request)

    def map(self, stream: Iterable[Mapping[str, np.ndarray]]) -> Iterator[Arrays]:
        """Run many requests with ``in_flight`` of them on the card; results in the order of ``stream``."""
        waiting: deque[Pending] = deque()
        try:
            for feeds in stream:
                if len(waiting) == self.in_flight:
                    yield waiting.popleft().result()
                waiting.append(self.submit(feeds))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for pending in waiting:
                pending.result()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
