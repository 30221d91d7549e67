"""The exact merge of all ranks' statistics, the same bits in every rank.

The statistics travel up a binomial tree to rank 0 (log2 N steps; merging is exact, so the tree's shape has no
influence) and the result is broadcast. A rank sends and receives about log2 N times one message, whatever the number of
ranks; every rank then shows the digest of what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pipeline.consistency.verdict import RanksDiffer
from pipeline.consistency.wire import digest_statistics, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from calibrators.statistics import TensorStatistics
    from pipeline.consistency.group import Group

__all__ = ["merge_all", "merge_pair", "merge_ranks", "tree_steps"]

T = TypeVar("T")


def merge_pair(
    first: Mapping[str, TensorStatistics], second: Mapping[str, TensorStatistics]
) -> dict[str, TensorStatistics]:
    """Both data sets together, tensor by tensor.

    Raises:
        InputError: a batch is in both.
    """
    return {name: first[name].merge(second[name]) for name in first}


def tree_steps(size: int) -> list[list[tuple[int, int]]]:
    """The (receiver, sender) pairs of each step that bring everything to rank 0.

    In step k rank r, a multiple of 2**(k+1), receives from r + 2**k.
    """
    steps = []
    reach = 1
    while reach < size:
        steps.append([(rank, rank + reach) for rank in range(0, size - reach, 2 * reach)])
        reach *= 2
    return steps


def merge_all(parts: Sequence[T], merge: Callable[[T, T], T]) -> T:
    """``parts`` merged along :func:`tree_steps`, in one process."""
    held = list(parts)
    for step in tree_steps(len(held)):
        for receiver, sender in step:
            held[receiver] = merge(held[receiver], held[sender])
    return held[0]


def merge_ranks(group: Group, own: Mapping[str, TensorStatistics], names: Sequence[str]) -> dict[str, TensorStatistics]:
    """The statistics of all ranks together, in every rank.

    Args:
        own: this rank's statistics of ``names``; empty ones where it had no batch.
        names: the same in every rank and in the same order.

    Raises:
        RanksDiffer: the ranks do not hold the same bits afterwards.
        RunEnded: a rank was lost on the way.
        InputError: two ranks had the same batch.
    """
    merged = {name: own[name] for name in names}
    if group.size == 1:
        return merged
    group.phase("merging statistics")
    group.barrier("merge")
    for step in tree_steps(group.size):
        for receiver, sender in step:
            if group.rank == sender:
                group.send(pack(merged, names), receiver)
            elif group.rank == receiver:
                merged = merge_pair(merged, unpack(group.receive(sender), names))
        group.check()
    group.barrier("merged")
    message = group.broadcast(pack(merged, names) if group.rank == 0 else b"", 0)
    merged = unpack(message, names)
    check_same(group, "merged statistics", digest_statistics(merged))
    return merged


def check_same(group: Group, what: str, digest: str) -> None:
    """Every rank holds the same ``digest``.

    Raises:
        RanksDiffer: in rank 0, naming the ranks that differ; the others end with it.
    """
    digests = group.gather_text(f"digest/{what}", digest)
    if digests is not None:
        wrong = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if wrong:
            raise RanksDiffer(
                f"the {what} of rank {', '.join(map(str, wrong))} differ from those of rank 0 "
                f"({digests[wrong[0]][:12]} and {digests[0][:12]})",
                remedy="the exchange between the ranks has damaged data: check the network and the memory",
            )
        group.announce(f"same/{what}", "")
    else:
        group.announce(f"same/{what}")
