"""Batches from a stream of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pipeline.data.source import Sample
    from pipeline.records import TensorSpec

__all__ = ["Batch", "batched", "noting_shapes", "static_batch"]


@dataclass(frozen=True)
class Batch:
    """Neighbouring samples stacked along a new first axis."""

    index: int
    """Number of the batch in its pass."""
    samples: tuple[int, ...]
    """Sample number of each row."""
    feeds: dict[str, np.ndarray[Any, np.dtype[Any]]]
    """Model input name to an array whose first axis has ``len(samples)`` rows."""


def static_batch(inputs: Sequence[TensorSpec]) -> int | None:
    """The batch size the model insists on (its first dimension is a number), or None when the batch is dynamic.

    Raises:
        InputError: the inputs have no common batch axis: different first dimensions, or a scalar input.
    """
    forced: dict[int, str] = {}
    for spec in inputs:
        if spec.shape is None:
            continue
        if not spec.shape:
            raise InputError(
                f"input {spec.name!r} is a scalar and has no batch axis",
                remedy="make it a constant of the model, or give it a first dimension for the batch",
            )
        if isinstance(spec.shape[0], int):
            forced.setdefault(spec.shape[0], spec.name)
    if len(forced) > 1:
        (first, first_name), (second, second_name) = list(forced.items())[:2]
        raise InputError(
            f"the inputs have no common batch axis: {first_name!r} has a first dimension of {first}, "
            f"{second_name!r} of {second}",
            remedy="export the model with the batch as the first dimension of every input",
        )
    return next(iter(forced), None)


def noting_shapes(
    batches: Iterable[Batch], seen: dict[tuple[tuple[str, tuple[int, ...]], ...], int]
) -> Iterator[Batch]:
    """Pass batches on; enter into ``seen`` the shapes of samples, inputs by name and without the batch axis, with the
    number of such samples."""
    for batch in batches:
        shapes = tuple(sorted((name, array.shape[1:]) for name, array in batch.feeds.items()))
        seen[shapes] = seen.get(shapes, 0) + len(batch.samples)
        yield batch


def batched(
    samples: Iterable[tuple[int, Sample]], batch_size: int, inputs: Sequence[TensorSpec], start_index: int = 0
) -> Iterator[Batch]:
    """Stack up to ``batch_size`` neighbouring samples of equal shapes.

    A batch ends early where the next sample has another shape, and at the end of the stream: every sample is used. A
    static batch dimension of the model replaces ``batch_size``.

    Args:
        samples: number and arrays of each sample, as from ``DataSource.read``.
        start_index: :attr:`Batch.index` of the first batch.

    Raises:
        InputError: the model's static batch is larger than one and the samples do not fill whole batches.
    """
    forced = static_batch(inputs)
    size = batch_size if forced is None else forced
    index = start_index
    group: list[tuple[int, Sample]] = []
    shapes: dict[str, tuple[int, ...]] = {}

    def flush() -> Batch:
        numbers = tuple(number for number, _ in group)
        if forced is not None and len(group) < forced:
            raise InputError(
                f"the model has a static batch of {forced} and batch {index} has only {len(group)} samples "
                f"({numbers[0]} to {numbers[-1]})",
                remedy=f"use a multiple of {forced} samples, or export the model with a dynamic batch",
            )
        return Batch(index, numbers, {name: np.stack([sample[name] for _, sample in group]) for name in group[0][1]})

    for number, sample in samples:
        found = {name: array.shape for name, array in sample.items()}
        if group and (len(group) == size or found != shapes):
            yield flush()
            index += 1
            group = []
        shapes = found
        group.append((number, sample))
    if group:
        yield flush()
