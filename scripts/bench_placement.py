#!/usr/bin/env python3
"""Time INT8 placements against each other with TensorRT 8.6 on a GPU machine. Needs numpy, TensorRT and PyCUDA only.

    bench_placement.py unpack FOLDER...                 once per folder that bench_placement_prepare.py made, in any
    order bench_placement.py run [--only NAME,...] [--batches 1,64] [--seconds 540]
    bench_placement.py report                           from what is there

``run`` builds every engine that is not there yet (fp16, implicit INT8 and each Q/DQ graph, per network and batch
size, one
static profile each), stops building when --seconds are nearly over, then times all engines that exist, interleaved:
every round runs each engine once (a burst between two events), with and without a CUDA graph. A later call goes on. It
writes results.json and table.md into the working folder and into $OUT, with the layer lists of the engine inspector.

Top-1 is measured with the largest batch's engine on the images that were not calibrated on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import lzma
import os
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

WORK = Path(os.environ.get("PLACEMENT_BENCH", "/opt/placement"))
ROUNDS = 80
BURST = 8
WARM_UP = 10
WORKSPACE_BYTES = 4 << 30


# --- files


def unpack(folders: list[Path]) -> None:
    """Collect slices; a file whose slices are all there is put together and unpacked."""
    slices = WORK / "slices"
    slices.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for file in sorted(folder.iterdir()):
            shutil.copy(file, slices / file.name)
    waiting: dict[str, list[Path]] = {}
    for file in sorted(slices.iterdir()):
        waiting.setdefault(file.name.rpartition(".")[0], []).append(file)
    for name, parts in waiting.items():
        decompressor, data = lzma.LZMADecompressor(), b""
        if [part.suffix for part in parts] == [f".{number:02d}" for number in range(len(parts))]:
            data = b"".join(decompressor.decompress(part.read_bytes()) for part in parts)
        if decompressor.eof:
            (WORK / name.removesuffix(".xz")).write_bytes(data)
            print(f"{name.removesuffix('.xz')}: {len(data) / 1e6:.1f} MB")
        else:
            print(f"{name}: more slices are to come")


def make_weights(file: Path, made: list[dict[str, Any]]) -> None:
    """The external data that a graph without its weights names: seeded, of the right spread."""
    target = file.with_suffix(".weights")
    if not made or target.exists():
        return
    random = np.random.default_rng(0)
    with target.open("wb") as stream:
        for entry in made:
            values = random.standard_normal(entry["count"], dtype=np.float32) * np.float32(entry["std"])
            if entry["dtype"] == "int8":
                values = np.clip(np.rint(values), -127, 127)
            stream.write(values.astype(entry["dtype"]).tobytes())


def images() -> tuple[np.ndarray, np.ndarray]:
    """float32 (N, 3, 224, 224) as the network takes them, and classes."""
    pixels = np.cumsum(np.load(WORK / "images.npy"), axis=2, dtype=np.uint8)
    data = ((pixels.astype(np.float32) - 127.0) / 128.0).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(data), np.load(WORK / "labels.npy")


# --- TensorRT


def make_calibrator(trt: Any, cuda: Any, data: np.ndarray, cache: Path) -> Any:
    """IInt8EntropyCalibrator2 over ``data`` in batches of 8."""

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.at = 0
            self.memory = cuda.mem_alloc(data[:8].nbytes)

        def get_batch_size(self) -> int:
            return 8

        def get_batch(self, names: list[str]) -> list[int] | None:
            batch = data[self.at : self.at + 8]
            if len(batch) < 8:
                return None
            self.at += 8
            cuda.memcpy_htod(self.memory, np.ascontiguousarray(batch))
            return [int(self.memory)]

        def read_calibration_cache(self) -> bytes | None:
            return cache.read_bytes() if cache.exists() else None

        def write_calibration_cache(self, content: bytes) -> None:
            cache.write_bytes(bytes(content))

    return Calibrator()


class Bench:
    """Everything that needs the card."""

    def __init__(self) -> None:
        import pycuda.autoprimaryctx  # noqa: F401
        import pycuda.driver as cuda
        import tensorrt as trt

        self.trt, self.cuda = trt, cuda
        self.logger = trt.Logger(trt.Logger.ERROR)
        self.runtime = trt.Runtime(self.logger)
        self.stream = cuda.Stream()
        self.library = ctypes.CDLL("libcuda.so.1")

    def build(self, kind: str, file: Path, batch: int, target: Path, calibration: np.ndarray | None) -> float:
        """Seconds to build ``file`` into ``target``; ``kind`` is fp16, implicit or qdq."""
        trt = self.trt
        builder = trt.Builder(self.logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
        parser = trt.OnnxParser(network, self.logger)
        if not parser.parse_from_file(str(file)):
            raise RuntimeError("; ".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
        config = builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.set_flag(trt.BuilderFlag.FP16)
        profile = builder.create_optimization_profile()
        tensor = network.get_input(0)
        shape = (batch, *tuple(tensor.shape)[1:])
        profile.set_shape(tensor.name, shape, shape, shape)
        config.add_optimization_profile(profile)
        if kind != "fp16":
            config.set_flag(trt.BuilderFlag.INT8)
        if kind == "implicit":
            config.int8_calibrator = make_calibrator(trt, self.cuda, calibration, WORK / f"{file.stem}.cache")
            cal = builder.create_optimization_profile()
            shape8 = (8, *shape[1:])
            cal.set_shape(tensor.name, shape8, shape8, shape8)
            config.set_calibration_profile(cal)
        cache_file = WORK / "timing.cache"
        cache = config.create_timing_cache(cache_file.read_bytes() if cache_file.exists() else b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
        start = time.monotonic()
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError("TensorRT gave no engine")
        cache_file.write_bytes(bytes(config.get_timing_cache().serialize()))
        target.write_bytes(bytes(plan))
        return time.monotonic() - start

    def open(self, file: Path, batch: int) -> Engine:
        return Engine(self, file, batch)


class Engine:
    """One engine with its buffers, and a CUDA graph of one inference."""

    def __init__(self, bench: Bench, file: Path, batch: int) -> None:
        self.bench, self.batch = bench, batch
        self.engine = bench.runtime.deserialize_cuda_engine(file.read_bytes())
        self.context = self.engine.create_execution_context()
        cuda, trt = bench.cuda, bench.trt
        self.memory, self.shapes = {}, {}
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        for name in names:
            if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
                self.input = name
                self.context.set_input_shape(name, (batch, *tuple(self.engine.get_tensor_shape(name))[1:]))
            else:
                self.output = name
        for name in names:
            self.shapes[name] = tuple(self.context.get_tensor_shape(name))
            self.memory[name] = cuda.mem_alloc(int(np.prod(self.shapes[name])) * 4)
            self.context.set_tensor_address(name, int(self.memory[name]))
        self.fill(np.random.default_rng(0).standard_normal(self.shapes[self.input], dtype=np.float32))
        self.enqueue()
        bench.stream.synchronize()
        self.graph = self.capture()

    def fill(self, data: np.ndarray) -> None:
        self.bench.cuda.memcpy_htod(self.memory[self.input], np.ascontiguousarray(data, np.float32))

    def result(self) -> np.ndarray:
        out = np.empty(self.shapes[self.output], np.float32)
        self.bench.cuda.memcpy_dtoh(out, self.memory[self.output])
        return out

    def enqueue(self) -> None:
        if not self.context.execute_async_v3(self.bench.stream.handle):
            raise RuntimeError("enqueue failed")

    def capture(self) -> ctypes.c_void_p:
        library, stream = self.bench.library, ctypes.c_void_p(self.bench.stream.handle)
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        _check(library.cuStreamBeginCapture_v2(stream, ctypes.c_int(1)), "begin capture")
        self.enqueue()
        _check(library.cuStreamEndCapture(stream, ctypes.byref(graph)), "end capture")
        status = library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        _check(status, "instantiate")
        return executable

    def launch(self) -> None:
        stream = ctypes.c_void_p(self.bench.stream.handle)
        _check(self.bench.library.cuGraphLaunch(self.graph, stream), "launch")

    def burst_ms(self, graph: bool) -> float:
        """Milliseconds per inference, over a burst of BURST without a gap."""
        cuda, stream = self.bench.cuda, self.bench.stream
        start, end = cuda.Event(), cuda.Event()
        run = self.launch if graph else self.enqueue
        start.record(stream)
        for _ in range(BURST):
            run()
        end.record(stream)
        end.synchronize()
        return float(end.time_since(start)) / BURST

    def layers(self) -> list[dict[str, Any]]:
        trt = self.bench.trt
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = self.context
        text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
        found: list[dict[str, Any]] = json.loads(text)["Layers"]
        return found

    def top1(self, data: np.ndarray, labels: np.ndarray) -> float:
        right = 0
        for start in range(0, len(data), self.batch):
            rows = data[start : start + self.batch]
            padded = np.concatenate([rows, np.zeros((self.batch - len(rows), *rows.shape[1:]), np.float32)])
            self.fill(padded)
            self.enqueue()
            self.bench.stream.synchronize()
            right += int((self.result()[: len(rows)].argmax(1) == labels[start : start + len(rows)]).sum())
        return 100.0 * right / len(data)


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}: {what}")


def summarise(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts that tell a good placement from a bad one, and the names of what is left over."""
    kinds: dict[str, int] = {}
    float_convs, float_out, reformats, scales = [], [], [], []
    for layer in layers:
        kind = layer.get("LayerType", "?")
        kinds[kind] = kinds.get(kind, 0) + 1
        name = layer["Name"]
        formats = [
            [tensor.get("Format/Datatype", "") for tensor in layer.get(key, [])] for key in ("Inputs", "Outputs")
        ]
        if "Convolution" in kind or "Deconvolution" in kind:
            if not any("Int8" in text for text in formats[0][:1]):
                float_convs.append(name)
            elif not any("Int8" in text for text in formats[1][:1]):
                float_out.append(name)
        if kind == "Reformat":
            reformats.append(f"{name}: {formats[0]} -> {formats[1]}")
        if kind == "Scale" or re.search(r"(Quantize|Dequantize)Linear\w*$", name):
            scales.append(name)
    return {
        "layers": len(layers), "kinds": kinds, "float_convolutions": float_convs,
        "int8_convolutions_with_float_output": float_out,
        "reformats": reformats, "scale_layers": scales,
    }  # fmt: skip


