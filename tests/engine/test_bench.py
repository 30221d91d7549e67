"""Measurements: what is ranked, what is not, and that the figures are complete (fake card: the values mean nothing)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config import Profile
from pipeline.core.errors import InputError
from pipeline.engine import bench
from pipeline.engine.bench import (
    Candidate,
    _launches,
    compare,
    edge_shapes,
    fill,
    measure_compute,
    measure_overlap,
    shapes_for_batch,
)
from pipeline.engine.runner import Runner
from pipeline.engine.suite import measure_load, verdicts
from tests.engine.fakes import plan
from tests.engine.records import measurement

PROFILES = [Profile.parse("x=1x3x8x8,1x3x8x8,1x3x8x8"), Profile.parse("x=2x3x4x4,8x3x8x8,64x3x16x16")]


def test_only_differences_outside_the_noise_are_ranked() -> None:
    fast, slow, wide = measurement("a", 1.0, 1.1), measurement("b", 1.2, 1.3), measurement("c", 1.05, 1.25)
    assert compare(fast, slow) == "faster"
    assert compare(slow, fast) == "slower"
    assert compare(fast, wide) == compare(wide, slow) == "within noise"


def test_verdicts_claim_a_ratio_only_outside_the_noise() -> None:
    found = [
        measurement("ours", 1.0, 1.1),
        measurement("ours", 0.5, 0.6, graph=True),
        measurement("fp16", 2.0, 2.2),
        measurement("fp16", 0.55, 0.7, graph=True),
        measurement("fp16", 1.0, 1.0, batch=1),
    ]
    first, second = verdicts(found, reference="ours")
    assert (first.cuda_graph, first.verdict, first.ratio) == (False, "faster", pytest.approx(2.0))
    assert (second.cuda_graph, second.verdict, second.ratio) == (True, "within noise", None)


def test_shapes_for_a_batch_come_from_the_nearest_profile() -> None:
    assert shapes_for_batch(PROFILES, 1) == {"x": (1, 3, 8, 8)}
    assert shapes_for_batch(PROFILES, 64) == {"x": (64, 3, 8, 8)}
    with pytest.raises(InputError, match="no profile of the engine allows batch 65; they allow 1 to 1, 2 to 64"):
        shapes_for_batch(PROFILES, 65)


def test_edges_are_the_smallest_and_largest_shapes_once() -> None:
    assert edge_shapes(PROFILES) == [{"x": (1, 3, 8, 8)}, {"x": (2, 3, 4, 4)}, {"x": (64, 3, 16, 16)}]


def test_inputs_are_filled_with_samples_or_noise_never_with_zeros() -> None:
    inputs = {
        "x": np.zeros((4, 3), np.float32),
        "ids": np.zeros((64,), np.int32),
        "other": np.zeros((64, 2), np.float32),
    }
    fill(SimpleNamespace(inputs=inputs), {"x": np.array([[1, 2, 3], [4, 5, 6]], np.float32)})
    assert inputs["x"].tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6]]
    assert set(inputs["ids"]) == {0, 1}
    assert abs(inputs["other"]).min() > 0
    again = np.zeros((64, 2), np.float32)
    fill(SimpleNamespace(inputs={"other": again}), None)
    fill(SimpleNamespace(inputs={"other": inputs["other"]}), None)
    assert np.array_equal(again, inputs["other"])


def test_candidates_are_measured_in_turn_and_completely(card: SimpleNamespace) -> None:
    with Runner(plan(), in_flight=2) as plain, Runner(plan(), in_flight=2, cuda_graphs=True) as graph:
        candidates = [Candidate("plain", plain, False), Candidate("graph", graph, True)]
        found = measure_compute(candidates, {"x": (4, 3)}, rounds=3, samples={"x": np.ones((2, 3), np.float32)})
        assert [m.name for m in found] == ["plain", "graph"]
        for m in found:
            assert m.batch == 4
            assert len(m.rounds_ms) == 3
            assert m.runs == len(m.rounds_ms) * (m.runs // 3)
            assert 0 < m.p50_ms <= m.p90_ms <= m.p99_ms
            assert 0 < m.latency_p50_ms <= m.latency_p99_ms
            assert m.launch_us > 0
            assert m.captured == m.cuda_graph
            assert m.throughput == pytest.approx(4000 / float(np.median(m.rounds_ms)))
        overlap = measure_overlap(candidates[0], {"x": (8, 3)}, in_flight=2, seconds=0.02)
        assert overlap.share == overlap.overlapped / overlap.compute_alone
        assert min(overlap.one_at_a_time, overlap.copy_in_alone) > 0
        load = measure_load(candidates[1], [{"x": (1, 3)}, {"x": (8, 3)}], in_flight=2, seconds=0.05)
        assert load.batches == (1, 8)
        assert 0 < load.latency_p50_ms <= load.latency_p90_ms <= load.latency_p99_ms
        assert load.throughput > 0


def slots_used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Pool and slot of each measurement of a round, as they come."""
    ran: list[tuple[Any, int]] = []

    def launches(request: Any, *rest: object) -> list[float]:
        ran.append((request._pool, id(request._slot)))
        return [1.0]

    monkeypatch.setattr(bench, "_launches", launches)
    return ran


def test_rounds_take_turns_in_several_places(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = slots_used(monkeypatch)
    with Runner(plan(), in_flight=3) as runner, Runner(plan(), in_flight=3) as other:
        candidates = [Candidate("a", runner, False), Candidate("b", other, False)]
        found = measure_compute(candidates, {"x": (4, 3)}, rounds=5, places=3)
        assert [len(m.rounds_ms) for m in found] == [5, 5]
        slots = [[slot for pool, slot in ran if pool is each._pool] for each in (runner, other)]
        for own in slots:
            assert len(set(own)) == 3
            assert own[3:] == own[:2]
        assert not set(slots[0]) & set(slots[1])


def test_every_round_has_an_order_of_its_own(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fixed order one plan measured twice, first and last, was ranked against itself on a card."""
    ran = slots_used(monkeypatch)
    with Runner(plan(), in_flight=8) as runner:
        candidates = [Candidate(str(number), runner, False) for number in range(8)]
        found = measure_compute(candidates, {"x": (4, 3)}, rounds=6)
        orders = [tuple(slot for _, slot in ran[start : start + 8]) for start in range(0, 48, 8)]
        assert {frozenset(order) for order in orders} == {frozenset(orders[0])}
        assert len(set(orders)) == 6
        assert len({order[0] for order in orders}) > 3
        assert [m.name for m in found] == [candidate.name for candidate in candidates]


def test_a_shape_that_could_not_be_captured_is_marked(card: SimpleNamespace) -> None:
    card.graphs.refuse = True
    with Runner(plan(), cuda_graphs=True) as runner:
        (found,) = measure_compute([Candidate("graph", runner, True)], {"x": (4, 3)}, rounds=2)
    assert found.cuda_graph
    assert not found.captured


class Queue:
    """A request whose host clock shows when launching had to wait for the card: more than ``depth`` in the queue."""

    def __init__(self, depth: int) -> None:
        self.depth, self.waiting, self.seconds = depth, 0, 0.0

    def execute(self) -> None:
        self.waiting += 1
        self.seconds += 1e-5 if self.waiting <= self.depth else 1e-3

    def wait(self) -> None:
        self.waiting = 0


def test_launches_are_timed_on_an_idle_stream() -> None:
    """Enqueued back to back, a long queue would have the host wait and the launch cost what the run costs."""
    queue = Queue(depth=4)
    assert _launches(queue, 20, lambda: queue.seconds) == pytest.approx([10.0] * 20)
