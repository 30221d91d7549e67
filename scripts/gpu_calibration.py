"""Calibration on a GPU: its time beside a plain pass, its bits beside the CPU's, its bandwidth beside a copy's.

    python scripts/gpu_calibration.py prepare PACK         here: needs torch, the demo packages and photographs
    python scripts/gpu_calibration.py run PACK OUT         there: onnxruntime-gpu, PyCUDA, onnx, numba and nvcc

`prepare` writes the prepared float models (ResNet-50 without its random weights, which `run` draws again), the tensors
of their placement plans and 64 photographs, 30 MB in all. `run` writes OUT/results.json and prints tables:

- synthetic: one large array of each kind, by layout: what zeros, equal and spread values cost.
- kernel: the two kernels alone over all activations of a batch, by layout of the sweep: time, bytes read over it beside
  a device-to-device copy of as many bytes (read and written), and their bits against the CPU's.
- passes: batches of 64 and of 8 images that lie on the device already, queued one after the other; the plain float
  model with its output bound, the same model with every tensor captured, and with the statistics taken, by the fastest
  layouts, on the model's stream or overlapped with the next batch. They take turns, the ratio is the median of rounds.
- bits: the statistics of seven batches against the CPU's, of copies of the very same activations, and overlapped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plugins.statistics import Tuning  # noqa: E402

MODELS = ("efficientnet-lite0", "resnet50")
SHAPE = (3, 224, 224)
IMAGES = 64
BATCHES = (64, 8)
KEPT_WEIGHT_BYTES = 4096  # larger random weights are drawn again

# Here


def prepare(pack: Path) -> None:
    import onnx
    import torch

    from pipeline import prepare as stage
    from pipeline.config import PlacementConfig
    from pipeline.placement import make_plan
    from scripts.bench_calibration import photographs
    from tests.zoo import convnets, trained
    from tests.zoo.export import export_onnx

    pack.mkdir(parents=True, exist_ok=True)
    photographs(pack / "images.f32", IMAGES)
    images = np.fromfile(pack / "images.f32", np.float32).reshape(IMAGES, *SHAPE)
    (pack / "images.f32").unlink()
    np.save(pack / "images.npy", np.rint(images * 128.0 + 127.0).astype(np.uint8))
    torch.manual_seed(0)
    for name in MODELS:
        module = trained.efficientnet_lite0() if name == "efficientnet-lite0" else convnets.resnet50(classes=1000)
        exported = export_onnx(
            module,
            {"x": torch.zeros(2, *SHAPE)},
            pack / f"{name}.exported.onnx",
            dynamic_axes={"x": {0: "batch"}, "output": {0: "batch"}},
        )
        result = stage.run(exported, folder=pack / f"{name}.work", sample_feeds=[{"x": images[:2]}])
        plan = make_plan(result.model_path, PlacementConfig())
        model = onnx.load(result.model_path)
        if name == "resnet50":
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) > KEPT_WEIGHT_BYTES:
                    values = np.frombuffer(tensor.raw_data, np.float32)
                    tensor.doc_string = json.dumps({"std": float(values.std())})
                    tensor.raw_data = b""
        onnx.save(model, pack / f"{name}.onnx")
        (pack / f"{name}.json").write_text(json.dumps({"tensors": list(plan.tensors)}))
        exported.unlink()
        for file in sorted((pack / f"{name}.work").iterdir()):
            file.unlink()
        (pack / f"{name}.work").rmdir()
        print(f"{name}: {len(plan.tensors)} tensors, {(pack / f'{name}.onnx').stat().st_size / 1e6:.1f} MB")


# There


def unpack(pack: Path, name: str, folder: Path) -> tuple[Path, list[str]]:
    """The model with all its weights, and the tensors to calibrate."""
    import onnx

    model = onnx.load(pack / f"{name}.onnx")
    random = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if not tensor.raw_data and tensor.doc_string:
            std = json.loads(tensor.doc_string)["std"]
            tensor.raw_data = (std * random.standard_normal(tuple(tensor.dims))).astype(np.float32).tobytes()
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path, json.loads((pack / f"{name}.json").read_text())["tensors"]


def photographs_of(pack: Path, count: int) -> np.ndarray:
    return ((np.load(pack / "images.npy")[:count].astype(np.float32) - 127.0) / 128.0).astype(np.float32)


class Clock:
    """What is left of the time that the run may take."""

    def __init__(self, budget_s: float) -> None:
        self.start, self.budget_s = time.monotonic(), budget_s

    @property
    def passed(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        return self.budget_s - self.passed

    def say(self, text: str) -> None:
        print(f"[{self.passed:5.1f} s] {text}", flush=True)


def variants() -> list[Tuning]:
    """Layouts of the sweep, the likeliest first."""
    return [
        Tuning(),
        Tuning(zeros=2),
        Tuning(zeros=1),
        Tuning(zeros=3),
        Tuning(threads=256, blocks_per_sm=4),
        Tuning(threads=1024, blocks_per_sm=1),
        Tuning(lanes=2),
        Tuning(pieces=2),
        Tuning(pieces=8),
        Tuning(threads=512, per_thread=8, blocks_per_sm=3),
        Tuning(threads=512, per_thread=16, blocks_per_sm=3),
        Tuning(threads=1024, per_thread=8, blocks_per_sm=2),
        Tuning(threads=256, per_thread=16, blocks_per_sm=6),
        Tuning(threads=1024, blocks_per_sm=1, pieces=1),
        Tuning(threads=1024, blocks_per_sm=1, pieces=2),
        Tuning(threads=512, blocks_per_sm=1),
        Tuning(threads=256, blocks_per_sm=1),
        Tuning(threads=256, blocks_per_sm=2),
    ]


def compile_all(tunings: Sequence[Tuning]) -> None:
    """Fill PyCUDA's cache, several compilers at a time."""
    import pycuda.driver as cuda
    from pycuda.compiler import compile as nvcc

    from plugins.statistics import SOURCE, compiler_options

    cuda.init()
    arch = "sm_{}{}".format(*cuda.Device(0).compute_capability())
    with ThreadPoolExecutor(len(tunings)) as pool:
        jobs = [
            pool.submit(nvcc, SOURCE.read_text(), options=compiler_options(each), no_extern_c=True, arch=arch)
            for each in tunings
        ]
        for job in jobs:
            job.result()


