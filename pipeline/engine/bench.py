"""Measure engines against each other on a card: CUDA-event times, launch overhead, latency, throughput with copies.

All candidates are measured in turn, round after round, so that drift of clocks and temperature hits them alike, and in
several places: execution contexts with buffers of their own. One plan in two of them differed by up to 4.4 % on an
H200, where its rounds in one differed by 0.1 %. The spread of a candidate's rounds is its noise: two candidates are
ranked only when those ranges lie apart.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.core.errors import InputError
from pipeline.records import Record

if TYPE_CHECKING:
    from pipeline.config import Profile
    from pipeline.engine.cuda import Device
    from pipeline.engine.profiles import Shape
    from pipeline.engine.serving import Request, Serving

__all__ = [
    "PLACES",
    "Candidate",
    "Measurement",
    "Overlap",
    "compare",
    "edge_shapes",
    "fill",
    "measure_compute",
    "measure_overlap",
    "shapes_for_batch",
]

PLACES = 3
"""Slots that an engine is measured in, where it has them."""
_WARM_UP = 10
_CHUNK = 20
_ROUND_SECONDS = 0.15
_MOST_RUNS, _FEWEST_RUNS = 400, 20


class Measurement(Record):
    """One engine at one shape. Times in milliseconds."""

    name: str
    batch: int
    shapes: dict[str, tuple[int, ...]]
    cuda_graph: bool
    profile: int
    p50_ms: float
    """Between CUDA events around each run, runs enqueued back to back."""
    p90_ms: float
    p99_ms: float
    throughput: float
    """Samples per second of computation, back to back."""
    latency_p50_ms: float
    """Wall time of a whole request alone: copy in, computation, copy out, wait."""
    latency_p99_ms: float
    launch_us: float
    """Host time to enqueue the computation on an idle stream, median."""
    runs: int
    rounds_ms: tuple[float, ...]
    """Mean of each round, enqueued without events between the runs: their range is the noise. Round n ran in place n
    modulo the number of places."""
    captured: bool
    """Whether a CUDA graph was replayed."""
    plan: Literal["int8", "float"] | None = None
    """Of an artifact with two plans, the one that ran; None where there is one."""


class Overlap(Record):
    """Throughput with host copies, in samples per second."""

    name: str
    batch: int
    cuda_graph: bool
    in_flight: int
    compute_alone: float
    one_at_a_time: float
    overlapped: float
    copy_in_alone: float
    """What the copies of the inputs alone would allow."""

    @property
    def share(self) -> float:
        """Overlapped throughput as a share of computation alone."""
        return self.overlapped / self.compute_alone


@dataclass(frozen=True)
class Candidate:
    """An engine to measure under a name."""

    name: str
    runner: Serving
    cuda_graph: bool


def shapes_for_batch(profiles: Sequence[Profile], batch: int) -> dict[str, Shape]:
    """Shapes with ``batch`` samples: those of the profile whose optimum is nearest, with the batch axis replaced.

    Raises:
        InputError: no profile allows that batch.
    """
    fitting = [p for p in profiles if all(r.min and r.min[0] <= batch <= r.max[0] for r in p.inputs.values())]
    if not fitting:
        ranges = ", ".join(f"{r.min[0]} to {r.max[0]}" for p in profiles for r in list(p.inputs.values())[:1] if r.min)
        raise InputError(f"no profile of the engine allows batch {batch}; they allow {ranges or 'no batch axis'}")
    best = min(fitting, key=lambda p: abs(np.log2(batch / max(1, next(iter(p.inputs.values())).opt[0]))))
    return {name: (batch, *shape_range.opt[1:]) for name, shape_range in best.inputs.items()}


def edge_shapes(profiles: Sequence[Profile]) -> list[dict[str, Shape]]:
    """Smallest and largest shapes of every profile, without repetition."""
    found: list[dict[str, Shape]] = []
    for profile in profiles:
        for end in ("min", "max"):
            shapes: dict[str, Shape] = {name: getattr(r, end) for name, r in profile.inputs.items()}
            if shapes not in found:
                found.append(shapes)
    return found


def fill(request: Request, samples: Mapping[str, np.ndarray] | None) -> None:
    """Fill the pinned inputs: with ``samples`` repeated along the first axis where given and fitting, else with noise.

    Never with zeros: some hardware is faster on them.
    """
    generator = np.random.default_rng(0)
    for name, target in request.inputs.items():
        source = None if samples is None else samples.get(name)
        if source is not None and source.shape[1:] == target.shape[1:] and target.ndim:
            target[...] = np.resize(source, target.shape)
        elif np.issubdtype(target.dtype, np.floating):
            target[...] = generator.standard_normal(target.shape, dtype=np.float32)
        else:
            target[...] = generator.integers(0, 2, target.shape)


def measure_compute(
    candidates: Sequence[Candidate],
    shapes: Mapping[str, Shape],
    *,
    rounds: int = 5,
    places: int = 1,
    samples: Mapping[str, np.ndarray] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measurement]:
    """Measure ``candidates`` at ``shapes``, interleaved over ``rounds``; one :class:`Measurement` each, in order.

    Every round takes the candidates in an order of its own, drawn from a fixed seed. In one order for all rounds the
    first of sixteen was 1.2 % slower than the same plan at the end (EfficientNet-Lite0 on an H200, batch 64, without
    graph): what ran before leaves its mark, which has to be in the spread of the rounds and not in the difference.

    Args:
        places: slots of its runner that a candidate takes, one round in each in turn. Candidates that share a runner
            need so many each.
    """
    from pipeline.engine.profiles import choose_profile

    batch = next(iter(shapes.values()))[0] if next(iter(shapes.values()), ()) else 1
    times: list[list[np.ndarray]] = [[] for _ in candidates]
    totals: list[list[float]] = [[] for _ in candidates]
    launches: list[list[float]] = [[] for _ in candidates]
    latencies: list[list[float]] = [[] for _ in candidates]
    with ExitStack() as stack:
        opened = [[stack.enter_context(c.runner.request(shapes)) for _ in range(places)] for c in candidates]
        counts = []
        for requests in opened:
            for request in requests:
                fill(request, samples)
                request.submit()
                request.wait()
            counts.append(_runs_per_round(requests[0], clock))
        shuffled = np.random.default_rng(0)
        for turn in range(rounds):
            for number in shuffled.permutation(len(candidates)):
                request, runs = opened[number][turn % places], counts[number]
                device = candidates[number].runner.device
                times[number].append(_event_times(device, request, runs, every=1))
                totals[number] += list(_event_times(device, request, runs, every=runs))
                launches[number] += _launches(request, _FEWEST_RUNS, clock)
                latencies[number] += _latencies(request, max(_FEWEST_RUNS, runs // 4), clock)
    results = []
    for number, candidate in enumerate(candidates):
        every = np.concatenate(times[number])
        p50, p90, p99 = (float(np.percentile(every, q)) for q in (50, 90, 99))
        rounds_ms = tuple(float(total) / counts[number] for total in totals[number])
        results.append(
            Measurement(
                name=candidate.name,
                batch=batch,
                shapes=dict(shapes),
                cuda_graph=candidate.cuda_graph,
                profile=choose_profile(candidate.runner.profiles, shapes),
                p50_ms=p50,
                p90_ms=p90,
                p99_ms=p99,
                throughput=1000 * batch / float(np.median(rounds_ms)),
                latency_p50_ms=float(np.percentile(latencies[number], 50)),
                latency_p99_ms=float(np.percentile(latencies[number], 99)),
                launch_us=float(np.median(launches[number])),
                runs=len(every),
                rounds_ms=rounds_ms,
                captured=candidate.cuda_graph and str(dict(shapes)) not in candidate.runner.uncaptured,
                plan=candidate.runner.plan_for(shapes),
            )
        )
    return results


def _runs_per_round(request: Request, clock: Callable[[], float]) -> int:
    """Warm up, and find how many runs fill a round."""
    start = clock()
    for _ in range(_WARM_UP):
        request.execute()
    request.wait()
    each = max((clock() - start) / _WARM_UP, 1e-6)
    return int(min(max(_ROUND_SECONDS / each, _FEWEST_RUNS), _MOST_RUNS))


def _event_times(device: Device, request: Request, runs: int, *, every: int) -> np.ndarray:
    """Milliseconds between events that lie ``every`` runs apart: an event costs the host time of its own."""
    with device.active():
        events = [device.event() for _ in range(runs // every + 1)]
        stream = request.stream.native
        for _ in range(_WARM_UP // 2):
            request.execute()
        events[0].record(stream)
        for event in events[1:]:
            for _ in range(every):
                request.execute()
            event.record(stream)
        request.wait()
        found = np.array([before.time_till(after) for before, after in itertools.pairwise(events)])
        del events
    return found


def _launches(request: Request, runs: int, clock: Callable[[], float]) -> list[float]:
    """Microseconds to enqueue one run. Each on an idle stream: a full queue would make the host wait for the card."""
    found = []
    for _ in range(runs):
        start = clock()
        request.execute()
        found.append(1e6 * (clock() - start))
        request.wait()
    return found


def _latencies(request: Request, runs: int, clock: Callable[[], float]) -> list[float]:
    """Milliseconds of whole requests, one at a time."""
    found = []
    for _ in range(runs):
        start = clock()
        request.submit()
        request.wait()
        found.append(1000 * (clock() - start))
    return found


def measure_overlap(
    candidate: Candidate,
    shapes: Mapping[str, Shape],
    *,
    in_flight: int,
    seconds: float = 0.5,
    samples: Mapping[str, np.ndarray] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Overlap:
    """Throughput of computation alone, of one request at a time and of ``in_flight`` overlapping ones.

    The inputs are already in pinned memory, as a server that decodes into :attr:`Request.inputs` has them.

    Args:
        candidate: its runner needs at least ``in_flight`` slots.
    """
    batch = next(iter(shapes.values()))[0]
    with ExitStack() as stack:
        requests = [stack.enter_context(candidate.runner.request(shapes)) for _ in range(in_flight)]
        for request in requests:
            fill(request, samples)
            request.submit()
            request.wait()
        first = requests[0]

        def compute() -> None:
            for _ in range(_CHUNK):
                first.execute()
            first.wait()

        def one_at_a_time() -> None:
            for _ in range(_CHUNK):
                first.submit()
                first.wait()

        def copy_in() -> None:
            for _ in range(_CHUNK):
                first.copy_in()
            first.wait()

        alone, single, copies = (_rate(work, seconds, clock) for work in (compute, one_at_a_time, copy_in))
        overlapped = _overlapped_rate(requests, seconds, clock)
    return Overlap(
        name=candidate.name,
        batch=batch,
        cuda_graph=candidate.cuda_graph,
        in_flight=in_flight,
        compute_alone=batch * alone,
        one_at_a_time=batch * single,
        overlapped=batch * overlapped,
        copy_in_alone=batch * copies,
    )


def _rate(work: Callable[[], None], seconds: float, clock: Callable[[], float]) -> float:
    """Requests per second; ``work`` does ``_CHUNK`` of them."""
    work()
    start, done, passed = clock(), 0, 0.0
    while passed < seconds:
        work()
        done += _CHUNK
        passed = clock() - start
    return done / passed


def _overlapped_rate(requests: Sequence[Request], seconds: float, clock: Callable[[], float]) -> float:
    """Requests per second when each slot is filled again as soon as its turn comes."""
    start, done = clock(), 0
    for request in requests:
        request.submit()
    while clock() - start < seconds:
        request = requests[done % len(requests)]
        request.wait()
        request.submit()
        done += 1
    for request in requests:
        request.wait()
    return (done + len(requests)) / (clock() - start)


def compare(a: Measurement, b: Measurement) -> Literal["faster", "slower", "within noise"]:
    """Whether ``a`` is faster than ``b``: only when the ranges of their rounds do not touch."""
    if max(a.rounds_ms) < min(b.rounds_ms):
        return "faster"
    if min(a.rounds_ms) > max(b.rounds_ms):
        return "slower"
    return "within noise"
