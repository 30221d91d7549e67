"""Calibration on a GPU: its time beside a plain pass, its bits beside the CPU's, its bandwidth beside a copy's.

    python scripts/gpu_calibration.py prepare PACK         here: needs torch, the demo packages and photographs
    python scripts/gpu_calibration.py run PACK OUT         there: onnxruntime-gpu, PyCUDA, onnx, numba and nvcc

`prepare` writes the prepared float models (ResNet-50 without its random weights, which `run` draws again), the tensors
of their placement plans and 64 photographs, 30 MB in all. `run` writes OUT/results.json and prints tables:

- kernel: the two kernels alone over all activations of a batch: time, bytes read over it beside a device-to-device copy
  of as many bytes (read and written), and their bits against the CPU's.
- passes: batches of 64 and of 8 images that lie on the device already, queued one after the other; the plain float
  model with its output bound, the same model with every tensor captured, and with the statistics taken as well. They
  take turns, the ratio is the median of rounds.
- bits: the statistics of seven batches, each waited for, and of the same seven queued without waiting, against the
  CPU's of copies of the very same activations.

Its exit status is 1 when bits differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MODELS = ("efficientnet-lite0", "resnet50")
SHAPE = (3, 224, 224)
IMAGES = 64
BATCHES = (64, 8)
KEPT_WEIGHT_BYTES = 4096  # larger random weights are drawn again
REPEATED_IMAGES = 512  # of a pass of one mode
BITS_BATCHES, BITS_BATCH = 7, 8

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


class Model:
    """A model on the device: plain, and with every tensor captured."""

    def __init__(self, model: Path, tensors: list[str], images: np.ndarray) -> None:
        from pipeline.activations_cuda import CudaActivationPass

        self.name, self.tensors, self.images = model.stem, tensors, images
        self.plain = CudaActivationPass(model, [])
        self.own = CudaActivationPass(model, tensors)
        self.taken = itertools.count()
        """Batches whose statistics are taken."""

    def feeds(self, batch: int) -> dict[str, np.ndarray]:
        return {"x": self.images[:batch]}

    def close(self) -> None:
        self.own.close()
        self.plain.close()


def expected_of(arrays: Any) -> list[Any]:
    """The CPU's statistics of copies of ``arrays``, as batch 0."""
    import pycuda.driver as cuda

    from calibrators import TensorStatistics
    from calibrators.accumulate import add_batch

    def one(array: Any, values: np.ndarray) -> Any:
        statistics = TensorStatistics()
        add_batch(statistics, values, 0)
        return statistics

    jobs = []
    with ThreadPoolExecutor(12) as pool:
        for array in arrays:
            values = np.empty(array.elements, array.dtype)
            cuda.memcpy_dtoh(values, array.pointer)
            jobs.append(pool.submit(one, array, values))
        return [job.result() for job in jobs]


def kernel(model: Model, batch: int, clock: Clock) -> dict[str, Any]:
    """The kernels alone, over the activations of one batch where they lie: their time, and whether bits are right."""
    import pycuda.driver as cuda

    from plugins.statistics import GpuStatistics

    arrays, stream = model.own.bind(model.feeds(batch)).arrays, model.own.stream
    stream.synchronize()
    size = sum(array.elements * np.dtype(array.dtype).itemsize for array in arrays)
    source, target = cuda.mem_alloc(size), cuda.mem_alloc(size)
    copy = device_seconds(lambda _: cuda.memcpy_dtod_async(target, source, size, stream), stream)
    source.free()
    target.free()
    with GpuStatistics(model.tensors, stream=stream) as statistics:
        statistics.update(arrays, 0)
        found = statistics.collect()
        seconds = device_seconds(lambda index: statistics.update(arrays, index + 1), stream)
    wrong = [name for name, each in zip(model.tensors, expected_of(arrays), strict=True) if found[name] != each]
    result = {
        "model": model.name,
        "batch": batch,
        "tensors": len(arrays),
        "bytes": size,
        "copy_tb_s": 2 * size / copy / 1e12,
        "ms": 1e3 * seconds,
        "tb_s": size / seconds / 1e12,
        "different": wrong,
    }
    clock.say(
        f"{model.name}, batch {batch}: {len(arrays)} tensors, {size / 1e6:.0f} MB in {result['ms']:.4f} ms, "
        f"{result['tb_s']:.2f} TB/s; copy {result['copy_tb_s']:.2f} TB/s read and written; {verdict(wrong)}"
    )
    return result


def verdict(wrong: list[str]) -> str:
    return f"{len(wrong)} tensors DIFFER, such as {wrong[0]!r}" if wrong else "the same bits as on the CPU"


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


