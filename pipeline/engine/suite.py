"""`quantize bench` without the command line: artifacts' engines against baselines, over batches and input sets."""

from __future__ import annotations

import random
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.artifact import SAMPLES, Artifact
from pipeline.config import Profile
from pipeline.core.errors import InputError, ToolError
from pipeline.core.progress import SILENT
from pipeline.engine.baselines import BASELINES, baseline_engine, check_baselines
from pipeline.engine.bench import (
    PLACES,
    Candidate,
    Measurement,
    Overlap,
    compare,
    edge_shapes,
    fill,
    measure_compute,
    measure_overlap,
    shapes_for_batch,
)
from pipeline.engine.compat import load_api
from pipeline.engine.device import describe_device, no_device_reason
from pipeline.engine.dispatch import float_engine, open_runner
from pipeline.engine.fastest import ProfileChoice
from pipeline.engine.loading import artifact_engine, check_engine
from pipeline.engine.records import DeviceInfo, EngineRecord
from pipeline.engine.runner import Runner
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.core.progress import Progress
    from pipeline.engine.profiles import Shape
    from pipeline.engine.serving import Request, Serving

__all__ = ["SETS", "EngineUse", "Load", "SuiteResult", "Verdict", "run_suite"]

SETS = ("warm", "load", "edge")
_LOAD_SECONDS = 1.0
_OVERLAP_SECONDS = 0.5


class EngineUse(Record):
    """One engine of the comparison."""

    name: str
    plan_bytes: int
    device_bytes: int
    """Memory of the card that loading took."""
    build_seconds: float
    choices: tuple[ProfileChoice, ...] = ()
    """Of an artifact with an INT8 and a float plan: which one serves which profile. The figures above are the sums of
    both then."""


class Verdict(Record):
    """Two engines at one shape, the first one against the second."""

    batch: int
    cuda_graph: bool
    first: str
    second: str
    verdict: Literal["faster", "slower", "within noise"]
    ratio: float | None
    """Throughput of the first over that of the second; None inside the noise: nothing is claimed."""


class Load(Record):
    """Requests of changing batch sizes, as many on the card as allowed."""

    name: str
    batches: tuple[int, ...]
    in_flight: int
    throughput: float
    """Samples per second, copies included."""
    latency_p50_ms: float
    latency_p90_ms: float
    latency_p99_ms: float


