#!/usr/bin/env python3
"""Which way of building is fastest: profiles, timing iterations, optimisation level, graph. On a GPU machine.

    gpu_builds.py --at PACK --model MODEL --out OUT [--budget-s 540] BUILD...

PACK is what ``gpu_bench.py receive`` put together. BUILD is ``NAME=GRAPH,key=value,...``, GRAPH int8, implicit, fp16
or a rival of the pack, and the keys ``profiles`` (``dynamic``: 1:1:1 and 2:64:128; ``static``: 1, 64 and 128 alone; a
batch: that alone), ``iterations``, ``level`` and ``half`` (1: float16 inputs); ``NAME=@OTHER`` is the plan of another
BUILD, loaded once more. All engines are built one after the other, those that an earlier run left in OUT are taken, and
then measured together, each at the batches that its profiles allow, with and without CUDA graph. Writes OUT/builds.json
and prints tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.core.errors import QuantizeError
from pipeline.engine.bench import PLACES, Candidate, measure_compute
from pipeline.engine.builder import build_engine
from pipeline.engine.records import BuildOptions, EngineRecord
from pipeline.engine.runner import Runner
from scripts.gpu_calibrator import calibration_cache
from scripts.gpu_common import RIVALS, batch_profiles, model_images, unpack

PROFILES = {"dynamic": ("1:1:1", "2:64:128"), "static": ("1:1:1", "64:64:64", "128:128:128")}
GRAPHS = ("int8", "implicit", "fp16", *RIVALS)
NUMBERS = {"iterations", "level", "half"}
MEASURING_S = 75.0  # kept for it


@dataclass(frozen=True)
class Build:
    name: str
    graph: str
    profiles: str = "dynamic"
    iterations: int | None = None
    level: int | None = None
    half: bool = False

    @property
    def other(self) -> str | None:
        """The build whose plan this one is."""
        return self.graph[1:] if self.graph.startswith("@") else None

    @property
    def ranges(self) -> tuple[str, ...]:
        """MIN:OPT:MAX batch of each profile."""
        return PROFILES.get(self.profiles, (":".join([self.profiles] * 3),))

    def allows(self, batch: int) -> bool:
        bounds = (part.split(":") for part in self.ranges)
        return any(int(low) <= batch <= int(high) for low, _, high in bounds)

    @classmethod
    def parse(cls, text: str) -> Build:
        """
        Raises:
            ValueError: it is not of the form above.
        """
        name, _, rest = text.partition("=")
        graph, *pairs = rest.split(",")
        values = dict(pair.split("=", 1) for pair in pairs)
        profiles = values.pop("profiles", "dynamic")
        known = graph in GRAPHS or graph.startswith("@")
        if not (known and (profiles in PROFILES or profiles.isdecimal()) and values.keys() <= NUMBERS):
            raise ValueError(text)
        numbers = {key: int(value) for key, value in values.items()}
        half = bool(numbers.pop("half", 0))
        return cls(name, graph, profiles, numbers.get("iterations"), numbers.get("level"), half)

    def options(self, folder: Path) -> BuildOptions:
        """``folder`` has the model's graphs."""
        return BuildOptions(
            fp16=True,
            half_inputs=self.half,
            calibration_cache=calibration_cache(folder.parent, folder.name) if self.graph == "implicit" else None,
            optimization_level=self.level,
            avg_timing_iterations=self.iterations,
            timing_cache_folder=folder / "timing",
        )


def built(build: Build, folder: Path, plan: Path, limit_s: float) -> EngineRecord:
    """Build the engine, unless ``plan`` is there, with its record."""
    kept = plan.with_name("build.json")
    if kept.exists():
        return EngineRecord.model_validate_json(kept.read_bytes())
    source = folder / f"{'fp32' if build.graph in ('implicit', 'fp16') else build.graph}.onnx"
    record = build_engine(
        source,
        target="tensorrt",
        profiles=batch_profiles(source, build.ranges),
        plan_path=plan,
        options=build.options(folder),
        timeout_s=limit_s,
    )
    kept.write_text(record.model_dump_json())
    return record


def run(at: Path, model: str, out: Path, builds: list[Build], batches: list[int], budget_s: float) -> None:
    start = time.monotonic()
    unpack(at)
    folder = at / model
    numbers = json.loads((at / "spec.json").read_text())["models"][model]
    with np.load(at / "images.npz", allow_pickle=False) as stored:
        images = model_images(stored["images"][: max(batches)], numbers)
    results: dict[str, Any] = {"builds": {}, "measured": {}}
    records: dict[str, EngineRecord] = {}
    by_name = {build.name: build for build in builds}

    def left() -> float:
        return budget_s - (time.monotonic() - start)

    def save() -> None:
        (out / "builds.json").write_text(json.dumps(results, indent=1))

    for build in builds:
        if build.other is not None:
            continue
        if left() < MEASURING_S:
            results["builds"][build.name] = {"failure": "no time was left"}
            continue
        try:
            record = built(build, folder, out / build.name / "model.plan", left() - MEASURING_S + 15.0)
        except QuantizeError as error:
            results["builds"][build.name] = {"failure": str(error)[:500]}
            print(f"{build.name}: {str(error)[:300]}", flush=True)
            continue
        finally:
            save()
        records[build.name] = record
        results["builds"][build.name] = {"seconds": record.build_seconds, "timing_cache": record.timing_cache}
        print(f"{build.name}: {record.build_seconds:.1f} s, timing cache {record.timing_cache}", flush=True)
    save()
    with ExitStack() as stack:
        candidates: list[Candidate] = []
        for build in builds:
            source = build.other or build.name
            if source not in records:
                continue
            for graphs in (True, False):
                runner = Runner(
                    out / source / "model.plan", record=records[source], cuda_graphs=graphs, in_flight=PLACES
                )
                candidates.append(Candidate(build.name, stack.enter_context(runner), graphs))
        for batch in batches:
            able = [c for c in candidates if by_name[by_name[c.name].other or c.name].allows(batch)]
            if not able or left() < MEASURING_S / 6:
                continue
            shapes = {able[0].runner.inputs[0].name: (batch, *images.shape[1:])}
            found = measure_compute(able, shapes, places=PLACES, samples=dict.fromkeys(shapes, images[:batch]))
            results["measured"][batch] = [m.model_dump(mode="json") for m in found]
            save()
            print(f"batch {batch}, images/s with CUDA graph / without")
            speed = {(m.name, m.cuda_graph): m.throughput for m in found}
            for name in sorted({m.name for m in found}, key=lambda name: -speed[name, True]):
                print(f"  {name:24s} {speed[name, True]:10,.0f} / {speed[name, False]:10,.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=lambda text: [int(v) for v in text.split(",")], default=[64, 1, 128])
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("build", type=Build.parse, nargs="+")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = {build.name for build in args.build}
    for build in args.build:
        if build.other is not None and build.other not in names:
            parser.error(f"{build.name}: no build is called {build.other}")
    run(args.at, args.model, args.out, args.build, args.batches, args.budget_s)


if __name__ == "__main__":
    main()
