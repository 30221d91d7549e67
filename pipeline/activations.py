"""Statistics of activations: runs the float model on batches and bins what it captures.

Runs are kept small: the first row of a batch goes alone, and what it captures says how many rows the next runs take
(:data:`RUN_BYTES`). Memory then does not grow with the batch, and the cut depends on nothing but the batch, so
that the bits are the same in any process.

Several batches are at work at the same time, one thread each from the model's run to the bins: on small runs that uses
the cores better than parallel operators do, and a batch is binned while another one runs.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.errors import InputError, ToolError, did_you_mean
from pipeline.core.ort import cpu_threads, read_graph
from pipeline.core.ort_capture import CaptureSession, open_capture

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from calibrators import TensorStatistics
    from pipeline.data import Batch

__all__ = [
    "RUN_BYTES",
    "ActivationPass",
    "BatchStatistics",
    "NonFinite",
    "graph_inputs",
    "nonfinite_input",
    "nonfinite_weight",
]

RUN_BYTES: Final = 64 << 20
"""What one run may capture, where the batch can be cut: a single row may be more."""

_HELD_BYTES: Final = 512 << 20
"""What all runs together may capture; fewer batches are at work at the same time when runs are large."""
_MOST_WORKERS: Final = 8
_OUT_OF_RANGE: Final = "out of data bounds"
"""In onnxruntime's words about an index that points past a table."""
_FLOATS: Final = ("tensor(float)", "tensor(float16)", "tensor(double)")
_NUMPY_TYPES: Final = {
    "float": "float32",
    "float16": "float16",
    "double": "float64",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint64": "uint64",
    "uint32": "uint32",
    "uint16": "uint16",
    "uint8": "uint8",
    "bool": "bool",
}


@dataclass(frozen=True)
class NonFinite:
    """The first tensor of a batch, in the order asked for, that holds NaN or infinity."""

    tensor: str
    nans: int
    infs: int


@dataclass(frozen=True)
class BatchStatistics:
    """What one batch gave. ``statistics`` has every tensor asked for."""

    batch: Batch
    statistics: dict[str, TensorStatistics]
    nonfinite: NonFinite | None