def passes(model: Model, batch: int, clock: Clock, rounds: int) -> dict[str, Any]:
    """In turn: plain passes, with every tensor captured, and with statistics."""
    repeats = REPEATED_IMAGES // batch
    plain, own = model.plain, model.own
    plain_binding, binding = plain.bind(model.feeds(batch)), own.bind(model.feeds(batch))

    def with_statistics() -> None:
        own.forward(binding, 0)
        own.take(binding, next(model.taken))

    modes: dict[str, tuple[Callable[[], None], Any]] = {
        "plain": (lambda: plain.forward(plain_binding, 0), plain.stream),
        "captured": (lambda: own.forward(binding, 0), own.stream),
        "with statistics": (with_statistics, own.stream),
    }

    def timed(step: Callable[[], None], stream: Any) -> float:
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        stream.synchronize()
        return 1e3 * (time.perf_counter() - start) / repeats

    for step, stream in modes.values():
        timed(step, stream)
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for done in range(rounds):
        if done >= 3 and clock.left() < 0:
            break
        for mode, (step, stream) in modes.items():
            found[mode].append(timed(step, stream))
    ratios = {mode: float(np.median(np.array(found[mode]) / np.array(found["plain"]))) for mode in modes}
    ms = {mode: float(np.median(each)) for mode, each in found.items()}
    clock.say(f"{model.name}, batch {batch}: {len(found['plain'])} rounds")
    for mode in modes:
        clock.say(f"    {ms[mode]:8.3f} ms  {ratios[mode]:.3f}  {mode}")
    return {"model": model.name, "batch": batch, "ms": ms, "ratio": ratios, "all": found}


def bits(model: Path, tensors: list[str], images: np.ndarray, clock: Clock) -> dict[str, Any]:
    """Batches of different values, the last one smaller, twice: each waited for, and queued."""
    import pycuda.driver as cuda

    from calibrators import TensorStatistics
    from calibrators.accumulate import add_batch
    from pipeline.activations_cuda import CudaActivationPass

    batches = []
    for index in range(BITS_BATCHES):
        rows = images[index * BITS_BATCH : (index + 1) * BITS_BATCH] * np.float32(1.0 + 0.3 * (index % 3))
        rows = rows[: BITS_BATCH // 2] if index == BITS_BATCHES - 1 else rows
        batches.append(SimpleNamespace(index=index, feeds={"x": rows}))
    expected = {name: TensorStatistics() for name in tensors}
    with CudaActivationPass(model, tensors) as own:
        for batch in own(batches):
            own.stream.synchronize()
            for name, array in zip(tensors, own.bind(batch.feeds).arrays, strict=True):
                values = np.empty(array.elements, array.dtype)
                cuda.memcpy_dtoh(values, array.pointer)
                for index in (batch.index, batch.index + BITS_BATCHES):
                    add_batch(expected[name], values, index)
        for batch in batches:
            batch.index += BITS_BATCHES
        for _ in own(batches):
            pass
        found = own.collect()
    wrong = [name for name in tensors if found[name] != expected[name]]
    clock.say(f"{model.stem}, {2 * BITS_BATCHES} batches: {len(tensors)} tensors, {verdict(wrong)}")
    return {"model": model.stem, "tensors": len(tensors), "different": wrong}


def run(pack: Path, out: Path, rounds: int, budget_s: float) -> bool:
    """Whether all bits are the CPU's."""
    clock = Clock(budget_s)
    import torch  # loads the CUDA libraries that onnxruntime needs  # noqa: F401

    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Any]] = {"kernel": [], "passes": [], "bits": []}

    def keep(kind: str, found: dict[str, Any]) -> None:
        results[kind].append(found)
        (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")

    images = photographs_of(pack, IMAGES)
    opened: dict[str, Model] = {}
    for name in MODELS:
        path, tensors = unpack(pack, name, out)
        opened[name] = model = Model(path, tensors, images)
        clock.say(f"{name}: opened")
        for batch in BATCHES:
            if clock.left() < 0:
                break
            keep("kernel", kernel(model, batch, clock))
            keep("passes", passes(model, batch, clock, rounds))
        if clock.left() > 0:
            keep("bits", bits(path, tensors, images, clock))
    for name, model in opened.items():
        model.close()
        (out / f"{name}.onnx").unlink()
    clock.say("done")
    return not any(found["different"] for found in results["kernel"] + results["bits"])


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
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.pack)
    elif not run(options.pack, options.out, options.rounds, options.budget_s):
        sys.exit(1)


if __name__ == "__main__":
    main()
