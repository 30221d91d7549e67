"""Readings of the same samples, aligned by tensor name, a few samples at a time.

A *reading* is a callable from a batch to ``{tensor: array}``: the FP32 or the Q/DQ graph in onnxruntime, or a real
engine. Nothing is kept between batches, so memory does not grow with the number of samples. A tensor a reading
cannot show (an engine has fused it away) is left out of its answer, and reported as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.core.feeds import as_taken, session_dtypes
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.errors.graphs import Graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "CAPTURE_BYTES",
    "Account",
    "Arrays",
    "CallableReading",
    "EngineSource",
    "OrtReading",
    "Reading",
    "check_finite",
    "float_and_int8",
    "micro_batches",
    "read_fp32",
    "read_int8",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Arrays: TypeAlias = "dict[str, np.ndarray[Any, np.dtype[Any]]]"

CAPTURE_BYTES = 48 << 20
"""Captured values of one micro-batch and graph. Small enough to stay near the caches and off fresh memory pages: on two
cores 2 samples of EfficientNet-Lite0 at a time run faster than 8."""


class Reading(Protocol):
    """One way of computing the network."""

    @property
    def label(self) -> str:
        """What computed it, such as ``FP32 graph``."""

    def __call__(self, batch: Batch) -> Arrays:
        """Tensor name to values; a tensor it cannot show is left out."""


@dataclass(frozen=True)
class Account:
    """What an engine gives of its tensors, and how, as of the last answer."""

    recorded: str = ""
    """The way, such as ``debug tensors``, see :class:`pipeline.engine.ways.Way`; empty where it is not known."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Layer's tensor to what may be shown for it: the activation behind it, where a kernel computes both."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Tensors that the engine has as INT8 and their scale; the answer has them as floats."""
    unshown: Mapping[str, str] = field(default_factory=dict)
    """Tensors that the engine has and does not give, and why. What is neither here nor in an answer is fused."""
    kept: int = 0
    """Values of each tensor and sample in an answer, see :func:`pipeline.errors.recording.positions`; 0: all."""


class EngineSource(Reading, Protocol):
    """A reading of a real engine."""

    @property
    def account(self) -> Account:
        """Of the last answer; before the first, of what is tried first."""


class OrtReading:
    """A graph in onnxruntime with chosen tensors captured.

    Args:
        tensors: names to return; graph inputs and outputs may be among them.
        optimise: False for a graph with Q/DQ (see :func:`pipeline.core.ort.make_session`).
        external_data_dir: where the external weights of a ``ModelProto`` lie.

    Raises:
        InputError: a tensor that the graph does not have.
    """

    def __init__(
        self,
        model: Path | Any,
        tensors: Sequence[str],
        *,
        label: str,
        optimise: bool,
        external_data_dir: Path | None = None,
    ) -> None:
        self._label = label
        try:
            self._session = make_session(
                model, capture=tensors, optimise=optimise, external_data_dir=external_data_dir, spin=False
            )
        except InputError as error:
            raise InputError(f"{label}: {error.message}", remedy=error.remedy) from error
        specs = self._session.get_inputs()
        self._inputs: tuple[str, ...] = tuple(spec.name for spec in specs)
        self._dtypes = session_dtypes(self._session)
        self._from_feeds = [name for name in tensors if name in self._inputs]
        self._computed = [name for name in dict.fromkeys(tensors) if name not in self._inputs]
        self._expansion: float | None = None
        self.static_batch: bool = any(spec.shape and isinstance(spec.shape[0], int) for spec in specs)
        """The model's batch size is a number: a batch cannot be split."""

    @property
    def label(self) -> str:
        return self._label

    def __call__(self, batch: Batch) -> Arrays:
        return self.run(batch.feeds)

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        """The chosen tensors for these inputs.

        Raises:
            InputError: a model input that ``feeds`` lacks, or a value that float16 cannot hold where it is taken so.
            ToolError: onnxruntime fails on them.
        """
        if missing := [name for name in self._inputs if name not in feeds]:
            raise InputError(f"{self.label}: the data has no input {missing[0]!r}; it has {sorted(feeds)}")
        taken = as_taken({name: feeds[name] for name in self._inputs}, self._dtypes)
        try:
            # An empty list would mean all outputs.
            values = self._session.run(self._computed, taken) if self._computed else []
        except Exception as error:
            shapes = {name: feeds[name].shape for name in self._inputs}
            raise ToolError(f"{self.label}: onnxruntime failed on inputs of shape {shapes}: {error}") from error
        result = dict(zip(self._computed, values, strict=True))
        result.update({name: np.asarray(feeds[name]) for name in self._from_feeds})
        return result

    def samples_within(self, limit: int, batch: Batch) -> int:
        """How many samples of ``batch`` can be captured at a time within ``limit`` bytes.

        The first batch's first sample is run to see; later ones are judged by the size of their inputs.
        """
        count = len(batch.samples)
        if count == 1:
            return 1
        one = {name: values[:1] for name, values in batch.feeds.items()}
        size = max(sum(values.nbytes for values in one.values()), 1)
        if self._expansion is None:
            self._expansion = sum(values.nbytes for values in self.run(one).values()) / size
        return int(min(count, max(1, limit // max(1.0, self._expansion * size))))


class CallableReading:
    """A reading from a function of the inputs, such as a TensorRT engine with marked tensors."""

    def __init__(
        self,
        function: Callable[[Mapping[str, Array]], Mapping[str, Array]],
        *,
        label: str,
        account: Account | None = None,
    ) -> None:
        self._function = function
        self.label = label
        self.account = account or Account()

    def __call__(self, batch: Batch) -> Arrays:
        return dict(self._function(batch.feeds))


def read_fp32(graph: Graph, tensors: Sequence[str]) -> OrtReading:
    """A reading of the FP32 graph, without Q/DQ nodes: see :func:`pipeline.errors.graphs.float_graph`."""
    return OrtReading(graph.proto, tensors, label="the FP32 graph", optimise=True, external_data_dir=graph.folder)


def read_int8(graph: Graph, tensors: Sequence[str], *, proto: Any = None) -> OrtReading:
    """A reading of the INT8 graph, or of ``proto``, which is that graph with more nodes."""
    return OrtReading(
        graph.proto if proto is None else proto,
        tensors,
        label="the INT8 graph",
        optimise=False,
        external_data_dir=graph.folder,
    )


def float_and_int8(
    fp32: Graph, int8: Graph, tensors: Sequence[str], *, fp32_only: Sequence[str] = ()
) -> tuple[OrtReading, OrtReading]:
    """Readings of ``tensors`` from the FP32 and from the INT8 graph, and of ``fp32_only`` from the FP32 one alone."""
    return read_fp32(fp32, [*tensors, *fp32_only]), read_int8(int8, tensors)


def micro_batches(batch: Batch, size: int | None) -> Iterator[Batch]:
    """``batch`` in pieces of at most ``size`` samples (None: as it is)."""
    count = len(batch.samples)
    if size is None or size >= count:
        yield batch
        return
    for start in range(0, count, size):
        part = slice(start, start + size)
        feeds = {name: values[part] for name, values in batch.feeds.items()}
        yield Batch(batch.index, batch.samples[part], feeds)


def check_finite(name: str, values: Array, samples: Sequence[int], *, label: str) -> None:
    """Raise :class:`CheckFailed` naming the tensor and the sample where ``values`` holds a NaN or infinity."""
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    split = values.ndim and values.shape[0] and values.shape[0] % len(samples) == 0
    rows = values.reshape(len(samples) if split else 1, -1)
    row = int(np.argmax(~np.isfinite(rows).all(axis=1)))
    value = rows[row][~np.isfinite(rows[row])][0]
    raise CheckFailed(
        f"tensor {name!r} holds {value} in {label} for sample {samples[row]}",
        remedy="a broken weight or a value out of range: mend the model, or leave the sample out",
    )
