"""Which rank computes which batch, and the stream of one rank's batches.

A batch is never split: the float model then computes the same numbers wherever a batch is run. Batches keep their
global index, so a moving average sees them in global order whoever computed them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from pipeline.core.errors import InputError, did_you_mean
from pipeline.data import batched, select, static_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.data import Batch, DataSource, Sample
    from pipeline.records import TensorSpec

__all__ = ["SHARDS", "Shard", "assign", "batch_samples", "rank_batches"]

Shard = Literal["cyclic", "blocks", "scattered"]
SHARDS: tuple[str, ...] = get_args(Shard)


def assign(batches: int, size: int, shard: str = "cyclic") -> list[tuple[int, ...]]:
    """The batch indices of each rank, ascending; every batch is in exactly one rank.

    cyclic: batch b goes to rank b mod N. blocks: neighbouring batches, as equal in number as possible. scattered: an
    arbitrary but fixed order (by hash) dealt out in turn. The merged result is the same for all of them.

    Raises:
        InputError: an unknown ``shard``.
    """
    if shard == "cyclic":
        order = list(range(batches))
    elif shard == "blocks":
        bounds = [rank * batches // size for rank in range(size + 1)]
        return [tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(size)]
    elif shard == "scattered":
        order = sorted(range(batches), key=lambda index: hashlib.sha256(str(index).encode()).digest())
    else:
        raise InputError(f"unknown shard order {shard!r}; {did_you_mean(shard, SHARDS)}")
    return [tuple(sorted(order[rank::size])) for rank in range(size)]


def batch_samples(chosen: Sequence[int], batch_size: int, inputs: Sequence[TensorSpec]) -> list[tuple[int, ...]] | None:
    """The sample numbers of each batch; None where only reading the data can tell.

    With other dynamic dimensions than the batch, a batch ends where a sample has another shape.
    """
    for spec in inputs:
        if spec.shape is None or any(not isinstance(dim, int) for dim in spec.shape[1:]):
            return None
    size = static_batch(inputs) or batch_size
    ordered = sorted(chosen)
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def rank_batches(
    source: DataSource,
    chosen: Sequence[int],
    batch_size: int,
    inputs: Sequence[TensorSpec],
    *,
    rank: int,
    size: int,
    shard: str = "cyclic",
    watch: Callable[[int, Sample], None] | None = None,
) -> Iterator[Batch]:
    """The batches of one rank, with their global indices, in ascending order.

    Only this rank's samples are read where the batches are known beforehand. Otherwise every rank reads all samples,
    to find out where a batch ends, and only the model's run is shared out (always ``cyclic``).

    Args:
        watch: sees every chosen sample, not only this rank's, in order; all of them are read for it.

    Raises:
        InputError: as :func:`pipeline.data.select` and :func:`pipeline.data.batched` say; or ``shard`` needs to know
            the batches beforehand.
    """
    known = batch_samples(chosen, batch_size, inputs)
    if known is None and shard != "cyclic":
        raise InputError(
            f"the shard order {shard!r} needs samples of one shape, and the model's inputs are dynamic",
            remedy="use --shards cyclic",
        )
    own = None if known is None else assign(len(known), size, shard)[rank]
    if known is None or own is None or watch is not None:
        for batch in batched(_watched(select(source, frozenset(chosen)), watch), batch_size, inputs):
            if batch.index in own if own is not None else batch.index % size == rank:
                yield batch
        return
    samples = frozenset(number for index in own for number in known[index])
    for index, batch in zip(own, batched(select(source, samples), batch_size, inputs), strict=True):
        yield replace(batch, index=index)


def _watched(
    samples: Iterator[tuple[int, Sample]], watch: Callable[[int, Sample], None] | None
) -> Iterator[tuple[int, Sample]]:
    for number, sample in samples:
        if watch is not None:
            watch(number, sample)
        yield number, sample