class SuiteResult(Record):
    device: DeviceInfo
    tensorrt: str
    engines: tuple[EngineUse, ...]
    warm: tuple[Measurement, ...] = ()
    edge: tuple[Measurement, ...] = ()
    load: tuple[Load, ...] = ()
    overlap: tuple[Overlap, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


def run_suite(
    artifacts: Sequence[Path],
    *,
    batches: Sequence[int],
    against: Sequence[str] = (),
    sets: Sequence[str] = ("warm",),
    target: str = "tensorrt",
    rounds: int = 5,
    in_flight: int = 3,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> SuiteResult:
    """Measure each artifact's engine, with and without CUDA graphs, and its FP32 model's baselines beside it.

    An artifact with a float plan is measured as :func:`pipeline.engine.dispatch.serve` serves it, and called "fastest".

    Args:
        against: ``fp32``, ``fp16``, ``implicit``: built from the artifact's own FP32 model, and kept in ``cache``.
        sets: ``warm``: one batch size after another; ``load``: changing sizes, several requests at a time; ``edge``:
            smallest and largest shapes of each profile.
        cache: folder for the baselines' engines; None: beside the timing caches.

    Raises:
        InputError: an artifact without an engine for ``target``, an unknown baseline or set, a batch no profile allows.
        ToolError: no card, or TensorRT fails.
    """
    for text, known in ((against, BASELINES), (sets, SETS)):
        for word in text:
            if word not in known:
                raise InputError(f"{word!r} is unknown here; known: {', '.join(known)}")
    device, api = describe_device(), load_api(target)
    opened = [Artifact.open(folder) for folder in artifacts]
    names = _names(opened)
    check_baselines(opened, against, api)
    own = [_served(artifact, name, target) for artifact, name in zip(opened, names, strict=True)]  # all, before a build
    if device is None:
        raise ToolError(
            f"nothing can be measured here: {no_device_reason()}", remedy="`quantize doctor` says what works here"
        )
    for served in own:
        check_engine(served.records[0], api, device)
    engines = []
    for artifact, name, served in zip(opened, names, own, strict=True):
        engines += [served, *_baselines(artifact, name, target, against, served.records[0].profiles, cache, progress)]
    samples = _samples(opened[0])
    with ExitStack() as stack:
        candidates, uses = [], []
        for engine in engines:
            for graph in (False, True):
                runner = stack.enter_context(engine.open(cuda_graphs=graph, in_flight=in_flight))
                candidates.append(Candidate(engine.name, runner, graph))
            uses.append(
                EngineUse(
                    name=engine.name,
                    plan_bytes=sum(record.plan_bytes for record in engine.records),
                    device_bytes=runner.device_bytes,
                    build_seconds=sum(record.build_seconds for record in engine.records),
                    choices=engine.choices,
                )
            )
            warm, edge, load, overlap = [], [], [], []
        profiles, places = candidates[0].runner.profiles, min(in_flight, PLACES)
        with progress.task("measuring", total=None, unit="shapes") as task:
            for batch in batches if "warm" in sets else ():
                shapes = shapes_for_batch(profiles, batch)
                warm += measure_compute(candidates, shapes, rounds=rounds, places=places, samples=samples)
                task.advance()
            for shapes in edge_shapes(profiles) if "edge" in sets else ():
                edge += measure_compute(candidates, shapes, rounds=rounds, places=places, samples=samples)
                task.advance()
            for candidate in candidates if "load" in sets else ():
                mix = [shapes_for_batch(profiles, batch) for batch in batches]
                load.append(measure_load(candidate, mix, in_flight=in_flight, seconds=_LOAD_SECONDS))
                shapes = shapes_for_batch(profiles, max(batches))
                overlap.append(
                    measure_overlap(candidate, shapes, in_flight=in_flight, samples=samples, seconds=_OVERLAP_SECONDS)
                )
                task.advance()
    return SuiteResult(
        device=device,
        tensorrt=api.version,
        engines=tuple(uses),
        warm=tuple(warm),
        edge=tuple(edge),
        load=tuple(load),
        overlap=tuple(overlap),
        verdicts=verdicts(warm, reference=engines[0].name),
    )


@dataclass(frozen=True)
class _Engine:
    """What is measured under one name."""

    name: str
    records: tuple[EngineRecord, ...]
    """Of its plan, or of its INT8 and its float plan."""
    open: Callable[..., Serving]
    choices: tuple[ProfileChoice, ...] = ()


def _names(artifacts: Sequence[Artifact]) -> list[str]:
    """What the artifacts are called in the results: by their manifests, or by their folders where that is ambiguous."""
    folders = [artifact.folder.resolve() for artifact in artifacts]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise InputError(f"the artifact {twice} is given twice", remedy="name each once: its rounds show the noise")
    names = [artifact.manifest.name for artifact in artifacts]
    return [str(a.folder) if names.count(name) > 1 else name for a, name in zip(artifacts, names, strict=True)]


def _served(artifact: Artifact, name: str, target: str) -> _Engine:
    """The artifact as it serves."""
    _, record = artifact_engine(artifact, target)
    serves = partial(open_runner, artifact, target)
    found = float_engine(artifact, target)
    if found is None:
        return _Engine(f"{name} int8", (record,), serves)
    return _Engine(f"{name} fastest", (record, found[1]), serves, found[2].choices)


def _baselines(
    artifact: Artifact,
    name: str,
    target: str,
    against: Sequence[str],
    profiles: Sequence[Profile],
    cache: Path | None,
    progress: Progress,
) -> list[_Engine]:
    built = [(kind, *baseline_engine(artifact, kind, target, profiles, cache, progress)) for kind in against]
    return [
        _Engine(f"{name} {kind}", (record,), partial(Runner, plan, target=target, record=record))
        for kind, plan, record in built
    ]


def _samples(artifact: Artifact) -> dict[str, np.ndarray]:
    with np.load(artifact.path(SAMPLES), allow_pickle=False) as stored:
        return {name.removeprefix("inputs/"): stored[name] for name in stored.files if name.startswith("inputs/")}


def verdicts(found: Sequence[Measurement], *, reference: str) -> tuple[Verdict, ...]:
    """``reference`` against every other engine, at each batch, with and without graph."""
    made = []
    for one in found:
        if one.name != reference:
            continue
        for other in found:
            if other.name == reference or (other.batch, other.cuda_graph) != (one.batch, one.cuda_graph):
                continue
            verdict = compare(one, other)
            made.append(
                Verdict(
                    batch=one.batch,
                    cuda_graph=one.cuda_graph,
                    first=one.name,
                    second=other.name,
                    verdict=verdict,
                    ratio=None if verdict == "within noise" else one.throughput / other.throughput,
                )
            )
    return tuple(made)


def measure_load(
    candidate: Candidate,
    mix: Sequence[Mapping[str, Shape]],
    *,
    in_flight: int,
    seconds: float,
    seed: int = 0,
) -> Load:
    """Requests of the shapes in ``mix`` in random order, ``in_flight`` of them on the card at a time."""
    generator, runner = random.Random(seed), candidate.runner
    for shapes in mix:  # nothing is allocated or captured while the clock runs
        opened = [runner.open_request(shapes) for _ in range(in_flight)]
        for request in opened:
            fill(request, None)
            request.submit()
            request.wait()
        for request in opened:
            request.release()
    waiting: deque[tuple[float, int, Request]] = deque()
    latencies: list[float] = []
    done = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or waiting:
        ending = time.perf_counter() - start >= seconds
        if waiting and (ending or len(waiting) == in_flight):
            began, batch, request = waiting.popleft()
            request.wait()
            request.release()
            latencies.append(1000 * (time.perf_counter() - began))
            done += batch
        if not ending:
            shapes = generator.choice(mix)
            began = time.perf_counter()
            request = runner.open_request(shapes)
            request.submit()
            waiting.append((began, next(iter(shapes.values()))[0], request))
    passed = time.perf_counter() - start
    p50, p90, p99 = (float(np.percentile(latencies, q)) for q in (50, 90, 99))
    return Load(
        name=candidate.name + (" with CUDA graph" if candidate.cuda_graph else ""),
        batches=tuple(next(iter(shapes.values()))[0] for shapes in mix),
        in_flight=in_flight,
        throughput=done / passed,
        latency_p50_ms=p50,
        latency_p90_ms=p90,
        latency_p99_ms=p99,
    )
