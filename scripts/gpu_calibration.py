"""Calibration on a GPU: its time beside a plain pass, its bits beside the CPU's, its bandwidth beside a copy's.

    python scripts/gpu_calibration.py prepare PACK         here: needs torch, the demo packages and photographs
    python scripts/gpu_calibration.py run PACK OUT         there: onnxruntime-gpu, PyCUDA, onnx, numba and nvcc

`prepare` writes the prepared float models (ResNet-50 without its random weights, which `run` draws again), the tensors
of their placement plans and 64 photographs, 30 MB in all. `run` writes OUT/results.json and prints tables:

- pass: batches of 64 and of 8 images that lie on the device already, queued one after the other on one stream; the
  plain float model with its output bound, and the same model with every tensor captured and its statistics taken. They
  take turns, the ratio is the median over the rounds. FP32, and once more with TF32.
- bits: the statistics of three batches against the CPU's, made from copies of the very same activations.
- kernel: the two kernels alone over all activations of a batch, bytes read over time, beside a device-to-device copy of
  as many bytes (read and written); and other layouts of the sweep.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

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


def seconds(queue: Callable[[int], None], stream: Any, repeats: int) -> float:
    """Wall time of one of ``repeats`` queued batches, until the device is done."""
    stream.synchronize()
    start = time.perf_counter()
    for index in range(repeats):
        queue(index)
    stream.synchronize()
    return (time.perf_counter() - start) / repeats


def passes(model: Path, tensors: list[str], images: np.ndarray, rounds: int, *, tf32: bool) -> dict[str, Any]:
    from pipeline.activations_cuda import CudaActivationPass

    feeds = {"x": images}
    batch = len(images)
    repeats = max(8, 512 // batch)
    with CudaActivationPass(model, [], tf32=tf32) as plain, CudaActivationPass(model, tensors, tf32=tf32) as own:
        bindings = {id(each): each.bind(feeds) for each in (plain, own)}
        count = iter(range(10**9))

        def run_plain(_: int) -> None:
            plain.forward(bindings[id(plain)], 0)

        def run_captured(_: int) -> None:
            own.forward(bindings[id(own)], 0)

        def run_own(_: int) -> None:
            own.forward(bindings[id(own)], 0)
            own.statistics.update(bindings[id(own)].arrays, next(count))

        modes = {
            "plain": (run_plain, plain.statistics.stream),
            "captured": (run_captured, own.statistics.stream),
            "statistics": (run_own, own.statistics.stream),
        }
        for queue, stream in modes.values():
            seconds(queue, stream, repeats)
        found: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(rounds):
            for mode, (queue, stream) in modes.items():
                found[mode].append(seconds(queue, stream, repeats))
        elements = sum(array.elements for array in bindings[id(own)].arrays)
    ratios = {mode: float(np.median(np.array(found[mode]) / np.array(found["plain"]))) for mode in modes}
    return {
        "model": model.stem,
        "batch": batch,
        "tf32": tf32,
        "tensors": len(tensors),
        "elements": elements,
        "ms": {mode: 1e3 * float(np.median(each)) for mode, each in found.items()},
        "ratio": ratios,
        "rounds": rounds,
    }


def bits(model: Path, tensors: list[str], images: np.ndarray, batch: int) -> dict[str, Any]:
    """Statistics of three batches on the device and on the CPU, of the same activations."""
    import pycuda.driver as cuda

    from calibrators import TensorStatistics
    from pipeline.activations_cuda import CudaActivationPass

    expected = {name: TensorStatistics() for name in tensors}
    with CudaActivationPass(model, tensors) as own:
        for index in range(3):
            feeds = {"x": images[index * batch : (index + 1) * batch] * np.float32(1.0 + 0.3 * index)}
            binding = own.bind(feeds)
            own.upload(feeds, binding)
            own.forward(binding, index)
            own.statistics.update(binding.arrays, index)
            own.statistics.stream.synchronize()
            for name, array in zip(tensors, binding.arrays, strict=True):
                values = np.empty(array.elements, array.dtype)
                cuda.memcpy_dtoh(values, array.pointer)
                expected[name].update(values, index)
        found = own.collect()
    different = [name for name in tensors if found[name] != expected[name]]
    return {"model": model.stem, "batch": batch, "tensors": len(tensors), "different": different}


def kernel(model: Path, tensors: list[str], images: np.ndarray, rounds: int) -> dict[str, Any]:
    """The kernels alone, over the activations of one batch where they lie."""
    import pycuda.driver as cuda

    from pipeline.activations_cuda import CudaActivationPass
    from plugins.statistics import GpuStatistics, Tuning

    with CudaActivationPass(model, tensors) as own:
        binding = own.bind({"x": images})
        arrays = binding.arrays
        size = sum(array.elements * np.dtype(array.dtype).itemsize for array in arrays)
        rows = []
        for tuning in (
            Tuning(),
            Tuning(lanes=1),
            Tuning(lanes=4, blocks_per_sm=1),
            Tuning(lanes=1, blocks_per_sm=3, per_thread=8),
            Tuning(threads=256, blocks_per_sm=3),
            Tuning(threads=256, lanes=1, blocks_per_sm=4),
            Tuning(threads=1024, per_thread=8, blocks_per_sm=1),
            Tuning(threads=1024, per_thread=16, blocks_per_sm=1),
        ):
            with GpuStatistics(tensors, tuning=tuning) as statistics:
                count = iter(range(10**9))

                def queue(_: int, statistics: GpuStatistics = statistics, count: Any = count) -> None:
                    statistics.update(arrays, next(count))

                rows.append({"tuning": vars(tuning), "ms": 1e3 * device_seconds(queue, statistics.stream, rounds)})
        source, target = cuda.mem_alloc(size), cuda.mem_alloc(size)
        stream = own.statistics.stream
        copy = device_seconds(lambda _: cuda.memcpy_dtod_async(target, source, size, stream), stream, rounds)
        source.free()
        target.free()
    best = min(rows, key=lambda row: row["ms"])
    return {
        "model": model.stem,
        "batch": len(images),
        "bytes": size,
        "rows": rows,
        "default_gb_s": size / rows[0]["ms"] / 1e6,
        "best_gb_s": size / best["ms"] / 1e6,
        "copy_gb_s": 2.0 * size / copy / 1e9,
    }


def device_seconds(queue: Callable[[int], None], stream: Any, rounds: int) -> float:
    """Time on the device of one call, by events around 20 of them: the least of ``rounds``."""
    import pycuda.driver as cuda

    times = []
    for _ in range(rounds + 1):
        start, stop = cuda.Event(), cuda.Event()
        start.record(stream)
        for index in range(20):
            queue(index)
        stop.record(stream)
        stop.synchronize()
        times.append(stop.time_since(start) * 1e-3 / 20)
    return min(times[1:])


def run(pack: Path, out: Path, rounds: int) -> None:
    import torch  # loads the CUDA libraries that onnxruntime needs  # noqa: F401

    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"passes": [], "bits": [], "kernel": []}

    def save() -> None:
        (out / "results.json").write_text(json.dumps(results, indent=2, default=str) + "\n")

    for name in MODELS:
        model, tensors = unpack(pack, name, out)
        images = photographs_of(pack, IMAGES)
        for batch in (16, 5):
            found = bits(model, tensors, images, batch)
            results["bits"].append(found)
            wrong = found["different"]
            verdict = "the same bits as on the CPU" if not wrong else f"{len(wrong)} DIFFER, such as {wrong[0]!r}"
            print(f"{name}, batch {batch}: {found['tensors']} tensors, {verdict}", flush=True)
            save()
        for tf32 in (False, True):
            for batch in BATCHES:
                found = passes(model, tensors, images[:batch], rounds, tf32=tf32)
                results["passes"].append(found)
                ms, ratio = found["ms"], found["ratio"]
                print(
                    f"{name}, batch {batch}{', TF32' if tf32 else ''}: plain {ms['plain']:.3f} ms, captured "
                    f"{ms['captured']:.3f} ms ({ratio['captured']:.3f}), with statistics {ms['statistics']:.3f} ms "
                    f"({ratio['statistics']:.3f})",
                    flush=True,
                )
                save()
        for batch in BATCHES:
            found = kernel(model, tensors, images[:batch], rounds)
            results["kernel"].append(found)
            print(
                f"{name}, batch {batch}: {found['bytes'] / 1e6:.0f} MB at {found['default_gb_s']:.0f} GB/s read; copy "
                f"{found['copy_gb_s']:.0f} GB/s read and written",
                flush=True,
            )
            for row in found["rows"]:
                print(f"    {row['ms']:.4f} ms  {row['tuning']}", flush=True)
            save()
        model.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("prepare")
    here.add_argument("pack", type=Path)
    there = commands.add_parser("run")
    there.add_argument("pack", type=Path)
    there.add_argument("out", type=Path)
    there.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.pack)
    else:
        run(options.pack, options.out, options.rounds)


if __name__ == "__main__":
    main()
