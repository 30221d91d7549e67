"""Finding repairs: proposed from local figures, kept only where the whole network gets better, all of it recorded.

- **equalise**: the spread between channels of an activation moves into the weights behind it, without changing what the
  float network computes;
- **range**: another calibrator's range for one tensor (or group), proposed where it lowers the tensor's own error by a
  tenth or more on the search set;
- **weights**: thresholds by least squared error instead of the largest magnitude;
- **bias**: for each layer with weights, the mean over samples and positions of what INT8 takes away from each output
  channel (this layer in INT8, everything before it in FP32) is given back in its bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.errors.activations import quantisation_energy
from pipeline.errors.capture import CAPTURE_BYTES, OrtReading, micro_batches
from pipeline.errors.graphs import Graph
from pipeline.errors.layers import Layer
from pipeline.errors.local import cut_layer
from pipeline.mixed.candidate import Candidate
from pipeline.mixed.repairs import Repairs, clipped, least_squares_thresholds, statistic_key
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.core.progress import Task
    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays
    from pipeline.mixed.candidate import Network
    from pipeline.mixed.evaluate import Evaluator

__all__ = ["RepairRecord", "find_repairs"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_WORTH_TRYING = 0.9
"""A range is proposed when it leaves at most this share of the tensor's error energy."""
_TRIED_ALONE = 16
_WORTH_KEEPING_DB = 0.1
"""Gain by which a repair is kept. Less than that is chance: rounding alone moves the SQNR of 32 samples by so much."""
_BIASED = ("Conv", "ConvTranspose", "Gemm")


class RepairRecord(Record):
    """One repair that was tried on the search set."""

    kind: str
    """``equalise``, ``range``, ``weights`` or ``bias``."""
    what: str
    """The tensor or layer, or how many of them."""
    change: str
    sqnr_before_db: float
    sqnr_after_db: float
    kept: bool


class _Trial:
    """The repairs so far, and their figure."""

    def __init__(self, evaluator: Evaluator, task: Task) -> None:
        self.evaluator = evaluator
        self.task = task
        self.repairs = Repairs()
        self.records: list[RepairRecord] = []
        self.sqnr = evaluator.measure(Candidate()).sqnr_db

    def attempt(self, repairs: Repairs, kind: str, what: str, change: str) -> bool:
        """Measure ``repairs`` and take them over where the network gets better."""
        after = self.evaluator.measure(Candidate(repairs=repairs)).sqnr_db
        kept = after > self.sqnr + _WORTH_KEEPING_DB
        self.records.append(
            RepairRecord(kind=kind, what=what, change=change, sqnr_before_db=self.sqnr, sqnr_after_db=after, kept=kept)
        )
        if kept:
            self.repairs, self.sqnr = repairs, after
        self.task.advance()
        return kept


def find_repairs(
    network: Network, evaluator: Evaluator, task: Task, *, equalised: int = 0
) -> tuple[Repairs, tuple[RepairRecord, ...]]:
    """Try every kind of repair, in the order above, each on top of what was kept before.

    Args:
        evaluator: of the search set.
        task: advances once per measured repair.
        equalised: how many tensors the network's equalised form has equalised.
    """
    trial = _Trial(evaluator, task)
    if network.equalised is not None:
        trial.attempt(Repairs(equalised=True), "equalise", f"{equalised} tensors", "channels' spread into the weights")
        network = network.of(Candidate(repairs=trial.repairs))
    _repair_ranges(network, trial)
    _repair_weights(network, trial)
    _repair_biases(network, trial)
    return trial.repairs, tuple(trial.records)


# -- ranges ------------------------------------------------------------------------------------------------------------


def _repair_ranges(network: Network, trial: _Trial) -> None:
    proposals = _proposed_ranges(network, trial.evaluator)
    for key, what, calibrator, amax, current in proposals[:_TRIED_ALONE]:
        repairs = trial.repairs.with_ranges({key: (calibrator, amax)})
        trial.attempt(repairs, "range", what, f"{calibrator}: amax {current:.5g} -> {amax:.5g}")
    rest = proposals[_TRIED_ALONE:]
    if rest:
        repairs = trial.repairs.with_ranges({key: (calibrator, amax) for key, _, calibrator, amax, _ in rest})
        trial.attempt(repairs, "range", f"{len(rest)} tensors", "the range of least error")


