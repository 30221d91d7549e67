"""TEMPORARY: variants of the CUDA statistics timed against each other, for `gpu_calibration.py run --variant`."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plugins.layout import TUNING, Tuning, compiler_options
from plugins.statistics import GpuStatistics, source_of
from scripts.gpu_calibration import (
    BATCHES,
    IMAGES,
    MODELS,
    REPEATED_IMAGES,
    Clock,
    Model,
    device_seconds,
    expected_of,
    photographs_of,
    unpack,
)

CALLS = 6
"""Batches in a row of one variant, which is one turn."""
TURNS = 8
MAIN = (MODELS[1], BATCHES[0])


def parse(text: str) -> tuple[str, Tuning]:
    """NAME=ITEM,ITEM..: items are -DFLAG=VALUE and fields of the layout, such as pieces=2."""
    name, _, rest = text.partition("=")
    items = [item for item in rest.split(",") if item]
    fields: dict[str, Any] = {key: int(value) for key, value in (i.split("=") for i in items if not i.startswith("-D"))}
    return name, replace(TUNING, defines=tuple(item for item in items if item.startswith("-D")), **fields)


def compile_all(tunings: list[Tuning]) -> None:
    """Into PyCUDA's cache, side by side."""
    import pycuda.driver as cuda
    from pycuda.compiler import compile

    cuda.init()
    arch = "sm_{}{}".format(*cuda.Device(0).compute_capability())
    with ThreadPoolExecutor(12) as pool:
        jobs = [
            pool.submit(
                compile, source_of(tuning), options=compiler_options(tuning), no_extern_c=True, arch=arch
            )
            for tuning in tunings
        ]
        for job in jobs:
            job.result()


def nothing(*_: Any, **__: Any) -> None:
    """In place of a kernel."""


def kernels(model: Model, batch: int, variants: dict[str, Tuning], clock: Clock) -> dict[str, Any]:
    """All variants over the same activations, in turn: both kernels, each alone, and the bits."""
    import pycuda.driver as cuda

    arrays, stream = model.own.bind(model.feeds(batch)).arrays, model.own.stream
    stream.synchronize()
    size = sum(array.elements * np.dtype(array.dtype).itemsize for array in arrays)
    source, target = cuda.mem_alloc(size), cuda.mem_alloc(size)
    copy = device_seconds(lambda _: cuda.memcpy_dtod_async(target, source, size, stream), stream)
    source.free()
    target.free()
    expected = expected_of(arrays)
    clock.say(f"{model.name}, batch {batch}: {size / 1e6:.0f} MB, copy {2 * size / copy / 1e12:.2f} TB/s, CPU done")
    opened: dict[str, GpuStatistics] = {}
    result: dict[str, Any] = {}
    index = itertools.count(1)
    for name, tuning in variants.items():
        opened[name] = statistics = GpuStatistics(model.tensors, stream=stream, tuning=tuning)
        statistics.update(arrays, 0)
        found = statistics.collect()
        wrong = [tensor for tensor, each in zip(model.tensors, expected, strict=True) if found[tensor] != each]
        result[name] = {"different": wrong, "both": [], "sweep": [], "finish": []}
        if wrong:
            clock.say(f"    {name}: {len(wrong)} tensors DIFFER, such as {wrong[0]!r}")
    for _ in range(TURNS + 1):
        for name, statistics in opened.items():
            for part in ("both", "sweep", "finish"):
                hidden = {"sweep": "_finish", "finish": "_sweep"}.get(part)
                kept = getattr(statistics, hidden) if hidden else None
                if hidden:
                    setattr(statistics, hidden, nothing)
                statistics._fetch()
                start, stop = cuda.Event(), cuda.Event()
                start.record(stream)
                for _ in range(CALLS):
                    statistics.update(arrays, next(index))
                stop.record(stream)
                stop.synchronize()
                if hidden:
                    setattr(statistics, hidden, kept)
                result[name][part].append(stop.time_since(start) / CALLS)
    for name, statistics in opened.items():
        statistics.close()
        for part in ("both", "sweep", "finish"):
            times = result[name].pop(part)[1:]
            result[name][f"{part}_ms"] = [round(float(np.min(times)), 5), round(float(np.median(times)), 5)]
        low, middle = result[name]["both_ms"]
        clock.say(
            f"    {name:12s} {low:.4f} (median {middle:.4f}) ms, {size / low / 1e9:.2f} TB/s; sweep "
            f"{result[name]['sweep_ms'][0]:.4f}, finish {result[name]['finish_ms'][0]:.4f}"
            + ("; DIFFERENT BITS" if result[name]["different"] else "")
        )
    return {"model": model.name, "batch": batch, "bytes": size, "copy_tb_s": 2 * size / copy / 1e12, "variants": result}


