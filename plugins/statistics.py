"""Statistics of activations on a CUDA device: what ``statistics.cu`` does, seen from Python.

The activations stay on the device. A batch costs two launches for all its tensors and one small record per tensor that
comes back; the histograms come back when they are asked for. The result is that of the CPU, bit for bit, for the same
activations.

Everything is queued on one stream without waiting for it. A float model that runs on the same stream (onnxruntime's
CUDA provider with ``user_compute_stream``, TensorRT's ``execute_async_v3``) may then start on the next batch at once,
even into the same buffers: the stream keeps the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrators.statistics import BINS, PERCENTILES
from pipeline.core.errors import InputError, ToolError
from pipeline.core.lazy import require
from plugins.layout import (
    PARTIAL_BYTES,
    RECORD,
    SEGMENT,
    TUNING,
    Tuning,
    compiler_options,
    cut,
    to_statistics,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from calibrators.statistics import TensorStatistics

__all__ = ["SOURCE", "DeviceArray", "GpuStatistics"]

SOURCE: Final = Path(__file__).with_name("statistics.cu")

_HISTORY: Final = 256  # batches whose records are kept on the device before they are fetched
_KEPT: Final = 8  # tuples of arrays whose addresses are kept on the device
_HALVES: Final = {"float32": 0, "float16": 1}
_MOST_ELEMENTS: Final = 1 << 32  # a batch's counters have 32 bits


@dataclass(frozen=True)
class DeviceArray:
    """An activation on the device: ``elements`` values of ``dtype`` (float32 or float16), one after the other."""

    pointer: int
    elements: int
    dtype: str = "float32"


class GpuStatistics:
    """Running statistics of ``tensors`` on the device.

    Makes the device's primary context current for the life of the object (the context that onnxruntime and TensorRT use
    as well). Methods are called from one thread.

    Args:
        tensors: names, in the order in which :meth:`update` gets the arrays.
        stream: ``pycuda.driver.Stream``; None: a new one, see :attr:`stream`.
        skip_nonfinite: leave a batch out of the histograms when one of its tensors holds NaN or infinity.
        device: its number.
        tuning: None: :data:`TUNING`.

    Raises:
        InputError: PyCUDA is not installed.
        ToolError: no device, no nvcc, or the kernels do not compile.
    """

    def __init__(
        self,
        tensors: Sequence[str],
        *,
        stream: Any = None,
        skip_nonfinite: bool = False,
        device: int = 0,
        tuning: Tuning | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self._tuning = tuning or TUNING
        self._cuda = require("pycuda.driver", extra="gpu", purpose="calibration on a CUDA device")
        try:
            self._cuda.init()
            self._device = self._cuda.Device(device)
            self._context = self._device.retain_primary_context()
        except self._cuda.Error as error:
            raise ToolError(
                f"no CUDA device {device} can be used: {error}", remedy="calibrate with --device cpu"
            ) from error
        self._context.push()
        try:
            self._prepare(stream, skip_nonfinite)
        except BaseException:
            self._context.pop()
            raise

    def _prepare(self, stream: Any, skip_nonfinite: bool) -> None:
        cuda = self._cuda
        self._sweep, self._finish = self._kernels()
        self.stream = stream or cuda.Stream()
        count = len(self.tensors)
        self._skip = np.int32(skip_nonfinite)
        self._running = self._zeroed(8 * BINS * count)
        self._binades = self._zeroed(4 * count)
        self._records = cuda.mem_alloc(max(RECORD.itemsize * _HISTORY * count, 1))
        self._state = self._zeroed(8 + 8 * count)
        """Of a batch: whether a value is not finite; how many segments are taken; for each tensor the largest binade so
        far, plus 1; for each tensor how many blocks of the second kernel are through."""
        self._totals = self._zeroed(4 * BINS * count)
        self._wanted = cuda.to_device(np.array(PERCENTILES, np.float64))
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._bound: dict[int, _Bound] = {}
        self._seen: set[int] = set()
        self._pending: list[int] = []
        self._history: list[tuple[int, NDArray[Any]]] = []

    def _zeroed(self, size: int) -> Any:
        memory = self._cuda.mem_alloc(max(size, 4))
        self._cuda.memset_d8(memory, 0, max(size, 4))
        return memory

    def _kernels(self) -> tuple[Any, Any]:
        compiler = require("pycuda.compiler", extra="gpu", purpose="calibration on a CUDA device")
        options = compiler_options(self._tuning)
        try:
            module = compiler.SourceModule(SOURCE.read_text(), options=options, no_extern_c=True)
        except (self._cuda.CompileError, OSError) as error:
            raise ToolError(
                f"{SOURCE.name} cannot be compiled: {error}", remedy="nvcc of the CUDA toolkit must be on PATH"
            ) from error
        sweep, finish = module.get_function("sweep"), module.get_function("finish")
        shared = self._cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        sweep.set_attribute(shared, self._tuning.sweep_bytes)
        finish.set_attribute(shared, self._tuning.finish_bytes)
        return sweep, finish

    def update(self, arrays: Sequence[DeviceArray], batch_index: int) -> None:
        """Queue one batch; returns before the device is done.

        The arrays must stay in place until the stream has passed; later work on the same stream may overwrite them.

        Args:
            arrays: one for each of :attr:`tensors`. A tuple given before is not looked at again.
            batch_index: the batch's index in the whole data set, not given before.

        Raises:
            InputError: a negative or repeated index, an array of another type, or one too large.
        """
        if batch_index < 0:
            raise InputError(f"batch index {batch_index} is negative; batches are numbered from 0 over the whole data")
        if batch_index in self._seen:
            raise InputError(f"batch {batch_index} comes twice; its samples would count twice")
        if len(self._pending) == _HISTORY:
            self._fetch()
        bound = self._bound.get(id(arrays)) or self._bind(arrays, batch_index)
        self._pending.append(batch_index)
        self._seen.add(batch_index)
        if self.tensors:
            self._launch(bound, len(self._pending) - 1)

    def _launch(self, bound: _Bound, row: int) -> None:
        """Both kernels, the records into ``row``."""
        cuda, stream, layout, count = self._cuda, self.stream, bound.layout, len(self.tensors)
        cuda.memset_d8_async(self._state, 0, 8 + 8 * count, stream)
        tuning, state = self._tuning, int(self._state)
        if layout.segments:
            self._sweep(
                layout.table,
                np.int32(layout.segments),
                bound.pointers,
                bound.halves,
                layout.partials,
                layout.scratch,
                self._state,
                np.intp(state + 4),
                np.intp(state + 8),
                block=(tuning.threads, 1, 1),
                grid=(self._blocks(), 1),
                shared=tuning.sweep_bytes,
                stream=stream,
            )
        record = np.intp(int(self._records) + RECORD.itemsize * count * row)
        self._finish(
            layout.of_tensor,
            layout.partials,
            layout.scratch,
            self._wanted,
            record,
            self._running,
            self._binades,
            self._state,
            self._skip,
            self._totals,
            np.intp(state + 8 + 4 * count),
            block=(tuning.finish_threads, 1, 1),
            grid=(count * tuning.slices, 1),
            shared=tuning.finish_bytes,
            stream=stream,
        )

    def _bind(self, arrays: Sequence[DeviceArray], batch_index: int) -> _Bound:
        """Check the arrays, cut them and upload where they lie."""
        if len(arrays) != len(self.tensors):
            raise InputError(
                f"batch {batch_index} has {len(arrays)} arrays, {len(self.tensors)} tensors are calibrated"
            )
        for name, array in zip(self.tensors, arrays, strict=True):
            if array.dtype not in _HALVES:
                raise InputError(
                    f"tensor {name!r} is {array.dtype}; on a CUDA device float32 and float16 are calibrated",
                    remedy="calibrate with --device cpu",
                )
            if array.elements >= _MOST_ELEMENTS:
                raise InputError(
                    f"tensor {name!r} has {array.elements} values in batch {batch_index}, 2**32 - 1 are the most",
                    remedy="use a smaller --batch-size",
                )
        sizes = tuple(array.elements for array in arrays)
        if sizes not in self._layouts:
            self._layouts[sizes] = self._cut(sizes)
        pointers, halves = [array.pointer for array in arrays], [_HALVES[array.dtype] for array in arrays]
        bound = _Bound(
            arrays,
            self._layouts[sizes],
            self._cuda.to_device(np.array(pointers or [0], np.uint64)),
            self._cuda.to_device(np.array(halves or [0], np.int32)),
        )
        if isinstance(arrays, tuple):
            while len(self._bound) >= _KEPT:
                del self._bound[next(iter(self._bound))]  # cuMemFree waits until the device has done with it
            self._bound[id(arrays)] = bound
        return bound

    def _blocks(self) -> int:
        """Of the sweep: as many as run at a time."""
        return int(self._device.MULTIPROCESSOR_COUNT) * self._tuning.blocks_per_sm

    def _cut(self, sizes: tuple[int, ...]) -> _Layout:
        segments, of_tensor = cut(sizes, self._blocks() * self._tuning.pieces, self._tuning.tile)
        to_device, count = self._cuda.to_device, max(len(segments), 1)
        return _Layout(
            len(segments),
            to_device(segments if len(segments) else np.zeros(1, SEGMENT)),
            to_device(of_tensor),
            self._cuda.mem_alloc(PARTIAL_BYTES * count),
            self._cuda.mem_alloc(4 * BINS * count),
        )

    def _fetch(self) -> None:
        """Bring the records of the queued batches to the host; waits for the stream."""
        records = np.zeros((len(self._pending), len(self.tensors)), RECORD)
        if records.size:
            self._cuda.memcpy_dtoh_async(records, self._records, self.stream)
        self.stream.synchronize()
        self._history += zip(self._pending, records, strict=True)
        self._pending = []

    def nonfinite(self) -> list[tuple[int, str, int, int]]:
        """(batch, tensor, NaNs, infinities) of each batch that has such values, and its first tensor with them.

        Waits for the stream.
        """
        self._fetch()
        found = []
        for index, records in self._history:
            bad = np.flatnonzero(records["nans"] + records["infs"])
            if bad.size:
                record = records[bad[0]]
                found.append((index, self.tensors[bad[0]], int(record["nans"]), int(record["infs"])))
        return sorted(found)

    def collect(self) -> dict[str, TensorStatistics]:
        """The statistics of all batches so far; more may follow. Waits for the stream."""
        self._fetch()
        count = len(self.tensors)
        bins, binades = np.zeros((count, BINS), np.int64), np.zeros(count, np.int32)
        if count:
            self._cuda.memcpy_dtoh(bins, self._running)
            self._cuda.memcpy_dtoh(binades, self._binades)
        kept = [(index, records) for index, records in self._history if not (self._skip and _has_nonfinite(records))]
        batch_index = np.array([index for index, _ in kept], np.int64)
        table = np.stack([records for _, records in kept]) if kept else np.zeros((0, count), RECORD)
        return {
            name: to_statistics(bins[k], int(binades[k]), table[:, k], batch_index)
            for k, name in enumerate(self.tensors)
        }

    def close(self) -> None:
        """Give the context back. The object is of no use afterwards."""
        self.stream.synchronize()
        self._context.pop()

    def __enter__(self) -> GpuStatistics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_nonfinite(records: NDArray[Any]) -> bool:
    return bool((records["nans"] + records["infs"]).any())


@dataclass(frozen=True)
class _Layout:
    """How batches of certain sizes are cut, on the device."""

    segments: int
    table: Any
    of_tensor: Any
    partials: Any
    scratch: Any


@dataclass(frozen=True)
class _Bound:
    """Arrays, and their addresses and types on the device."""

    arrays: Sequence[DeviceArray]
    """Held, so that its id stays its own."""
    layout: _Layout
    pointers: Any
    halves: Any
