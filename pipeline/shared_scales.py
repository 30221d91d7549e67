"""What a scale that several tensors share costs the small ones among them, and what gives them one of their own.

A Concat runs in INT8 when its inputs and its output have one scale; so does whatever hands on the values that it reads.
A tensor whose values are a thousandth of its neighbour's is then rounded to zero, and nothing behind it can tell.
Tensors with statistics of their own are judged when the graph is quantised; what a Slice selects of another tensor has
none, and is judged on the samples of the verification.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from pipeline.core.errors import InputError
from pipeline.placement.ops import LAYOUT, POINTWISE, SELECTIONS
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import onnx_ir as ir

    from calibrators import Calibrator, TensorStatistics
    from pipeline.errors.capture import Arrays
    from pipeline.errors.graphs import Graph
    from pipeline.placement.graph import GraphView
    from pipeline.placement.plan import ActivationPoint, PlacementPlan

__all__ = ["Drowned", "Selections", "describe", "drowned", "rounding_loss", "warnings_of"]

_STEPS: Final = 127.0
_LARGEST_LOSS: Final = 0.1
"""Part of a tensor's energy that rounding may take without a warning, as for clipping. A tensor that uses all of its
steps loses below 0.002, one that uses 9 of them 0.1."""
_OWN_SHARE: Final = 0.25
"""Of the loss: where a scale of its own leaves more, the tensor is hard for INT8 whoever shares its scale."""
_CARRIERS: Final = ("Concat", *SELECTIONS, *LAYOUT, "MaxPool", "AveragePool", "Resize", "Pad")
"""Operators behind which the values of their input are read on as INT8 of the same scale."""
_WALK: Final = 4
_NAMED: Final = 3
_Q: Final = "QuantizeLinear"


class Drowned(Record):
    """A tensor that mostly vanishes in a scale which it shares."""

    tensor: str
    amax: float
    """Its own largest magnitude."""
    shared: float
    """The range that it is quantised with."""
    loss: float
    """Part of its energy that rounding takes (0..1)."""
    alone: float
    """The same with a scale of its own."""
    beside: str
    """The tensor that makes the range large."""
    exclude: tuple[str, ...] = ()
    """Nodes that part the two scales when they stay float; none where no such nodes were found."""

    @property
    def steps(self) -> float:
        """How many of the 127 steps its values reach."""
        return _STEPS * self.amax / self.shared


def rounding_loss(stats: TensorStatistics, amax: float) -> float:
    """Squared error of rounding (and clipping) to 127 steps of ``amax``, relative to the sum of squares (0..1)."""
    used = np.flatnonzero(stats.bins)
    if not used.size or stats.amax == 0.0:
        return 0.0
    counts = stats.bins[used].astype(np.float64)
    magnitude = (used + 0.5) * stats.width
    step = amax / _STEPS
    error = magnitude - step * np.minimum(np.rint(magnitude / step), _STEPS)
    return float((counts * error**2).sum() / (counts * magnitude**2).sum())


def drowned(
    points: Sequence[ActivationPoint],
    statistics: Mapping[str, TensorStatistics],
    ranges: Mapping[str, float],
    calibrator: Calibrator,
) -> list[Drowned]:
    """Tensors that lose most of what they are in the scale of their group, in graph order.

    Of tensors that another one of the group is the source of there are no statistics; they are passed over.

    Args:
        ranges: tensor to amax, of every point.
    """
    groups: dict[str, list[str]] = {}
    for point in points:
        if point.group is not None and point.source is None:
            groups.setdefault(point.group, []).append(point.tensor)
    found = {}
    for members in groups.values():
        largest = max(members, key=lambda name: statistics[name].amax)
        for name in members:
            item = None if name == largest else _judged(name, statistics[name], ranges[name], calibrator, largest)
            if item is not None:
                found[name] = item
    return [found[point.tensor] for point in points if point.tensor in found]


def _judged(
    tensor: str, stats: TensorStatistics, shared: float, calibrator: Calibrator, beside: str
) -> Drowned | None:
    from calibrators import resolve_amax

    loss = rounding_loss(stats, shared)
    if loss <= _LARGEST_LOSS:
        return None
    alone = rounding_loss(stats, resolve_amax(stats, calibrator)[0])
    if alone > _OWN_SHARE * loss:
        return None
    return Drowned(tensor=tensor, amax=stats.amax, shared=shared, loss=loss, alone=alone, beside=beside)


class Selections:
    """What Slice, Split and Gather select of INT8 tensors, judged on data.

    Args:
        fp32: the float graph.
        int8: the same with Q/DQ nodes, which have the scales.
    """

    def __init__(self, plan: PlacementPlan, fp32: Graph, int8: Graph) -> None:
        from calibrators.accumulate import BatchAccumulator

        self._found: dict[str, tuple[float, str, str, BatchAccumulator]] = {}
        for point in plan.activations:
            node = fp32.producers.get(point.tensor)
            if point.source is None or node is None or node.op_type not in SELECTIONS:
                continue
            pair = next((reader for reader in int8.consumers.get(point.tensor, ()) if reader.op_type == _Q), None)
            scale = None if pair is None else int8.constant(pair.input[1])
            if scale is not None and scale.size == 1:
                amax = float(scale.reshape(-1)[0]) * _STEPS
                self._found[point.tensor] = amax, node.name, point.source, BatchAccumulator()

    @property
    def tensors(self) -> tuple[str, ...]:
        """To read from the float graph."""
        return tuple(self._found)

    def add(self, values: Arrays) -> None:
        """Take in some samples' values of :attr:`tensors`."""
        for tensor, (*_, gathered) in self._found.items():
            gathered.add(values[tensor])

    def drowned(self) -> tuple[Drowned, ...]:
        """Those that lose most of what they are in the scale of what they are selected from, in graph order."""
        import calibrators

        minmax = calibrators.get("minmax")
        found = []
        for tensor, (amax, node, source, gathered) in self._found.items():
            item = _judged(tensor, gathered.statistics(0), amax, minmax, source)
            if item is not None:
                found.append(item.model_copy(update={"exclude": (node,)}))
        return tuple(found)


