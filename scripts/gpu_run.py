"""The part of ``gpu_bench.py`` that builds and measures on the GPU machine: needs TensorRT and PyCUDA only."""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from pipeline.config import Profile
from pipeline.core.errors import QuantizeError
from pipeline.engine.bench import PLACES, Candidate, Measurement, compare, measure_compute, measure_overlap
from pipeline.engine.builder import build_engine
from pipeline.engine.device import describe_device
from pipeline.engine.dispatch import FastestRunner
from pipeline.engine.fastest import Fastest, decide
from pipeline.engine.inspect import count_layers
from pipeline.engine.records import BuildOptions, EngineRecord
from pipeline.engine.runner import Runner
from scripts.gpu_calibrator import calibration_cache
from scripts.gpu_common import RIVALS, batch_profiles, card, differing, model_images, unpack
from scripts.gpu_table import table

__all__ = ["CONTROL", "FASTEST", "FIRST", "VARIANTS", "Bench"]

FIRST = ("int8", "fp16", "implicit")
VARIANTS = (*FIRST, *RIVALS, "int8-half-in", "fp32")
FASTEST = "fastest"  # no engine of its own: int8 and fp16 behind the runner that picks by shape
CONTROL = "int8-again"
"""int8's plan, loaded once more: as far as the two differ, so far differences between engines mean nothing."""