# --- commands


def candidates(networks: dict[str, Any], only: set[str] | None, batches: list[int]) -> list[dict[str, Any]]:
    """Every engine to make, the important ones first."""
    order = ["fp16", "implicit", "ours", "modelopt", "onnxruntime"]
    found = []
    for network, entry in networks.items():
        variants = list(entry["variants"])
        jobs = [("fp16", "fp32", "fp16"), ("implicit", "fp32", "implicit")]
        jobs += [(variant, variant, "qdq") for variant in variants if variant != "fp32"]
        for name, variant, kind in jobs:
            for batch in batches:
                key = f"{network}.{name}.b{batch}"
                if only is None or name in only or network in only:
                    rank = order.index(name) if name in order else len(order)
                    found.append(
                        {"key": key, "network": network, "name": name, "kind": kind, "batch": batch, "rank": rank}
                        | entry["variants"][variant]
                    )
    return sorted(found, key=lambda job: (job["rank"], job["key"]))


def run(only: set[str] | None, batches: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    description = json.loads((WORK / "networks.json").read_text())
    jobs = candidates(description["networks"], only, batches)
    results_file = WORK / "results.json"
    results: dict[str, Any] = json.loads(results_file.read_text()) if results_file.exists() else {}
    data, labels = images()
    chosen = np.zeros(len(data), bool)
    chosen[description["calibration_rows"]] = True
    bench = Bench()
    engines = WORK / "engines"
    engines.mkdir(exist_ok=True)
    longest = 60.0
    for job in jobs:
        target = engines / f"{job['key']}.plan"
        if target.exists() or results.get(job["key"], {}).get("error"):
            continue
        if time.monotonic() + longest + 90.0 > deadline:
            print(f"no time left to build {job['key']}", flush=True)
            continue
        make_weights(WORK / job["file"], job["weights"])
        try:
            spent = bench.build(job["kind"], WORK / job["file"], job["batch"], target, data[chosen])
        except RuntimeError as error:
            results[job["key"]] = {"error": str(error)}
            print(f"{job['key']}: {error}", flush=True)
            continue
        longest = max(longest, spent)
        results[job["key"]] = {"build_s": spent}
        results_file.write_text(json.dumps(results, indent=1))
        print(f"{job['key']}: built in {spent:.1f} s", flush=True)
    opened = {}
    for job in jobs:
        target = engines / f"{job['key']}.plan"
        if target.exists():
            opened[job["key"]] = bench.open(target, job["batch"])
    time_engines(opened, results)
    largest = max(batches)
    for job in jobs:
        engine = opened.get(job["key"])
        if engine is None:
            continue
        layers = engine.layers()
        (WORK / f"{job['key']}.layers.json").write_text(json.dumps(layers, indent=1))
        results[job["key"]].update({key: job[key] for key in ("network", "name", "batch")}, inspector=summarise(layers))
        if job["batch"] == largest and description["networks"][job["network"]]["trained"]:
            results[job["key"]]["top1"] = engine.top1(data[~chosen], labels[~chosen])
    results_file.write_text(json.dumps(results, indent=1))
    report()


def time_engines(opened: dict[str, Engine], results: dict[str, Any]) -> None:
    """Interleaved medians, per batch size and network, with and without CUDA graph."""
    samples: dict[tuple[str, bool], list[float]] = {(key, graph): [] for key in opened for graph in (False, True)}
    for key, engine in opened.items():
        for graph in (False, True):
            for _ in range(WARM_UP):
                engine.burst_ms(graph)
        print(f"warm: {key}", flush=True)
    for _ in range(ROUNDS):
        for (key, graph), values in samples.items():
            values.append(opened[key].burst_ms(graph))
    for (key, graph), values in samples.items():
        ordered = sorted(values)
        results.setdefault(key, {})["graph_ms" if graph else "ms"] = {
            "median": statistics.median(values), "p10": ordered[len(ordered) // 10],
            "p90": ordered[-1 - len(ordered) // 10],
            "runs": len(values), "burst": BURST,
        }  # fmt: skip


def report() -> None:
    """table.md from results.json, also into $OUT."""
    results = json.loads((WORK / "results.json").read_text())
    lines = []
    rows = [entry | {"key": key} for key, entry in results.items() if "ms" in entry]
    for network, batch in sorted({(row["network"], row["batch"]) for row in rows}):
        group = sorted(
            (row for row in rows if (row["network"], row["batch"]) == (network, batch)),
            key=lambda row: row["graph_ms"]["median"],
        )
        rivals = [
            row["graph_ms"]["median"] for row in group if not row["name"].startswith("ours") and row["name"] != "fp16"
        ]
        best = min(rivals) if rivals else float("nan")
        columns = ("engine", "ms", "ms, graph", "images/s, graph", "against best other INT8", "layers", "reformats")
        columns += ("float convs", "convs with float out", "Scale", "top-1")
        lines += ["", f"## {network}, batch {batch}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in group:
            found = row["inspector"]
            lines.append(
                f"| {row['name']} | {row['ms']['median']:.4f} | {row['graph_ms']['median']:.4f} | "
                f"{1000 * batch / row['graph_ms']['median']:,.0f} | "
                f"{best / row['graph_ms']['median']:.3f}x | {found['layers']} | {len(found['reformats'])} | "
                f"{len(found['float_convolutions'])} | "
                f"{len(found['int8_convolutions_with_float_output'])} | {len(found['scale_layers'])} | "
                f"{row.get('top1', float('nan')):.2f} |"
            )
    for key, entry in results.items():
        if "error" in entry:
            lines.append(f"\n{key}: no engine: {entry['error'][:500]}")
    (WORK / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if out := os.environ.get("OUT"):
        for file in (*WORK.glob("*.json"), WORK / "table.md", *WORK.glob("*.cache")):
            if file.name != "networks.json":
                shutil.copy(file, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("unpack").add_argument("folders", type=Path, nargs="+")
    command = commands.add_parser("run")
    command.add_argument("--only", help="names of networks or variants, joined by commas")
    command.add_argument("--batches", default="1,64")
    command.add_argument("--seconds", type=float, default=540.0)
    commands.add_parser("report")
    arguments = parser.parse_args()
    if arguments.command == "unpack":
        unpack(arguments.folders)
    elif arguments.command == "run":
        only = set(arguments.only.split(",")) if arguments.only else None
        run(only, [int(text) for text in arguments.batches.split(",")], arguments.seconds)
    else:
        report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
