"""Readings of the same samples from several graphs, aligned by tensor name, a few samples at a time.

A *reading* is a callable from a batch of feeds to ``{tensor: array}``. Nothing is kept between batches, so memory does not
grow with the number of samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Arrays", "OrtReading", "Reading", "check_finite", "micro_batches"]

Arrays: TypeAlias = "dict[str, np.ndarray[Any, np.dtype[Any]]]"

CAPTURE_BYTES = 96 << 20
"""Captured values of one micro-batch and graph. Small enough to stay near the caches and off fresh memory pages: on two
cores 2 samples of EfficientNet-Lite0 at a time run faster than 8."""


class Reading(Protocol):
    """One way of computing the network."""

    @property
    def label(self) -> str:
        """What computed it, such as ``FP32 graph in onnxruntime``."""

    def __call__(self, feeds: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> Arrays:
        """Tensor name to values for one batch."""


class OrtReading:
    """A graph in onnxruntime with chosen tensors captured.

    Args:
        tensors: names to return; graph outputs may be among them.
        optimise: False for a graph with Q/DQ (see :func:`pipeline.core.ort.make_session`).
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
        self._session = make_session(model, capture=tensors, optimise=optimise, external_data_dir=external_data_dir)
        self.inputs: tuple[str, ...] = tuple(spec.name for spec in self._session.get_inputs())
        self.static_batch: bool = any(
            spec.shape and isinstance(spec.shape[0], int) for spec in self._session.get_inputs()
        )
        self._bytes: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        self._passed_through = [name for name in tensors if name in self.inputs]
        available = [spec.name for spec in self._session.get_outputs()]
        self._wanted = [name for name in dict.fromkeys(tensors) if name not in self.inputs]
        if missing := [name for name in self._wanted if name not in available]:
            raise InputError(f"{label}: tensor {missing[0]!r} to capture does not exist in the graph")

    @property
    def label(self) -> str:
        return self._label

    def __call__(self, feeds: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> Arrays:
        try:
            values = self._session.run(self._wanted, {name: feeds[name] for name in self.inputs})
        except KeyError as error:
            raise InputError(
                f"{self.label}: the data has no input {error.args[0]!r}; it has {sorted(feeds)}"
            ) from error
        except Exception as error:
            shapes = {name: feeds[name].shape for name in self.inputs}
            raise ToolError(f"{self.label}: onnxruntime failed on inputs of shape {shapes}: {error}") from error
        result = dict(zip(self._wanted, values, strict=True))
        result.update({name: np.asarray(feeds[name]) for name in self._passed_through})
        return result

    def samples_within(self, limit: int, batch: Batch) -> int:
        """How many samples of this shape can be captured at a time within ``limit`` bytes: one is run to see."""
        one = {name: values[:1] for name, values in batch.feeds.items()}
        shapes = tuple((name, values.shape) for name, values in sorted(one.items()))
        if shapes not in self._bytes:
            self._bytes[shapes] = sum(values.nbytes for values in self(one).values())
        return max(1, limit // max(self._bytes[shapes], 1))


def micro_batches(batch: Batch, size: int | None) -> Iterator[Batch]:
    """``batch`` in pieces of at most ``size`` samples (None: as it is)."""
    count = len(batch.samples)
    if size is None or size >= count:
        yield batch
        return
    for start in range(0, count, size):
        part = slice(start, start + size)
        yield Batch(batch.index, batch.samples[part], {name: values[part] for name, values in batch.feeds.items()})


def check_finite(values: Mapping[str, np.ndarray[Any, np.dtype[Any]]], samples: Sequence[int], *, label: str) -> None:
    """Raise :class:`CheckFailed` naming the first tensor with a NaN or infinity, and its sample."""
    for name, array in values.items():
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        rows = (
            array.reshape(len(samples), -1)
            if array.ndim and array.shape[0] and array.shape[0] % len(samples) == 0
            else array.reshape(1, -1)
        )
        row = int(np.argmax(~np.isfinite(rows).all(axis=1)))
        value = rows[row][~np.isfinite(rows[row])][0]
        raise CheckFailed(
            f"{label}: tensor {name!r} holds {value} for sample {samples[row]}",
            remedy="a range that overflowed or a broken weight: look at this layer with `quantize errors`, or leave it out with --exclude",
        )
