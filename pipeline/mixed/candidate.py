"""A candidate: which nodes go back to float, and which repairs are made. Candidates become graphs to measure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.errors.graphs import Graph
from pipeline.errors.hybrid import Quantisation, hybrid
from pipeline.mixed.repairs import ChosenRanges, Repairs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from calibrators import Calibrator, TensorStatistics
    from pipeline.config import PlacementConfig
    from pipeline.placement.plan import PlacementPlan

__all__ = ["Candidate", "Network"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True)
class Candidate:
    """One way of quantising the network."""

    restored: frozenset[str] = frozenset()
    """Nodes kept in float beyond the placement's own."""
    repairs: Repairs = field(default_factory=Repairs)

    def restoring(self, *nodes: str) -> Candidate:
        return Candidate(self.restored | set(nodes), self.repairs)

    @property
    def key(self) -> str:
        text = "\n".join([self.repairs.key, *sorted(self.restored)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Network:
    """The prepared float model and everything that makes an INT8 graph of it.

    Args:
        statistics: of every tensor the plan calibrates.
        calibrator: gives the ranges that are not repaired.

    Attributes:
        equalised: the same network with equalised channels; None: it was not tried, or is not possible.
    """

    def __init__(
        self,
        model: Path,
        config: PlacementConfig,
        statistics: Mapping[str, TensorStatistics],
        calibrator: Calibrator,
    ) -> None:
        self.model = model
        self.config = config
        self.statistics = statistics
        self.calibrator = calibrator
        self.fp32 = Graph(model)
        self.equalised: Network | None = None
        self._plans: dict[frozenset[str], PlacementPlan] = {}
        self._amax: dict[str, float] = {}
        self._weights: dict[tuple[str, int, int | None, str], Array] = {}

    def of(self, candidate: Candidate) -> Network:
        """The network that ``candidate`` is made from: this one, or its equalised form."""
        return self.equalised if candidate.repairs.equalised and self.equalised is not None else self

    def placement(self, candidate: Candidate) -> PlacementConfig:
        """The placement configuration that builds ``candidate``."""
        return self.config.model_copy(update={"exclude": (*self.config.exclude, *sorted(candidate.restored))})

    def plan(self, candidate: Candidate) -> PlacementPlan:
        from pipeline.placement import make_plan

        if candidate.restored not in self._plans:
            self._plans[candidate.restored] = make_plan(self.model, self.placement(candidate))
        return self._plans[candidate.restored]

    def chosen(self, repairs: Repairs) -> ChosenRanges:
        """The calibrator with the repaired ranges in it."""
        return ChosenRanges(self.calibrator, repairs.ranges, self._amax)

    def ranges(self, candidate: Candidate) -> dict[str, float]:
        """amax of every quantised activation.

        Raises:
            InputError: the placement asks for a tensor that was not calibrated.
        """
        from pipeline.quantize import activation_ranges

        return activation_ranges(self.plan(candidate).activations, self.statistics, self.chosen(candidate.repairs))[0]

    def graph(self, candidate: Candidate) -> Any:
        """The INT8 network as a ``ModelProto``: Q/DQ pairs on activations, weights as the floats they come out as."""
        from calibrators import scale_of

        plan, ranges = self.plan(candidate), self.ranges(candidate)
        scales = {place: float(scale_of(ranges[p.tensor])) for p in plan.activations for place in p.consumers}
        weights = {
            (point.node, point.input_index): self._fake_quantised(point.node, point.input_index, point.axis, candidate)
            for point in plan.weights
        }
        own = Quantisation(scales=scales, weights=weights, constants=self._biases(candidate))
        return hybrid(self.fp32, placement=own, ranges=own, weights=own)

    def weight(self, node: str, position: int, repairs: Repairs) -> Array:
        """The float weight at an input, after repairs."""
        name = self.fp32.by_name[node].input[position]
        if name in repairs.weights:
            return repairs.weights[name]
        values = self.fp32.constant(name)
        if values is None:
            raise KeyError(f"input {position} of {node} is no constant")
        return values

    def _fake_quantised(self, node: str, position: int, axis: int | None, candidate: Candidate) -> Array:
        from pipeline.placement.weights import quantize_weights, weight_amax, weight_scales

        values = self.weight(node, position, candidate.repairs)
        repaired = self.fp32.by_name[node].input[position] in candidate.repairs.weights
        content = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest() if repaired else ""
        key = (node, position, axis, content)
        if key not in self._weights:
            scales = weight_scales(weight_amax(values, axis, node))
            codes = quantize_weights(values, scales, axis)
            shape = [1] * values.ndim
            if axis is not None:
                shape[axis] = -1
            self._weights[key] = (codes.astype(np.float32) * scales.reshape(shape)).astype(np.float32)
        return self._weights[key]

    def _biases(self, candidate: Candidate) -> dict[tuple[str, int], Array]:
        """Corrected biases of the nodes that are quantised; a restored node keeps its own."""
        quantised = {(point.node, point.input_index) for point in self.plan(candidate).weights}
        found: dict[tuple[str, int], Array] = {}
        for node, bias in candidate.repairs.biases.items():
            if any(place[0] == node for place in quantised):
                found[node, BIAS_INPUT] = bias
        return found


BIAS_INPUT = 2
"""Input of Conv, ConvTranspose and Gemm that is the bias."""
