"""Which quantised layers stand next to each other in the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.errors.graphs import Graph
    from pipeline.errors.layers import Layer

__all__ = ["Neighbours", "neighbours"]


@dataclass(frozen=True)
class Neighbours:
    """Layers before and after one, by their tensors, in graph order."""

    before: tuple[str, ...]
    after: tuple[str, ...]


def neighbours(graph: Graph, layers: Sequence[Layer]) -> dict[str, Neighbours]:
    """For each layer's tensor, the layers that reach it and that it reaches with no other of ``layers`` between."""
    tensors = [layer.tensor for layer in layers]
    own = set(tensors)
    reaching: dict[str, tuple[str, ...]] = {}
    before: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:  # topological order: what a node reads has been seen
        sources: dict[str, None] = {}
        for name in node.input:
            sources.update(dict.fromkeys((name,) if name in own else reaching.get(name, ())))
        for name in node.output:
            reaching[name] = tuple(sources)
            if name in own:
                before[name] = tuple(sources)
    after: dict[str, list[str]] = {name: [] for name in tensors}
    for name in tensors:
        for source in before.get(name, ()):
            after[source].append(name)
    return {name: Neighbours(before.get(name, ()), tuple(after[name])) for name in tensors}