def label(tuning: Tuning) -> str:
    t = tuning
    return f"{t.threads},{t.per_thread},{t.lanes},{t.blocks_per_sm} pieces {t.pieces} zeros {t.zeros}"


class Model:
    """A model on the device: plain, and with every tensor captured, two sets of buffers for each batch size."""

    def __init__(self, model: Path, tensors: list[str], images: np.ndarray, *, tf32: bool = False) -> None:
        from pipeline.activations_cuda import CudaActivationPass

        self.name, self.tensors, self.images, self.tf32 = model.stem, tensors, images, tf32
        self.plain = CudaActivationPass(model, [], tf32=tf32)
        self.own = CudaActivationPass(model, tensors, tf32=tf32, overlap=True)

    def bindings(self, batch: int) -> list[Any]:
        feeds = {"x": self.images[:batch]}
        return [self.own.bind(feeds), self.own.bind(feeds)]

    def close(self) -> None:
        self.own.close()
        self.plain.close()


def expected_of(arrays: Any) -> list[Any]:
    """The CPU's statistics of copies of ``arrays``, as batch 0."""
    import pycuda.driver as cuda

    from calibrators import TensorStatistics

    def one(array: Any, values: np.ndarray) -> Any:
        statistics = TensorStatistics()
        statistics.update(values, 0)
        return statistics

    jobs = []
    with ThreadPoolExecutor(12) as pool:
        for array in arrays:
            values = np.empty(array.elements, array.dtype)
            cuda.memcpy_dtoh(values, array.pointer)
            jobs.append(pool.submit(one, array, values))
        return [job.result() for job in jobs]