def passes(model: Model, batch: int, variants: dict[str, Tuning], clock: Clock, rounds: int) -> dict[str, Any]:
    """Whole passes in turn, starting with another mode every round: plain, captured, and with each variant."""
    repeats = max(1, REPEATED_IMAGES // batch)
    plain, own = model.plain, model.own
    plain_binding, binding = plain.bind(model.feeds(batch)), own.bind(model.feeds(batch))
    index = itertools.count()
    opened = {
        name: GpuStatistics(model.tensors, stream=own.stream, tuning=tuning) for name, tuning in variants.items()
    }

    def taking(statistics: GpuStatistics) -> Callable[[], None]:
        def step() -> None:
            own.forward(binding, 0)
            statistics.update(binding.arrays, next(index))

        return step

    modes: dict[str, tuple[Callable[[], None], Any]] = {
        "plain": (lambda: plain.forward(plain_binding, 0), plain.stream),
        "captured": (lambda: own.forward(binding, 0), own.stream),
    }
    modes.update({name: (taking(statistics), own.stream) for name, statistics in opened.items()})

    def timed(step: Callable[[], None], stream: Any) -> float:
        for statistics in opened.values():
            statistics._fetch()
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        stream.synchronize()
        return 1e3 * (time.perf_counter() - start) / repeats

    found: dict[str, list[float]] = {mode: [] for mode in modes}
    order = list(modes)
    for step, stream in modes.values():
        timed(step, stream)
    for done in range(rounds):
        if done >= 3 and clock.left() < 0:
            break
        for mode in order[done % len(order) :] + order[: done % len(order)]:
            found[mode].append(round(timed(*modes[mode]), 4))
    for statistics in opened.values():
        statistics.close()
    by_round = {mode: np.array(each) / np.array(found["plain"]) for mode, each in found.items()}
    ratios = {mode: float(np.median(each)) for mode, each in by_round.items()}
    clock.say(f"{model.name}, batch {batch}: {len(found['plain'])} rounds")
    for mode in modes:
        quarter, three = np.percentile(by_round[mode], [25, 75])
        clock.say(
            f"    {np.median(found[mode]):8.3f} ms  {ratios[mode]:.4f} ({quarter:.4f} to {three:.4f})  {mode}"
        )
    return {"model": model.name, "batch": batch, "ratio": ratios, "all": found}


def run(pack: Path, out: Path, texts: list[str], rounds: int, budget_s: float) -> bool:
    """The first variant is the present state; it and the two best go into whole passes. Whether all bits are right."""
    clock = Clock(budget_s)
    import torch  # loads the CUDA libraries that onnxruntime needs  # noqa: F401

    out.mkdir(parents=True, exist_ok=True)
    variants = dict(parse(text) for text in texts)
    compile_all([TUNING, *variants.values()])
    clock.say(f"{len(variants)} variants compiled")
    results: dict[str, Any] = {"variants": dict(zip(variants, texts, strict=True)), "kernel": [], "passes": []}

    def keep(kind: str, found: dict[str, Any]) -> None:
        results[kind].append(found)
        (out / "variants.json").write_text(json.dumps(results) + "\n")

    images = photographs_of(pack, IMAGES)
    opened = {}
    for name in reversed(MODELS):
        path, tensors = unpack(pack, name, out)
        opened[name] = Model(path, tensors, images)
        clock.say(f"{name}: opened")
        for batch in BATCHES:
            keep("kernel", kernels(opened[name], batch, variants, clock))
    first, *others = variants
    right = [
        name
        for name in others
        if not any(found["variants"][name]["different"] for found in results["kernel"])
    ]
    main = next(found for found in results["kernel"] if (found["model"], found["batch"]) == MAIN)
    best = sorted(right, key=lambda name: float(main["variants"][name]["both_ms"][0]))[:2]
    chosen = {name: variants[name] for name in (first, *best)}
    for name in reversed(MODELS):
        for batch in BATCHES:
            if clock.left() > 0:
                turns = rounds if (name, batch) == MAIN else min(rounds, 9)
                keep("passes", passes(opened[name], batch, chosen, clock, turns))
    for name, model in opened.items():
        model.close()
        (out / f"{name}.onnx").unlink()
    clock.say("done")
    print(f"\n{'kernels, ms':12s}" + "".join(f"{f['model'][:8]:>10s}{f['batch']:3d}" for f in results["kernel"]))
    for name in variants:
        row = [f"{found['variants'][name]['both_ms'][0]:13.4f}" for found in results["kernel"]]
        print(f"{name:12s}" + "".join(row) + ("" if name in (first, *right) else "  DIFFERENT BITS"))
    return not any(each["different"] for found in results["kernel"] for each in found["variants"].values())