def describe(items: Sequence[Drowned]) -> list[str]:
    """A sentence for each large tensor and remedy: of the tensor that loses most, with the names of the others."""
    together: dict[tuple[str, tuple[str, ...]], list[Drowned]] = {}
    for item in items:
        together.setdefault((item.beside, item.exclude), []).append(item)
    return [_sentence(sorted(found, key=lambda item: -item.loss)) for found in together.values()]


def _sentence(items: Sequence[Drowned]) -> str:
    item, *others = items
    text = (
        f"{item.tensor!r} has the scale of {item.beside!r}, made for values up to {item.shared:.3g}: its own end at "
        f"{item.amax:.3g}, {item.steps:.2g} of the {_STEPS:.0f} steps, and {100 * item.loss:.0f} % of its signal is "
        f"lost ({100 * item.alone:.2g} % with a scale of its own)"
    )
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        text += f"; so it is with {', '.join(repr(other.tensor) for other in others[:_NAMED])}{more}"
    options = " ".join(f"--exclude {name!r}" for name in item.exclude)
    return f"{text}; {options} parts the scales" if options else text


def warnings_of(
    plan: PlacementPlan,
    graph: GraphView,
    statistics: Mapping[str, TensorStatistics],
    ranges: Mapping[str, float],
    calibrator: Calibrator,
    replan: Callable[[Sequence[str]], PlacementPlan],
) -> list[str]:
    """Warnings about what :func:`drowned` finds, with a remedy that was tried.

    Args:
        graph: the float graph.
        replan: the plan with more nodes excluded.
    """
    found = drowned(plan.activations, statistics, ranges, calibrator)
    return describe(
        [item.model_copy(update={"exclude": _separating(item, plan, graph, replan)}) for item in found]
    )


