"""The plan in the making: what rules have asked for so far. Rules change it only through these methods.

A *demand* is one input of one node that shall read INT8. All demands on a tensor share its single Q/DQ pair. Demands
are only ever added, so that going through the rules again and again comes to an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.placement.plan import ActivationPoint, NodeDecision, PlacementPlan, WeightPoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["Draft"]


class Draft:
    """Working state of the planner.

    Attributes:
        graph: the graph, read-only.
        rule: name of the rule at work, set by the planner; what it asks for is recorded under it.
        forced: nodes that the user includes: rules of the stage KEEP pass them by.
        banned: nodes that the user excludes: nothing is quantised for them.
        revision: grows with every change.
    """

    def __init__(
        self, graph: GraphView, *, forced: frozenset[ir.Node] = frozenset(), banned: frozenset[ir.Node] = frozenset()
    ) -> None:
        self.graph = graph
        self.forced = forced
        self.banned = banned
        self.rule: str | None = None
        self.revision = 0
        self._demands: dict[ir.Value, dict[tuple[ir.Node, int], str]] = {}
        self._weights: dict[tuple[ir.Node, int], tuple[ir.Value, int | None, str]] = {}
        self._decisions: dict[ir.Node, tuple[bool, str, str]] = {}
        self._parents: dict[ir.Value, ir.Value] = {}
        self._sources: dict[ir.Value, ir.Value] = {}
        self._known: dict[ir.Value, float] = {}

    # --- asking

    def can_demand(self, node: ir.Node, index: int) -> bool:
        """Whether this input may read INT8: a computed float tensor, of a node that is not excluded."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return (
            value is not None
            and node not in self.banned
            and not self.graph.is_constant(value)
            and self.graph.is_float(value)
        )

    def demand(self, node: ir.Node, index: int) -> bool:
        """Let input ``index`` of ``node`` read INT8; False where that cannot be."""
        if not self.can_demand(node, index):
            return False
        value = node.inputs[index]
        assert value is not None
        uses = self._demands.setdefault(value, {})
        if (node, index) not in uses:
            uses[node, index] = self._name
            self.revision += 1
        return True

    def weight(self, node: ir.Node, index: int, axis: int | None) -> None:
        """Quantise the constant at input ``index``, one scale per slice along ``axis``."""
        value = node.inputs[index]
        assert value is not None
        if (node, index) not in self._weights:
            self._weights[node, index] = (value, axis, self._name)
            self.revision += 1

    def decide(self, node: ir.Node, quantized: bool, reason: str) -> None:
        """Settle a node; the first decision stays, but a float one may still become a quantised one."""
        settled = self._decisions.get(node)
        if settled is None or (quantized and not settled[0]):
            self._decisions[node] = (quantized, self._name, reason)
            self.revision += 1

    def share(self, values: Iterable[ir.Value]) -> None:
        """Give the pairs on these tensors one scale."""
        first, *rest = [self._root(value) for value in values]
        for other in rest:
            other, first = self._root(other), self._root(first)
            if other is not first:
                self._parents[other] = first
                self.revision += 1

    def derive(self, value: ir.Value, source: ir.Value) -> None:
        """``value`` comes out of ``source`` unchanged (the pair there has its range), so the two share a scale."""
        self.share((source, value))
        if value not in self._sources and self._origin(source) is not value:
            self._sources[value] = source
            self.revision += 1

    def know(self, value: ir.Value, amax: float) -> None:
        """No value of this tensor is greater in magnitude than ``amax``."""
        if value not in self._known:
            self._known[value] = amax
            self.revision += 1

    # --- looking

    @property
    def _name(self) -> str:
        return self.rule or "user"

    def settled(self, node: ir.Node) -> bool:
        return node in self._decisions

    def has_pair(self, value: ir.Value) -> bool:
        """True when some node reads this tensor as INT8."""
        return value in self._demands

    def demanded(self, node: ir.Node, index: int) -> bool:
        value = node.inputs[index]
        return value is not None and (node, index) in self._demands.get(value, {})

    def is_weighted(self, node: ir.Node | None) -> bool:
        """True for a Conv, ConvTranspose, Gemm or MatMul that was decided to be INT8."""
        from pipeline.placement.ops import WEIGHTED

        return node is not None and self._decisions.get(node, (False,))[0] and self.graph.op(node) in WEIGHTED

    def pairs(self) -> list[ir.Value]:
        """Tensors with a pair, in graph order."""
        places = {value: (-1, index) for index, value in enumerate(self.graph.model.graph.inputs)}
        places |= {
            value: (place, index)
            for place, node in enumerate(self.graph.nodes)
            for index, value in enumerate(node.outputs)
        }
        return sorted(self._demands, key=lambda value: places[value])

    # --- result

    def plan(self, *, notes: tuple[str, ...] = ()) -> PlacementPlan:
        place = self.graph.place
        pairs = self.pairs()
        members: dict[ir.Value, list[ir.Value]] = {}
        for value in pairs:
            members.setdefault(self._root(value), []).append(value)
        activations = []
        for value in pairs:
            uses = sorted(self._demands[value], key=lambda use: (place(use[0]), use[1]))
            group = members[self._root(value)]
            source = self._origin(value)
            source = source if source in self._demands else value
            activations.append(
                ActivationPoint(
                    tensor=_name(value),
                    consumers=tuple((node.name or "", index) for node, index in uses),
                    rule=self._demands[value][uses[0]],
                    group=_name(group[0]) if len(group) > 1 else None,
                    known_amax=self._known.get(value),
                    source=_name(source) if source is not value else None,
                )
            )
        weights = [
            WeightPoint(tensor=_name(value), node=node.name or "", input_index=index, axis=axis, rule=rule)
            for (node, index), (value, axis, rule) in sorted(
                self._weights.items(), key=lambda item: (place(item[0][0]), item[0][1])
            )
        ]
        decisions = []
        for node in self.graph.nodes:
            quantized, rule, reason = self._decisions.get(node, (False, "default", "no rule quantises this operator"))
            outputs = tuple(value.name or "" for value in node.outputs)
            decisions.append(
                NodeDecision(
                    node=node.name or "",
                    op=self.graph.op(node),
                    outputs=outputs,
                    quantized=quantized,
                    rule=rule,
                    reason=reason,
                )
            )
        return PlacementPlan(
            activations=tuple(activations), weights=tuple(weights), decisions=tuple(decisions), notes=notes
        )

    def _root(self, value: ir.Value) -> ir.Value:
        while (parent := self._parents.get(value)) is not None:
            value = parent
        return value

    def _origin(self, value: ir.Value) -> ir.Value:
        """The calibrated tensor that the range of ``value`` comes from."""
        while (source := self._sources.get(value)) is not None:
            value = source
        return value


def _name(value: ir.Value) -> str:
    return value.name or ""
