"""Before anything is merged: do all ranks hold the same model, data and programs?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipeline.consistency.verdict import RanksDiffer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.consistency.group import Group

__all__ = ["agree", "disagreements", "sample_difference"]


def agree(
    group: Group, name: str, facts: Mapping[str, str], *, detail: Mapping[str, Callable[[], str | None]] | None = None
) -> None:
    """Compare ``facts`` (what it is, its value) of all ranks.

    Args:
        name: of this comparison; used once in a run.
        detail: for a fact, what looks closer when the ranks disagree on it. Every rank calls it then, so it may use the
            group; rank 0's answer is added to the message.

    Raises:
        RanksDiffer: in rank 0, with every fact on which they disagree and who holds what; the others end with it.
    """
    if group.size == 1:
        return
    gathered = group.gather_text(f"facts/{name}", json.dumps(dict(facts)))
    found = disagreements([json.loads(text) for text in gathered]) if gathered is not None else {}
    differing: list[str] = json.loads(group.announce(f"verdict/{name}", json.dumps(list(found))))
    lines = [found.get(key, "") for key in differing]
    for number, key in enumerate(differing):
        closer = (detail or {}).get(key, lambda: None)()
        if closer:
            lines[number] += f": {closer}"
    if lines and group.rank == 0:
        raise RanksDiffer(
            "the ranks do not run the same calibration: " + "; ".join(lines),
            remedy="give every rank the same model, data and package versions, and start the run again",
        )
    group.barrier(f"agreed/{name}")


def disagreements(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """For each fact on which the ranks disagree, who holds what. The majority comes first."""
    found: dict[str, str] = {}
    for key in sorted({key for each in facts for key in each}):
        holders: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            holders.setdefault(each.get(key, "nothing"), []).append(rank)
        if len(holders) > 1:
            ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            found[key] = (
                f"another {key} in {_ranks(ordered[1:])} ("
                + ", ".join(f"{_short(value)} in {_ranks([(value, ranks)])}" for value, ranks in ordered)
                + ")"
            )
    return found


def _ranks(groups: Sequence[tuple[str, list[int]]]) -> str:
    numbers = sorted(rank for _, ranks in groups for rank in ranks)
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value


def sample_difference(digests: Sequence[Sequence[tuple[int, str]]], names: Sequence[str] | None) -> str | None:
    """What differs between the ranks' samples: their order, their number, or which ones.

    Args:
        digests: for each rank, number and content hash of its samples in order.
        names: file name of each sample number, where samples have one.
    """
    usual = _usual(digests)
    for rank, each in enumerate(digests):
        if list(each) == list(usual):
            continue
        if sorted(content for _, content in each) == sorted(content for _, content in usual):
            return f"rank {rank} has the same samples in another order"
        if len(each) != len(usual):
            return f"rank {rank} has {len(each)} samples, most ranks have {len(usual)}"
        number = next(mine for (mine, content), (_, other) in zip(each, usual, strict=True) if content != other)
        count = sum(content != other for (_, content), (_, other) in zip(each, usual, strict=True))
        name = f" ({names[number]})" if names is not None and number < len(names) else ""
        return f"sample {number}{name} of rank {rank} is another one ({count} of {len(usual)} samples differ)"
    return None


def _usual(digests: Sequence[Sequence[tuple[int, str]]]) -> Sequence[tuple[int, str]]:
    """What most ranks have; the first of them in a tie."""
    keys = [json.dumps(list(each)) for each in digests]
    return digests[max(range(len(keys)), key=lambda rank: (keys.count(keys[rank]), -rank))]