def kernels(model: Model, batch: int, tunings: Sequence[Tuning], clock: Clock) -> dict[str, Any]:
    """The kernels alone, over the activations of one batch where they lie: their time, and whether bits are right."""
    import pycuda.driver as cuda

    from plugins.statistics import GpuStatistics

    binding = model.bindings(batch)[0]
    arrays, stream = binding.arrays, model.own.stream
    stream.synchronize()
    size = sum(array.elements * np.dtype(array.dtype).itemsize for array in arrays)
    expected = expected_of(arrays)
    source, target = cuda.mem_alloc(size), cuda.mem_alloc(size)
    copy = device_seconds(lambda _: cuda.memcpy_dtod_async(target, source, size, stream), stream)
    source.free()
    target.free()
    clock.say(
        f"{model.name}, batch {batch}: {len(arrays)} tensors, {size / 1e6:.0f} MB; copy "
        f"{2 * size / copy / 1e12:.2f} TB/s read and written"
    )
    rows: list[dict[str, Any]] = []
    for tuning in tunings:
        if clock.left() < 0:
            break
        try:
            with GpuStatistics(model.tensors, tuning=tuning, stream=stream) as statistics:
                statistics.update(arrays, 0)
                found = statistics.collect()
                wrong = [n for n, e in zip(model.tensors, expected, strict=True) if found[n] != e]
                ms = 1e3 * device_seconds(lambda k, s=statistics: s.update(arrays, k + 1), stream)
        except Exception as error:  # a layout that does not fit the device
            clock.say(f"    {label(tuning)}: {error}")
            continue
        rows.append({"tuning": vars(tuning), "ms": ms, "different": wrong})
        verdict = "same bits" if not wrong else f"{len(wrong)} tensors DIFFER, such as {wrong[0]!r}"
        clock.say(f"    {ms:.4f} ms  {size / ms / 1e9:.2f} TB/s  {label(tuning)}: {verdict}")
    return {"model": model.name, "batch": batch, "bytes": size, "copy_gb_s": 2.0 * size / copy / 1e9, "rows": rows}


def device_seconds(queue: Callable[[int], Any], stream: Any, rounds: int = 3, calls: int = 10) -> float:
    """Time on the device of one call, by events around some: the least of ``rounds``."""
    import pycuda.driver as cuda

    times = []
    for turn in range(rounds + 1):
        start, stop = cuda.Event(), cuda.Event()
        start.record(stream)
        for index in range(calls):
            queue(turn * calls + index)
        stop.record(stream)
        stop.synchronize()
        times.append(stop.time_since(start) * 1e-3 / calls)
    return min(times[1:])


def synthetic(tunings: Sequence[Tuning], clock: Clock, elements: int = 1 << 26) -> dict[str, Any]:
    """The kernels over one array of each kind: what zeros, equal values and spread values cost."""
    import pycuda.driver as cuda

    from plugins.statistics import DeviceArray, GpuStatistics

    random = np.random.default_rng(0)
    normal = np.tile(random.standard_normal(1 << 22).astype(np.float32), elements >> 22)
    kinds = {
        "normal": normal,
        "half zeros": np.maximum(normal, 0),
        "0 to 6": np.clip(4 * normal, 0, 6),
        "all zero": 0 * normal,
        "all one": 0 * normal + 1,
        "uniform": np.tile(random.random(1 << 22).astype(np.float32), elements >> 22),
    }
    rows: list[dict[str, Any]] = []
    for tuning in tunings:
        with GpuStatistics(["x"], tuning=tuning) as statistics:
            figures = {}
            for kind, values in kinds.items():
                memory = cuda.to_device(values)
                arrays = (DeviceArray(int(memory), values.size),)
                start = 1000 * len(figures)
                seconds = device_seconds(
                    lambda k, s=statistics, a=arrays, start=start: s.update(a, start + k), statistics.stream
                )
                figures[kind] = values.nbytes / seconds / 1e12
                memory.free()
        rows.append({"tuning": vars(tuning), "tb_s": figures})
        clock.say("    " + "  ".join(f"{k} {v:.2f}" for k, v in figures.items()) + f" TB/s  {label(tuning)}")
    return {"elements": elements, "rows": rows}