def _proposed_ranges(network: Network, evaluator: Evaluator) -> list[tuple[str, str, str, float, float]]:
    """Statistic key, tensors, calibrator, its amax and the present one, the largest gain first."""
    import calibrators
    from pipeline.quantize import activation_ranges, merge_tensors

    plan = network.plan(Candidate())
    current = network.ranges(Candidate())
    others: dict[str, dict[str, float]] = {}
    for name in calibrators.names():
        try:
            found, _ = activation_ranges(plan.activations, network.statistics, calibrators.get(name))
        except InputError:
            continue  # needs something that these statistics do not hold
        others[name] = found
    groups: dict[str, list[str]] = {}
    for point in plan.activations:
        if point.source is None:
            groups.setdefault(point.tensor if point.group is None else f"group {point.group}", []).append(point.tensor)
    names = list(others)
    tried = {t: [current[t], *(others[name][t] for name in names)] for members in groups.values() for t in members}
    energies = {tensor: np.zeros(1 + len(names)) for tensor in tried}
    for values in _float_tensors(network, evaluator, list(tried)):
        for tensor, ranges in tried.items():
            rows = np.ascontiguousarray(values[tensor].reshape(1, -1), np.float32)
            energies[tensor] += quantisation_energy(rows, [amax / 127.0 for amax in ranges]).sum(axis=0)
    proposals = []
    for members in groups.values():
        energy = np.sum([energies[tensor] for tensor in members], axis=0)
        best = int(np.argmin(energy))
        if best and energy[best] < _WORTH_TRYING * energy[0]:
            key = statistic_key(merge_tensors([network.statistics[tensor] for tensor in members]))
            amax, now = tried[members[0]][best], current[members[0]]
            gain = float(energy[0] / max(energy[best], 1e-300))
            proposals.append((gain, (key, " + ".join(members), names[best - 1], amax, now)))
    return [proposal for _, proposal in sorted(proposals, key=lambda item: -item[0])]


def _float_tensors(network: Network, evaluator: Evaluator, tensors: Sequence[str]) -> Iterator[Arrays]:
    """FP32 values of ``tensors`` on the search set, a few samples at a time."""
    reading = OrtReading(
        network.fp32.proto, tensors, label="the FP32 graph", optimise=True, external_data_dir=network.fp32.folder
    )
    for batch, _ in evaluator.pairs():
        for part in _parts(reading, batch):
            yield reading(part)


def _parts(reading: OrtReading, batch: Batch) -> Iterator[Batch]:
    return micro_batches(batch, None if reading.static_batch else reading.samples_within(CAPTURE_BYTES, batch))


# -- weights -----------------------------------------------------------------------------------------------------------


def _repair_weights(network: Network, trial: _Trial) -> None:
    proposals: dict[str, tuple[Array, float]] = {}
    for point in network.plan(Candidate()).weights:
        values = network.weight(point.node, point.input_index, Repairs())
        thresholds = least_squares_thresholds(values, point.axis)
        limited = clipped(values, thresholds, point.axis)
        if not np.array_equal(limited, values):
            share = float(np.square(values - limited).sum() / max(float(np.square(values).sum()), 1e-300))
            proposals[network.fp32.by_name[point.node].input[point.input_index]] = (limited, share)
    if not proposals:
        return
    everything = trial.repairs.with_weights({name: values for name, (values, _) in proposals.items()})
    if trial.attempt(everything, "weights", f"{len(proposals)} layers", "thresholds by least squared error"):
        return
    most = sorted(proposals, key=lambda name: -proposals[name][1])[: _TRIED_ALONE // 2]
    for name in most:
        repairs = trial.repairs.with_weights({name: proposals[name][0]})
        trial.attempt(repairs, "weights", name, "threshold by least squared error")


# -- biases ------------------------------------------------------------------------------------------------------------


def _repair_biases(network: Network, trial: _Trial) -> None:
    shifts = _channel_shifts(network, trial.evaluator, trial.repairs)
    biases = {}
    for node, shift in shifts.items():
        inputs = network.fp32.by_name[node].input
        bias = network.fp32.constant(inputs[2]) if len(inputs) > 2 and inputs[2] else np.zeros_like(shift)
        if bias is not None and bias.shape == shift.shape:
            biases[node] = (bias + shift).astype(np.float32)
    if biases:
        repairs = trial.repairs.with_biases(biases)
        trial.attempt(repairs, "bias", f"{len(biases)} layers", "mean shift of each output channel given back")


def _channel_shifts(network: Network, evaluator: Evaluator, repairs: Repairs) -> dict[str, Array]:
    """Node to E[fp32 − int8] per output channel, the layer alone in INT8."""
    candidate = Candidate(repairs=repairs)
    weighted = {point.node for point in network.plan(candidate).weights}
    int8 = Graph(network.graph(candidate))
    cuts = [
        cut_layer(Layer(tensor=node.output[0], node=node.name, op=node.op_type), network.fp32, int8)
        for node in network.fp32.nodes
        if node.name in weighted and node.op_type in _BIASED
    ]
    feeds = dict.fromkeys(name for cut in cuts for name in (*cut.feeds, cut.layer.tensor))
    sums: dict[str, Array] = {}
    counts: dict[str, int] = {}
    for values in _float_tensors(network, evaluator, list(feeds)):
        for cut in cuts:
            difference = values[cut.layer.tensor].astype(np.float64) - cut.run(values)["local"]
            channel = 1 if cut.layer.op != "Gemm" else difference.ndim - 1
            others = tuple(axis for axis in range(difference.ndim) if axis != channel)
            sums[cut.layer.node] = sums.get(cut.layer.node, 0.0) + difference.sum(axis=others)
            counts[cut.layer.node] = counts.get(cut.layer.node, 0) + difference.size // difference.shape[channel]
    return {node: (total / counts[node]).astype(np.float32) for node, total in sums.items()}