def _separating(
    item: Drowned, plan: PlacementPlan, graph: GraphView, replan: Callable[[Sequence[str]], PlacementPlan]
) -> tuple[str, ...]:
    """Nodes to exclude, so that ``item`` no longer shares a scale with the large tensor, nor is read with it as one
    INT8 tensor; () where none were found. The plan without them is made to see it."""
    flow = _Flow(plan, graph)
    readers = flow.in_common(item.tensor, item.beside)
    tried = [readers, {**readers, **dict.fromkeys(flow.carriers_between(item.tensor, item.beside))}]
    for nodes in tried:
        if not nodes:
            continue
        try:
            other = replan(tuple(nodes))
        except InputError:  # a node is named by --include too
            continue
        if _parted(other, graph, item):
            return tuple(nodes)
    return ()


def _parted(plan: PlacementPlan, graph: GraphView, item: Drowned) -> bool:
    groups = {point.tensor: point.group for point in plan.activations}
    small, large = groups.get(item.tensor), groups.get(item.beside)
    if small is not None and small == large:
        return False
    flow = _Flow(plan, graph)
    return not flow.readers(item.tensor).keys() & flow.readers(item.beside).keys()


class _Flow:
    """Where the INT8 values of a tensor are read in the end: behind Concat and whatever else only hands them on."""

    def __init__(self, plan: PlacementPlan, graph: GraphView) -> None:
        self.graph = graph
        self.points = {point.tensor: point for point in plan.activations}

    def readers(self, tensor: str) -> dict[str, None]:
        """Nodes that compute on the values of ``tensor`` in INT8."""
        return self._walk(tensor)[0]

    def in_common(self, small: str, large: str) -> dict[str, None]:
        """Readers of the large tensor and of the one that ties the small one to it, which may be itself."""
        group = self.points[small].group if small in self.points else None
        members = [name for name, point in self.points.items() if point.group == group and point.source is None]
        reads = {name: self.readers(name) for name in members}
        before: dict[str, str] = {small: small}
        pending = deque([small])
        while pending:
            name = pending.popleft()
            for other in members:
                common = reads[name].keys() & reads[other].keys()
                if not common or other in before:
                    continue
                if other == large:
                    return {node: None for node in reads[name] if node in common}
                before[other] = name
                pending.append(other)
        return {}

    def carriers_between(self, small: str, large: str) -> list[str]:
        """Nodes that hand on values of both."""
        other = self._walk(large)[1]
        return [node for node in self._walk(small)[1] if node in other]

    def _walk(self, tensor: str) -> tuple[dict[str, None], dict[str, None]]:
        readers: dict[str, None] = {}
        carriers: dict[str, None] = {}
        seen = {tensor}
        pending = deque([tensor])
        while pending:
            point = self.points.get(pending.popleft())
            if point is None:
                continue
            for name, _ in point.consumers:
                onward = self._behind(self.graph.by_name[name], point.group)
                if not onward:
                    readers[name] = None
                    continue
                carriers[name] = None
                pending.extend(value for value in onward if value not in seen)
                seen.update(onward)
        return readers, carriers

    def _behind(self, node: ir.Node, group: str | None) -> list[str]:
        """Tensors of ``group`` that hold what the carrier ``node`` reads, also behind activations in between."""
        if group is None or self.graph.op(node) not in _CARRIERS:
            return []
        found = []
        for value in node.outputs:
            for _ in range(_WALK):
                point = self.points.get(value.name or "")
                if point is not None:
                    if point.group == group:
                        found.append(point.tensor)
                    break
                following = self.graph.only_reader(value)
                if following is None or self.graph.op(following) not in POINTWISE:
                    break
                value = following.outputs[0]
        return found
