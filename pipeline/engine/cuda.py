"""The little of CUDA that running an engine needs, on PyCUDA, and graph capture, which PyCUDA lacks.

One primary context per card and process, shared with whatever else uses it. PyCUDA wants the context current in the
thread that touches an object: work inside ``with device.active():``.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import ToolError
from pipeline.core.lazy import require
from pipeline.engine.device import describe_device, no_device_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.engine.records import DeviceInfo

__all__ = ["Device", "DeviceBuffer", "Graph", "PinnedBuffer", "Stream", "open_device"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the default stream
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Device:
    """A card's primary context."""

    def __init__(self, number: int) -> None:
        if reason := no_device_reason():
            raise ToolError(f"no engine can run here: {reason}", remedy="`quantize doctor` says what works here")
        self.driver = require("pycuda.driver", extra="gpu", purpose="running an engine")
        self.driver.init()
        self.number = number
        self.handle = self.driver.Device(number)
        self._context = self.handle.retain_primary_context()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """What must be closed before the context goes at the end of the process; each has ``close()``."""
        atexit.register(self._finish)

    @functools.cached_property
    def info(self) -> DeviceInfo | None:
        """What the driver says of the card, asked once per process: NVML is started for it."""
        return describe_device(self.number)

    def _finish(self) -> None:
        """PyCUDA complains, and leaks, when its objects outlive the context or the context is dropped undetached."""
        for user in list(self.users):
            user.close()
        self._context.push()
        self._context.detach()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the context current in this thread."""
        self._context.push()
        try:
            yield
        finally:
            self.driver.Context.pop()

    def allocate(self, size: int) -> DeviceBuffer:
        return DeviceBuffer(self, size)

    def allocate_pinned(self, size: int) -> PinnedBuffer:
        return PinnedBuffer(self, size)

    def stream(self) -> Stream:
        return Stream(self)

    def event(self) -> Any:
        """A PyCUDA event with timing."""
        return self.driver.Event()

    def read(self, target: np.ndarray, address: int, stream: int) -> None:
        """Copy the card's memory at ``address`` once what is on ``stream`` (a ``CUstream`` as a number) is done."""
        _check("cuStreamSynchronize", ctypes.c_void_p(stream))
        if target.nbytes:
            self.driver.memcpy_dtoh(target, address)

    def free_bytes(self) -> int:
        return int(self.driver.mem_get_info()[0])


@functools.cache
def open_device(number: int = 0) -> Device:
    """The card ``number``, opened once per process.

    Raises:
        ToolError: no driver or no such card.
        InputError: PyCUDA is not installed.
    """
    return Device(number)


class DeviceBuffer:
    """Memory on the card."""

    def __init__(self, device: Device, size: int) -> None:
        self.size = size
        try:
            self._allocation = device.driver.mem_alloc(max(size, 1))
        except device.driver.MemoryError as error:
            free = device.free_bytes()
            raise ToolError(
                f"no room for {size / 2**20:.1f} MiB on the card, {free / 2**20:.1f} MiB are free",
                remedy="use fewer requests in flight, a smaller batch, or end other programs on the card",
            ) from error
        self.address = int(self._allocation)

    def free(self) -> None:
        self._allocation.free()


class PinnedBuffer:
    """Page-locked host memory, from which the card copies at full speed and asynchronously.

    It is given back when the last array that :meth:`view` made is gone.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.size = size
        self._bytes: np.ndarray = device.driver.pagelocked_empty(max(size, 1), np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def view(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array over the first bytes."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._bytes[:size].view(dtype).reshape(shape)


class Stream:
    """A stream of its own, which does not wait for the default stream."""

    def __init__(self, device: Device) -> None:
        self._driver = device.driver
        self.native: Any = device.driver.Stream(_NON_BLOCKING)
        self.handle = int(self.native.handle)

    def copy_in(self, target: DeviceBuffer, source: np.ndarray) -> None:
        """Pinned host memory to the card, without waiting."""
        if source.nbytes:
            self._driver.memcpy_htod_async(target.address, source, self.native)

    def copy_out(self, target: np.ndarray, address: int) -> None:
        """The card to pinned host memory, without waiting."""
        if target.nbytes:
            self._driver.memcpy_dtoh_async(target, address, self.native)

    def synchronize(self) -> None:
        self.native.synchronize()

    def close(self) -> None:
        """Give the stream back while the context is current."""
        self.native = None


class Graph:
    """What a stream was asked to do between ``begin`` and ``end``, replayed by one call."""

    def __init__(self, executable: ctypes.c_void_p) -> None:
        self._executable = executable

    @staticmethod
    def begin(stream: Stream) -> None:
        _check("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.handle), ctypes.c_int(_CAPTURE_THREAD_LOCAL))

    @classmethod
    def end(cls, stream: Stream) -> Graph:
        """Stop capturing.

        Raises:
            ToolError: something between cannot be captured.
        """
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        _check("cuStreamEndCapture", ctypes.c_void_p(stream.handle), ctypes.byref(graph))
        try:
            _check("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        finally:
            _check("cuGraphDestroy", graph)
        return cls(executable)

    @staticmethod
    def abandon(stream: Stream) -> None:
        """Leave capture mode after a failure; what was captured is dropped."""
        graph = ctypes.c_void_p()
        if not _libcuda().cuStreamEndCapture(ctypes.c_void_p(stream.handle), ctypes.byref(graph)) and graph:
            _check("cuGraphDestroy", graph)

    def launch(self, stream: Stream) -> None:
        _check("cuGraphLaunch", self._executable, ctypes.c_void_p(stream.handle))

    def free(self) -> None:
        _check("cuGraphExecDestroy", self._executable)


@functools.cache
def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(name: str, *arguments: Any) -> None:
    library = _libcuda()
    if status := getattr(library, name)(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        words = text.value.decode() if text.value else f"status {status}"
        raise ToolError(f"{name} failed: {words}")