class ActivationPass:
    """The float model, captured at ``tensors``.

    Args:
        model: an ``.onnx`` file.
        tensors: intermediate tensors, graph outputs or graph inputs; floating-point.
        threads: cores to use; None: all that the process may use.
        proto: ``model`` as an ``onnx.ModelProto``, where it was parsed already; it is not kept.

    Raises:
        InputError: the model cannot be read, or a tensor does not exist or is not floating-point.
        ToolError: onnxruntime refuses the model.
    """

    def __init__(
        self, model: Path, tensors: Sequence[str], *, threads: int | None = None, proto: Any | None = None
    ) -> None:
        self.tensors = tuple(tensors)
        self._model = model
        self._cores = threads or cpu_threads()
        self._workers = min(self._cores, _MOST_WORKERS)
        threading.Thread(target=_load_kernels, name="load-kernels", daemon=True).start()
        proto = read_graph(model) if proto is None else proto
        inputs = graph_inputs(proto)
        self._captured = [name for name in self.tensors if name not in inputs]
        self._session = self._open(proto)
        self._inputs = {value.name: value for value in self._session.session.get_inputs()}
        types = {value.name: value.type for value in (*self._session.session.get_outputs(), *self._inputs.values())}
        types |= {name: types[output] for name, output in zip(self._captured, self._session.outputs, strict=True)}
        for name in self.tensors:
            if types[name] not in _FLOATS:
                raise InputError(
                    f"tensor {name!r} cannot be calibrated: it is of type {types[name]}, not floating-point",
                    remedy="leave its node out with --exclude",
                )
        self._cut = all(value.shape and not isinstance(value.shape[0], int) for value in self._inputs.values())
        self._lock = threading.Lock()
        self._first_run = threading.Event()
        self._largest_run = 0

    def __call__(self, batches: Iterable[Batch]) -> Iterator[BatchStatistics]:
        """The statistics of every batch, in the order of ``batches``, which are drawn a few ahead.

        Raises:
            InputError: a batch does not fit the model's inputs.
            ToolError: onnxruntime fails on a batch.
        """
        pending: deque[Future[BatchStatistics]] = deque()
        waiting = 1  # one batch more than can be at work, so that none idles while the next one is drawn
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="calibrate")
        try:
            for batch in batches:
                self._check(batch)
                while len(pending) >= self._workers + waiting:
                    yield pending.popleft().result()
                pending.append(pool.submit(self._run, batch))
                while not self._first_run.wait(0.01) and not pending[0].done():
                    pass  # the size of the first run says whether more batches may start
                if self._fit():
                    waiting = 0
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _open(self, proto: Any) -> CaptureSession:
        threads = max(1, self._cores // self._workers)
        return open_capture(proto, self._captured, threads=threads, external_data_dir=self._model.parent)

    def _fit(self) -> bool:
        """Let fewer batches be at work, with more threads each, when runs are larger than hoped; True when done so."""
        fitting = max(1, min(self._workers, _HELD_BYTES // max(self._largest_run, 1)))
        if fitting == self._workers:
            return False
        self._workers = fitting
        self._session = self._open(read_graph(self._model))
        return True

    def _run(self, batch: Batch) -> BatchStatistics:
        from calibrators.accumulate import BatchAccumulator

        gathered = {name: BatchAccumulator() for name in self.tensors}
        for name in self.tensors:
            if name in self._inputs:
                gathered[name].add(batch.feeds[name])
        if self._captured:
            for outputs in self._runs(batch):
                for k, name in enumerate(self._captured):
                    gathered[name].add(outputs[k])
                    outputs[k] = None  # its memory is free for the next run
        self._first_run.set()
        statistics = {name: found.statistics(batch.index) for name, found in gathered.items()}
        return BatchStatistics(batch, statistics, self._nonfinite(statistics))

    def _runs(self, batch: Batch) -> Iterator[list[Any]]:
        """What each run over some rows of the batch captures."""
        count = len(batch.samples)
        start, stop = 0, 1 if self._cut else count
        rows = 0
        while start < count:
            feeds = {name: array[start:stop] for name, array in batch.feeds.items()} if self._cut else batch.feeds
            try:
                outputs = self._session.run(feeds)
            except Exception as error:
                if _OUT_OF_RANGE in str(error):
                    raise self._bad_index(batch, error) from error
                shapes = ", ".join(f"{name} {array.shape}" for name, array in batch.feeds.items())
                size = "if the model does not take this size, give the data one that it takes"
                if any(array.ndim == 4 for array in feeds.values()):
                    size += ": for images set resize and crop in --preprocess"
                which = "" if len(batch.samples) == 1 else "; `--batch-size 1` shows which sample it is"
                raise ToolError(
                    f"onnxruntime fails on batch {batch.index} ({_samples(batch)}) with {shapes}: {error}",
                    remedy=size + which,
                ) from error
            size = sum(output.nbytes for output in outputs)
            rows = rows or max(1, RUN_BYTES // max(size, 1))
            with self._lock:
                self._largest_run = max(self._largest_run, size * min(rows, count) if stop == 1 else size)
            self._first_run.set()
            yield outputs
            start, stop = stop, min(stop + rows, count)

    def _bad_index(self, batch: Batch, error: Exception) -> InputError:
        """Which sample of the batch has an index beyond the table it points into."""
        words = str(error).rpartition("Error Message: ")[2] or str(error)
        where = f"batch {batch.index} ({_samples(batch)})"
        if self._cut:
            for row, sample in enumerate(batch.samples):
                try:
                    feeds = {name: array[row : row + 1] for name, array in batch.feeds.items()}
                    self._session.run(feeds)
                except Exception as own:
                    words = str(own).rpartition("Error Message: ")[2] or str(own)
                    where = f"sample {sample}"
                    break
        return InputError(
            f"{where} holds an index outside the model's table: {words}",
            remedy="such as a token id beyond the vocabulary: mend the data, or tokenise as the model expects",
        )

    def _nonfinite(self, statistics: dict[str, TensorStatistics]) -> NonFinite | None:
        for name in self.tensors:
            found = statistics[name]
            if found.nans or found.infs:
                return NonFinite(name, found.nans, found.infs)
        return None

    def _check(self, batch: Batch) -> None:
        where = f"batch {batch.index} ({_samples(batch)})"
        for name in batch.feeds:
            if name not in self._inputs:
                raise InputError(f"{where} feeds {name!r}: no such model input; {did_you_mean(name, self._inputs)}")
        for name, value in self._inputs.items():
            if name not in batch.feeds:
                raise InputError(f"{where} has no data for the model input {name!r}")
            array = batch.feeds[name]
            expected = _NUMPY_TYPES.get(value.type.removeprefix("tensor(").removesuffix(")"), value.type)
            if array.dtype.name != expected:
                raise InputError(f"{where}: input {name!r} is {array.dtype.name}, the model takes {expected}")
            fits = len(value.shape) == array.ndim and all(
                not isinstance(dim, int) or dim == found for dim, found in zip(value.shape, array.shape, strict=True)
            )
            if not fits:
                raise InputError(
                    f"{where}: input {name!r} has shape {array.shape}, the model takes {tuple(value.shape)}"
                )


def _load_kernels() -> None:
    """numba's first call loads a third of a second of its own modules: meanwhile the session is made."""
    from calibrators.accumulate import BatchAccumulator

    BatchAccumulator().add(np.zeros(1, np.float32))


def graph_inputs(proto: Any) -> set[str]:
    """Names of the model's inputs, without those that have a default."""
    return {value.name for value in proto.graph.input} - {tensor.name for tensor in proto.graph.initializer}


def nonfinite_input(batch: Batch) -> str | None:
    """The first model input whose data hold a NaN or infinity."""
    for name, array in batch.feeds.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return name
    return None


def nonfinite_weight(model: Path) -> str | None:
    """The first weight of ``model`` that holds a NaN, in words; of an infinity where none does (a mask may hold some).

    Raises:
        InputError: the file is missing or no ONNX model.
    """
    from pipeline.onnxfile import load_model
    from pipeline.onnxgraph import all_graphs

    infinite = None
    for graph in all_graphs(load_model(model)):
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or not tensor.dtype.is_floating_point():
                continue
            array = tensor.numpy().astype(np.float32, copy=False)
            if nans := int(np.isnan(array).sum()):
                return f"the weight {name!r} holds {nans} NaN"
            if infinite is None and (infs := int(np.isinf(array).sum())):
                infinite = f"the weight {name!r} holds {infs} infinite values"
    return infinite


def _samples(batch: Batch) -> str:
    first, last = batch.samples[0], batch.samples[-1]
    return f"sample {first}" if first == last else f"samples {first} to {last}"
