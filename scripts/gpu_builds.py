#!/usr/bin/env python3
"""Which way of building is fastest: profiles, timing iterations, optimisation level, graph. On a GPU machine.

    gpu_builds.py --at PACK --model MODEL --out OUT [--budget-s 540] BUILD...

PACK is what ``gpu_bench.py receive`` put together. BUILD is ``NAME=GRAPH,key=value,...``, GRAPH int8, implicit, fp16
or a rival of the pack, and the keys ``profiles`` (``dynamic``: 1:1:1 and 2:64:128; ``static``: 1, 64 and 128 alone),
``iterations``, ``level`` and ``half`` (1: float16 inputs). All engines are built one after the other and then measured
together, at batch 64, 1 and 128, with and without CUDA graph. Writes OUT/builds.json and prints tables.
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
from pipeline.engine.records import BuildOptions
from pipeline.engine.runner import Runner
from scripts.gpu_common import RIVALS, batch_profiles, model_images, unpack

PROFILES = {"dynamic": ("1:1:1", "2:64:128"), "static": ("1:1:1", "64:64:64", "128:128:128")}
GRAPHS = ("int8", "implicit", "fp16", *RIVALS)
BATCHES = (64, 1, 128)
MEASURING_S = 75.0  # kept for it


@dataclass(frozen=True)
class Build:
    name: str
    graph: str
    profiles: str = "dynamic"
    iterations: int | None = None
    level: int | None = None
    half: bool = False

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
        if graph not in GRAPHS or profiles not in PROFILES or not values.keys() <= {"iterations", "level", "half"}:
            raise ValueError(text)
        numbers = {key: int(value) for key, value in values.items()}
        half = bool(numbers.pop("half", 0))
        return cls(name, graph, profiles, numbers.get("iterations"), numbers.get("level"), half)

    def options(self, folder: Path) -> BuildOptions:
        """``folder`` has the model's graphs."""
        return BuildOptions(
            fp16=True,
            half_inputs=self.half,
            calibration_cache=folder / "calibration.cache" if self.graph == "implicit" else None,
            optimization_level=self.level,
            avg_timing_iterations=self.iterations,
            timing_cache_folder=folder / "timing",
        )


def run(at: Path, model: str, out: Path, builds: list[Build], budget_s: float) -> None:
    start = time.monotonic()
    unpack(at)
    folder = at / model
    numbers = json.loads((at / "spec.json").read_text())["models"][model]
    with np.load(at / "images.npz", allow_pickle=False) as stored:
        images = model_images(stored["images"][: max(BATCHES)], numbers)
    results: dict[str, Any] = {"builds": {}, "measured": {}}

    def left() -> float:
        return budget_s - (time.monotonic() - start)

    def save() -> None:
        (out / "builds.json").write_text(json.dumps(results, indent=1))

    with ExitStack() as stack:
        candidates: list[Candidate] = []
        for build in builds:
            if left() < MEASURING_S:
                results["builds"][build.name] = {"failure": "no time was left"}
                continue
            source = folder / f"{'fp32' if build.graph in ('implicit', 'fp16') else build.graph}.onnx"
            plan = out / build.name / "model.plan"
            try:
                record = build_engine(
                    source,
                    target="tensorrt",
                    profiles=batch_profiles(source, PROFILES[build.profiles]),
                    plan_path=plan,
                    options=build.options(folder),
                    timeout_s=left() - MEASURING_S + 15.0,
                )
            except QuantizeError as error:
                results["builds"][build.name] = {"failure": str(error)[:500]}
                print(f"{build.name}: {str(error)[:300]}", flush=True)
                continue
            finally:
                save()
            for graphs in (True, False):
                runner = Runner(plan, record=record, cuda_graphs=graphs, in_flight=PLACES)
                candidates.append(Candidate(build.name, stack.enter_context(runner), graphs))
            results["builds"][build.name] = {"seconds": record.build_seconds, "timing_cache": record.timing_cache}
            print(f"{build.name}: {record.build_seconds:.1f} s, timing cache {record.timing_cache}", flush=True)
        for batch in BATCHES if candidates else ():
            if left() < MEASURING_S / 6:
                break
            shapes = {candidates[0].runner.inputs[0].name: (batch, *images.shape[1:])}
            samples = dict.fromkeys(shapes, images[:batch])
            found = measure_compute(candidates, shapes, places=PLACES, samples=samples)
            results["measured"][batch] = [m.model_dump(mode="json") for m in found]
            save()
            print(f"batch {batch}, images/s with CUDA graph / without")
            by_name = {(m.name, m.cuda_graph): m.throughput for m in found}
            for name in sorted({m.name for m in found}, key=lambda name: -by_name[name, True]):
                print(f"  {name:24s} {by_name[name, True]:10,.0f} / {by_name[name, False]:10,.0f}", flush=True)
    save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("build", type=Build.parse, nargs="+")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run(args.at, args.model, args.out, args.build, args.budget_s)


if __name__ == "__main__":
    main()