def passes(
    model: Model, batch: int, choices: Sequence[tuple[Tuning, bool]], clock: Clock, rounds: int
) -> dict[str, Any]:
    """In turn: plain passes, with every tensor captured, and with statistics by layout, serial and overlapped."""
    from plugins.statistics import GpuStatistics

    repeats = max(8, 512 // batch)
    (plain_binding,) = [model.plain.bind({"x": model.images[:batch]})]
    bindings = model.bindings(batch)
    made = []
    default = model.own.statistics

    def timed(step: Callable[[int], None], wait: Callable[[], None]) -> float:
        wait()
        start = time.perf_counter()
        for index in range(repeats):
            step(index)
        wait()
        return 1e3 * (time.perf_counter() - start) / repeats

    def run_plain(_: int) -> None:
        model.plain.forward(plain_binding, 0)

    def run_captured(_: int) -> None:
        model.own.forward(bindings[0], 0)

    modes: dict[str, tuple[Callable[[int], None], Callable[[], None]]] = {
        "plain": (run_plain, model.plain.stream.synchronize),
        "captured": (run_captured, model.own.stream.synchronize),
    }
    for tuning, overlap in choices:
        stream = default.stream if overlap else model.own.stream
        statistics = GpuStatistics(model.tensors, tuning=tuning, stream=stream)
        made.append(statistics)
        count = iter(range(10**9))

        def run_own(
            index: int, statistics: Any = statistics, overlap: bool = overlap, count: Any = count
        ) -> None:
            binding = bindings[index % 2 if overlap else 0]
            model.own.statistics = statistics
            model.own.forward(binding, 0)
            model.own.take(binding, next(count))

        def wait(stream: Any = stream) -> None:
            model.own.stream.synchronize()
            stream.synchronize()

        modes[("overlapped " if overlap else "serial ") + label(tuning)] = (run_own, wait)
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for mode in modes.values():
        timed(*mode)
    for done in range(rounds):
        if done >= 3 and clock.left() < 0:
            break
        for name, mode in modes.items():
            found[name].append(timed(*mode))
    model.own.statistics = default
    for statistics in reversed(made):
        statistics.close()
    for binding in bindings:
        binding.taken = None
    ratios = {mode: float(np.median(np.array(found[mode]) / np.array(found["plain"]))) for mode in modes}
    ms = {mode: float(np.median(each)) for mode, each in found.items()}
    clock.say(f"{model.name}, batch {batch}{', TF32' if model.tf32 else ''}: {len(found['plain'])} rounds")
    for mode in modes:
        clock.say(f"    {ms[mode]:8.3f} ms  {ratios[mode]:.3f}  {mode}")
    return {"model": model.name, "batch": batch, "tf32": model.tf32, "ms": ms, "ratio": ratios, "all": found}


def bits(model_path: Path, tensors: list[str], images: np.ndarray, batch: int, clock: Clock) -> dict[str, Any]:
    """Seven batches of different values, one of them smaller: overlapped, on one stream, and on the CPU."""
    import pycuda.driver as cuda

    from calibrators import TensorStatistics
    from pipeline.activations_cuda import CudaActivationPass

    batches = []
    for index in range(7):
        rows = images[index * batch : (index + 1) * batch] * np.float32(1.0 + 0.3 * (index % 3))
        rows = rows[: batch // 2] if index == 6 else rows
        batches.append(SimpleNamespace(index=index, feeds={"x": rows}))
    expected = {name: TensorStatistics() for name in tensors}
    with CudaActivationPass(model_path, tensors) as own:
        for each in own(batches):
            own.statistics.stream.synchronize()
            binding = own.bind(each.feeds)
            for name, array in zip(tensors, binding.arrays, strict=True):
                values = np.empty(array.elements, array.dtype)
                cuda.memcpy_dtoh(values, array.pointer)
                expected[name].update(values, each.index)
        serial = own.collect()
    with CudaActivationPass(model_path, tensors, overlap=True) as own:
        for turn in range(2):  # without waiting in between; the second time everything is warm
            for _ in own(SimpleNamespace(index=each.index + 7 * turn, feeds=each.feeds) for each in batches):
                pass
        twice = own.collect()
    again = {name: TensorStatistics() for name in tensors}
    for name in tensors:
        shifted = TensorStatistics()
        shifted.absorb(serial[name])
        shifted.batch_index = shifted.batch_index + 7
        again[name] = serial[name].merge(shifted)
    result = {
        "model": model_path.stem,
        "tensors": len(tensors),
        "serial_different": [n for n in tensors if serial[n] != expected[n]],
        "overlapped_different": [n for n in tensors if twice[n] != again[n]],
    }
    for kind in ("serial", "overlapped"):
        wrong = result[f"{kind}_different"]
        verdict = "the same bits as on the CPU" if not wrong else f"{len(wrong)} DIFFER, such as {wrong[0]!r}"
        clock.say(f"{model_path.stem}, 7 batches, {kind}: {len(tensors)} tensors, {verdict}")
    return result


def best(
    found: dict[str, Any], count: int, condition: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[Tuning]:
    right = (row for row in found["rows"] if not row["different"] and condition(row["tuning"]))
    rows = sorted(right, key=lambda row: row["ms"])
    return [Tuning(**row["tuning"]) for row in rows[:count]]


def small(tuning: dict[str, Any]) -> bool:
    """Leaves room on a multiprocessor for blocks of the model."""
    return bool(tuning["threads"] * tuning["blocks_per_sm"] <= 512)


def run(pack: Path, out: Path, rounds: int, budget_s: float) -> None:
    clock = Clock(budget_s)
    import torch  # loads the CUDA libraries that onnxruntime needs  # noqa: F401

    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"passes": [], "bits": [], "kernel": []}

    def keep(kind: str, found: dict[str, Any]) -> dict[str, Any]:
        results[kind].append(found)
        (out / "results.json").write_text(json.dumps(results, indent=2, default=str) + "\n")
        return found

    compile_all(variants())
    clock.say("compiled")
    clock.say("one array of 268 MB:")
    results["synthetic"] = synthetic(variants()[:7], clock)
    images = photographs_of(pack, IMAGES)
    opened: dict[str, Model] = {}
    shortlist = variants()[:1]
    for name in MODELS:
        path, tensors = unpack(pack, name, out)
        opened[name] = model = Model(path, tensors, images)
        clock.say(f"{name}: opened")
        chosen = variants() if name == MODELS[0] else shortlist
        for batch in BATCHES:
            if clock.left() < 0:
                break
            found = keep("kernel", kernels(model, batch, chosen, clock))
            shortlist = best(found, 6) + best(found, 2, small) if batch == BATCHES[0] else shortlist
            choices = [(t, False) for t in best(found, 2)] + [(t, True) for t in best(found, 1) + best(found, 2, small)]
            keep("passes", passes(model, batch, choices, clock, rounds))
        if clock.left() > 0:
            keep("bits", bits(path, tensors, images, 8, clock))
    for name, model in opened.items():
        model.close()
        (out / f"{name}.onnx").unlink()
    clock.say("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("prepare")
    here.add_argument("pack", type=Path)
    there = commands.add_parser("run")
    there.add_argument("pack", type=Path)
    there.add_argument("out", type=Path)
    there.add_argument("--rounds", type=int, default=9)
    there.add_argument("--budget-s", type=float, default=150.0, help="start nothing after so many seconds")
    commands.add_parser("profile", help="the kernels alone, to be run under a profiler")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.pack)
    elif options.command == "profile":
        synthetic([Tuning()], Clock(60.0))
    else:
        run(options.pack, options.out, options.rounds, options.budget_s)


if __name__ == "__main__":
    main()