class Bench:
    """One run; ``results`` is written after every step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.monotonic()
        unpack(args.at)
        self.spec = json.loads((args.at / "spec.json").read_text())
        self.models = [name for name in self.spec["models"] if not args.models or name in args.models]
        path = args.at / "results.json"
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        device = describe_device()
        self.results.update(device=device.model_dump() if device else None, command=" ".join(sys.argv[1:]))

    def left(self) -> float:
        return float(self.args.budget_s - (time.monotonic() - self.start))

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def save(self) -> None:
        text = json.dumps(self.results, indent=1)
        for folder in (self.args.at, self.args.out):
            (folder / "results.json").write_text(text)

    def put(self, *keys: str, value: Any) -> None:
        place = self.results
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self.save()

    def profiles(self, model: str) -> list[Profile]:
        return batch_profiles(self.args.at / model / "fp32.onnx", self.args.profiles.split(","))

    def options(self, model: str, variant: str) -> BuildOptions:
        return BuildOptions(
            fp16=variant != "fp32",
            half_inputs=variant == "int8-half-in",
            calibration_cache=calibration_cache(self.args.at, model) if variant == "implicit" else None,
            optimization_level=self.args.level,
            avg_timing_iterations=self.args.timing_iterations,
            timing_cache_folder=self.args.at / model / "timing",
        )

    def build(self, model: str, variant: str, *, again: bool = False) -> None:
        """Build unless it is there; ``again`` measures the build with the timing cache and drops the plan."""
        folder = self.args.at / "engines" / model / variant
        if not again and (folder / "build.json").exists():
            return
        graph = "int8" if variant.startswith("int8") else variant if variant in RIVALS else "fp32"
        source = self.args.at / model / f"{graph}.onnx"
        if not source.exists():
            return
        plan = folder / ("again.plan" if again else "model.plan")
        try:
            with card(alone=False):
                record = build_engine(
                    source,
                    target="tensorrt",
                    profiles=self.profiles(model),
                    plan_path=plan,
                    options=self.options(model, variant),
                    timeout_s=max(self.left() - (0 if again else self.args.reserve_s), 1),
                )
        except QuantizeError as error:
            self.put("failures", f"{model}/{variant}", value=str(error)[:2000])
            self.note(f"{model} {variant}: {str(error)[:300]}")
            return
        self.results.get("failures", {}).pop(f"{model}/{variant}", None)
        key = "second_build" if again else "build"
        entry = record.manifest_entry()
        self.put(
            "builds",
            model,
            variant,
            key,
            value={
                k: entry[k]
                for k in (
                    "build_seconds",
                    "plan_bytes",
                    "peak_memory_bytes",
                    "peak_gpu_memory_bytes",
                    "timing_cache",
                    "layers",
                )
            },
        )
        self.note(f"{model} {variant}: {key} {record.build_seconds:.1f} s, timing cache {record.timing_cache}")
        if again:
            plan.unlink()
        else:
            (folder / "build.json").write_text(record.model_dump_json())

    def runner(self, model: str, variant: str, **options: Any) -> Runner | None:
        folder = self.args.at / "engines" / model / variant
        if not (folder / "build.json").exists():
            return None
        record = EngineRecord.model_validate_json((folder / "build.json").read_bytes())
        return Runner(folder / "model.plan", record=record, **options)

    def images(self, model: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        with np.load(self.args.at / "images.npz", allow_pickle=False) as stored:
            named = {name: stored[name] for name in stored.files}
        return model_images(named["images"], self.spec["models"][model]), named

    def compute(self, candidates: list[Candidate], shapes: dict[str, Any], images: np.ndarray) -> list[Measurement]:
        samples = dict.fromkeys(shapes, images)
        return measure_compute(candidates, shapes, rounds=self.args.rounds, places=PLACES, samples=samples)

    def measure(self, model: str) -> None:
        """All variants that are built, with and without graph, interleaved, batch by batch."""
        images, _ = self.images(model)
        runners = {}
        try:
            for variant in (*VARIANTS, CONTROL):
                for graph in (False, True):
                    runner = self.runner(
                        model, "int8" if variant == CONTROL else variant, cuda_graphs=graph, in_flight=PLACES
                    )
                    if runner is not None:
                        runners[variant, graph] = runner
            candidates = [Candidate(variant, runner, graph) for (variant, graph), runner in runners.items()]
            if not candidates:
                self.note(f"{model}: no engine to measure")
                return
            for batch in self.args.batches:
                known = self.results.get("measured", {}).get(model, {}).get(f"{batch}", [])
                if self.left() < 10 or {m["name"] for m in known} >= {c.name for c in candidates}:
                    continue
                shapes = {candidates[0].runner.inputs[0].name: (batch, *images.shape[1:])}
                found = self.compute(candidates, shapes, images[:batch])
                self.put("measured", model, f"{batch}", value=[m.model_dump(mode="json") for m in found])
                best = max(found, key=lambda m: m.throughput)
                self.note(
                    f"{model} batch {batch}: best {best.name} graph={best.cuda_graph} {best.throughput:,.0f} images/s"
                )
                ours = next((m for m in found if m.name == "int8" and m.cuda_graph), None)
                if ours is not None and ours is not best:
                    self.note(f"  int8 with graph is {compare(ours, best)}: {ours.throughput:,.0f} images/s")
        finally:
            for runner in runners.values():
                runner.close()

    def choices(self, model: str) -> Fastest:
        """For each profile the plan that was faster with CUDA graph at its optimum; once measured, it stays."""
        profiles, pairs = self.profiles(model), {}
        for number, profile in enumerate(profiles):
            batch = next(iter(profile.inputs.values())).opt[0]
            found = self.results.get("measured", {}).get(model, {}).get(f"{batch}", [])
            by_name = {m["name"]: Measurement.model_validate(m) for m in found if m["cuda_graph"]}
            if "int8" in by_name and "fp16" in by_name:
                pairs[number] = (by_name["int8"], by_name["fp16"])
        made = decide(profiles, pairs)
        known = self.results.get("fastest", {}).get(model, {}).get("choices")
        if known is not None:
            before = Fastest.model_validate(known).choices
            made = tuple(n if o.verdict == "not measured" else o for o, n in zip(before, made, strict=True))
        fastest = Fastest(choices=made)
        self.put("fastest", model, "choices", value=fastest.model_dump(mode="json"))
        for choice in fastest.choices:
            self.note(f"{model}: {choice}")
        return fastest

    def fastest(self, model: str) -> None:
        """The runner that picks by shape, interleaved with the two plans that it picks from."""
        if FASTEST not in self.args.variants or self.left() < 10:
            return
        images, _ = self.images(model)
        with ExitStack() as stack:
            runners = {}
            for graph in (False, True):
                for variant in ("int8", "fp16"):
                    # Slots for the plan itself and for the runner that picks it.
                    runner = self.runner(model, variant, cuda_graphs=graph, in_flight=2 * PLACES)
                    if runner is None:
                        return
                    runners[variant, graph] = stack.enter_context(runner)
            float_profiles = self.choices(model).float_profiles
            picking = {
                graph: FastestRunner(runners["int8", graph], runners["fp16", graph], float_profiles)
                for graph in (False, True)
            }
            known = self.results["fastest"][model].get("batches", {})
            for batch in self.args.batches:
                shapes = {picking[True].inputs[0].name: (batch, *images.shape[1:])}
                ran = {m["plan"] for m in known.get(f"{batch}", []) if m["name"] == FASTEST}
                if self.left() < 10 or ran == {picking[True].plan_for(shapes)}:
                    continue
                # Where int8 serves, only that picking costs nothing is shown: with graph, where it would be seen.
                graphs = (False, True) if picking[True].plan_for(shapes) == "float" else (True,)
                candidates = [
                    Candidate(variant, runners[variant, g], g) for g in graphs for variant in ("int8", "fp16")
                ]
                candidates += [Candidate(FASTEST, picking[g], g) for g in graphs]
                found = self.compute(candidates, shapes, images[:batch])
                self.put("fastest", model, "batches", f"{batch}", value=[m.model_dump(mode="json") for m in found])
                *others, ours = (m for m in found if m.cuda_graph)
                for other in others:
                    self.note(
                        f"{model} batch {batch}: fastest ({ours.plan}, {ours.throughput:,.0f} images/s) against "
                        f"{other.name} ({other.throughput:,.0f}): {compare(ours, other)}"
                    )

    def accuracy(self, model: str) -> None:
        images, stored = self.images(model)
        labels = stored["labels"]
        for variant in VARIANTS:
            if self.left() < 5 or variant in self.results.get("accuracy", {}).get(model, {}):
                continue
            runner = self.runner(model, variant, in_flight=2)
            if runner is None:
                continue
            with runner:
                name, output = runner.inputs[0].name, runner.outputs[0].name
                size = max(1, runner.profiles[-1].inputs[name].opt[0])
                dtype = runner.inputs[0].dtype
                batches = (images[start : start + size] for start in range(0, len(images), size))
                outputs = runner.map({name: batch.astype(dtype)} for batch in batches)
                found = np.concatenate([values[output].argmax(-1) for values in outputs])
            figures: dict[str, Any] = {"images": len(labels), "top1": float(np.mean(found == labels))}
            graph = "int8" if variant.startswith("int8") else variant if variant in RIVALS else "fp32"
            reference = stored.get(f"{model}/{graph}")
            if reference is not None:
                figures["top1_onnxruntime"] = float(np.mean(reference == labels))
                figures["agreement"] = float(np.mean(reference == found))
                figures["differ"] = differing(reference, found)
            self.put("accuracy", model, variant, value=figures)
            self.note(f"{model} {variant}: {figures}")

    def overlap(self, model: str) -> None:
        for variant in ("int8", "int8-half-in", "fp16"):
            if self.left() < 8 or variant in self.results.get("overlap", {}).get(model, {}):
                continue
            runner = self.runner(model, variant, cuda_graphs=True, in_flight=self.args.in_flight)
            if runner is None:
                continue
            with runner:
                name = runner.inputs[0].name
                rest = runner.profiles[-1].inputs[name].opt[1:]
                found = measure_overlap(
                    Candidate(variant, runner, True), {name: (64, *rest)}, in_flight=self.args.in_flight
                )
            self.put("overlap", model, variant, value={**found.model_dump(mode="json"), "share": found.share})
            self.note(f"{model} {variant}: overlap {found.share:.1%} of compute alone, {found}")

    def layers(self, model: str) -> None:
        """The time of each layer at batch 1 and 64, and what the inspector says of them at these shapes."""
        images, _ = self.images(model)
        for variant in VARIANTS:
            if self.left() < 5 or variant in self.results.get("layer_counts", {}).get(model, {}):
                continue
            runner = self.runner(model, variant)
            if runner is None:
                continue
            folder = self.args.at / "engines" / model / variant
            with runner:
                name = runner.inputs[0].name
                for batch in (1, 64):
                    feeds = {name: np.resize(images, (batch, *images.shape[1:])).astype(runner.inputs[0].dtype)}
                    times = runner.layer_times(feeds, runs=20)
                    (folder / f"layer-times-{batch}.json").write_text(json.dumps(times, indent=1))
                    text = runner.layer_information({name: feeds[name].shape})
                    (folder / f"layers-{batch}.json").write_text(text)
                self.put("layer_counts", model, variant, value=count_layers(text).model_dump(mode="json"))

    def details(self) -> None:
        """Everything worth looking at later, in one file."""
        with tarfile.open(self.args.out / "details.tar.gz", "w:gz") as tar:
            for path in sorted([*self.args.at.rglob("*.json"), *self.args.at.rglob("*.cache")]):
                tar.add(path, arcname=path.relative_to(self.args.at))

    def run(self) -> None:
        built = [variant for variant in self.args.variants if variant != FASTEST]
        groups = [[variant for variant in built if (variant in self.args.first) == first] for first in (True, False)]
        for variants in groups:
            for model in self.models:
                for variant in variants:
                    if self.left() > self.args.reserve_s:
                        self.build(model, variant)
                        self.details()
            with card(alone=True):  # for all of it: between two batches another run would begin a build
                for step in (self.measure, self.fastest, self.accuracy, self.overlap, self.layers):
                    for model in self.models:
                        self.attempt(step, model)
        for model in self.models:
            done = "second_build" in self.results.get("builds", {}).get(model, {}).get("int8", {})
            if not done and self.left() > 20:
                self.build(model, "int8", again=True)
        self.save()
        self.details()
        text = table(self.results)
        (self.args.out / "table.md").write_text(text)
        print(text)

    def attempt(self, step: Callable[[str], None], model: str) -> None:
        """One step may fail without ending the others."""
        try:
            step(model)
        except QuantizeError as error:
            self.put("failures", f"{model}/{step.__name__}", value=str(error)[:2000])
            self.note(f"{model} {step.__name__}: {error}")
        else:
            self.results.get("failures", {}).pop(f"{model}/{step.__name__}", None)
