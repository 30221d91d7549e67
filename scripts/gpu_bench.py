#!/usr/bin/env python3
"""Measure engines on a GPU machine that has no network: FP32, FP16, implicit INT8 and the pipeline's Q/DQ graph.

    gpu_bench.py prepare --model NAME=ARTIFACT ... --images FOLDER --out PACK    here: needs onnx and pillow
    gpu_bench.py receive SLICE --at DIR                                         there: once for each PACK/slice-NN
    gpu_bench.py run --at DIR --out OUT                                         there: needs TensorRT and PyCUDA only

`prepare` writes each model's FP32 and INT8 graph with their common weights stored once, the calibration cache, the test
images and the predictions that the Q/DQ graph gives in onnxruntime, cut into slices of 48 MB. `run` goes on where an
earlier call stopped (engines and timing cache stay in DIR), ends inside --budget-s, and writes OUT/results.json after
every step, OUT/table.md at the end, and OUT/details.tar.gz with the layer tables, layer times and the timing cache.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.config import Profile
from pipeline.core.errors import QuantizeError
from pipeline.engine.bench import Candidate, compare, measure_compute, measure_overlap
from pipeline.engine.builder import build_engine
from pipeline.engine.device import describe_device
from pipeline.engine.inspect import count_layers
from pipeline.engine.onnx_wire import read_model
from pipeline.engine.records import BuildOptions, EngineRecord
from pipeline.engine.runner import Runner

SLICE_BYTES = 48_000_000
SHARED_BYTES = 1024  # smaller weights stay in the graph
RIVALS = ("modelopt", "onnxruntime")  # Q/DQ graphs of other tools, given with --rival
VARIANTS = ("int8", "fp16", "implicit", *RIVALS, "fp32", "int8-half-in")
PACK = "pack.tar"


# Here: prepare


def share_weights(folder: Path, sources: dict[str, Path]) -> None:
    """Write ``sources`` (name: ONNX file) into ``folder`` with their large weights in one common ``weights.bin``."""
    import hashlib

    import onnx

    places: dict[str, tuple[int, int]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "weights.bin").open("wb") as blob:
        for name, source in sources.items():
            model = onnx.load(source)
            for tensor in model.graph.initializer:
                values = onnx.numpy_helper.to_array(tensor)
                if values.nbytes < SHARED_BYTES:
                    continue
                data = np.ascontiguousarray(values).tobytes()
                digest = hashlib.sha256(data).hexdigest()
                if digest not in places:
                    places[digest] = (blob.tell(), len(data))
                    blob.write(data)
                tensor.ClearField("raw_data")
                for kind in ("float_data", "int32_data", "int64_data", "double_data"):
                    tensor.ClearField(kind)
                tensor.data_location = onnx.TensorProto.EXTERNAL
                del tensor.external_data[:]
                offset, length = places[digest]
                for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
                    tensor.external_data.add(key=key, value=str(value))
            (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def centre_crops(folder: Path, size: int, names: list[str]) -> np.ndarray:
    """uint8, (images, 3, size, size)."""
    from PIL import Image

    crops = []
    for name in names:
        with Image.open(folder / name) as image:
            pixels = np.asarray(image.convert("RGB"))
        top, left = ((side - size) // 2 for side in pixels.shape[:2])
        crops.append(pixels[top : top + size, left : left + size].transpose(2, 0, 1))
    return np.stack(crops)


def predictions(model: Path, images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Arg-max per image, from onnxruntime without graph optimisation."""
    from pipeline.core.ort import make_session

    session = make_session(model, optimise=False)
    name = session.get_inputs()[0].name
    parts = [images[start : start + 16] for start in range(0, len(images), 16)]
    return np.concatenate([session.run(None, {name: normalised(p, mean, std)})[0].argmax(-1) for p in parts])


def normalised(images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    return ((images.astype(np.float32) - mean.reshape(1, -1, 1, 1)) / std.reshape(1, -1, 1, 1)).astype(np.float32)


def full_cache(model: Path, images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> str:
    """A calibration cache with the largest magnitude of every activation over ``images``: what implicit INT8 needs.

    The artifact has the tensors that the Q/DQ graph quantises; with fewer scales than tensors TensorRT would
    leave the others in float and the comparison would flatter us.
    """
    import onnx

    from calibrators.cache import cache_text
    from pipeline.core.ort import make_session

    graph = onnx.load(model).graph
    floats = {
        value.name
        for value in onnx.shape_inference.infer_shapes(onnx.load(model)).graph.value_info
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    names = [name for node in graph.node for name in node.output if name in floats]
    outputs = [output.name for output in graph.output]
    session = make_session(model, capture=names, optimise=False)
    source = graph.input[0].name
    largest = dict.fromkeys([source, *names, *outputs], 0.0)
    for start in range(0, len(images), 8):
        feed = normalised(images[start : start + 8], mean, std)
        found = session.run([*names, *outputs], {source: feed})
        for name, values in zip([source, *names, *outputs], [feed, *found], strict=True):
            largest[name] = max(largest[name], float(np.abs(values).max()))
    return cache_text({name: value / 127 for name, value in largest.items() if value > 0})


def _split_rival(text: str) -> tuple[str, str, str]:
    return text.partition("=")


def prepare(args: argparse.Namespace) -> None:
    import csv

    from pipeline.artifact import FP32_MODEL, INT8_MODEL

    work = args.out / "content"
    with (args.images / "labels.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    names, labels = [row["file"] for row in rows], np.array([int(row["class_index"]) for row in rows])
    calibrated = {index * len(names) // args.skip for index in range(args.skip)}  # as `quantize build` spaces them
    chosen = np.array([index for index in range(len(names)) if index not in calibrated])
    images = centre_crops(args.images, args.size, [names[index] for index in chosen])
    spec: dict[str, Any] = {"models": {}}
    stored = {"images": images, "labels": labels[chosen]}
    for text in args.model:
        name, _, rest = text.partition("=")
        artifact, _, numbers = rest.partition(":")
        mean, std = (
            np.array([float(v) for v in part.split(",")], np.float32) for part in (numbers or "127:128").split(":")
        )
        sources = {"fp32": Path(artifact) / FP32_MODEL, "int8": Path(artifact) / INT8_MODEL}
        for key, _, path in map(_split_rival, args.rival):
            owner, _, rival = key.partition(":")
            if rival not in RIVALS:
                raise SystemExit(f"--rival {key}: known are {', '.join(RIVALS)}")
            if owner == name:
                sources[rival] = Path(path)
        share_weights(work / name, sources)
        (work / name / "calibration.cache").write_text(full_cache(sources["fp32"], images[:64], mean, std))
        for kind in sources if name in args.predict else ():
            stored[f"{name}/{kind}"] = predictions(sources[kind], images, mean, std)
        spec["models"][name] = {"mean": mean.tolist(), "std": std.tolist()}
    np.savez_compressed(work / "images.npz", **stored)
    (work / "spec.json").write_text(json.dumps(spec, indent=1))
    with tarfile.open(args.out / PACK, "w") as tar:
        tar.add(work, arcname=".")
    with (args.out / PACK).open("rb") as stream:
        for number in range(100):
            if not (data := stream.read(SLICE_BYTES)):
                break
            part = args.out / f"slice-{number:02d}"
            part.mkdir(exist_ok=True)
            (part / f"{PACK}.{number:02d}").write_bytes(data)
            print(f"{part}  {len(data) / 1e6:.1f} MB")


# There: receive and run


def receive(args: argparse.Namespace) -> None:
    args.at.mkdir(parents=True, exist_ok=True)
    for part in args.slice.glob(f"{PACK}.*"):
        (args.at / part.name).write_bytes(part.read_bytes())
    print(len(list(args.at.glob(f"{PACK}.*"))), "slices")


def unpack(folder: Path) -> None:
    parts = sorted(folder.glob(f"{PACK}.*"))
    if not parts:
        return
    data = b"".join(part.read_bytes() for part in parts)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder)
    for part in parts:
        part.unlink()


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
        spec = read_model(self.args.at / model / "fp32.onnx").inputs[0]
        rest = "x".join(str(dim) for dim in (spec.shape or ())[1:])
        texts = [[f"{batch}x{rest}" for batch in part.split(":")] for part in self.args.profiles.split(",")]
        return [Profile.parse(f"{spec.name}={','.join(shapes)}") for shapes in texts]

    def options(self, model: str, variant: str) -> BuildOptions:
        return BuildOptions(
            fp16=variant != "fp32",
            half_inputs=variant == "int8-half-in",
            calibration_cache=self.args.at / model / "calibration.cache" if variant == "implicit" else None,
            optimization_level=self.args.level,
            timing_cache_folder=self.args.at / "timing",
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
            record = build_engine(
                source,
                target="tensorrt",
                profiles=self.profiles(model),
                plan_path=plan,
                options=self.options(model, variant),
                timeout_s=max(self.left(), 1),
            )
        except QuantizeError as error:
            self.put("failures", f"{model}/{variant}", value=str(error)[:2000])
            self.note(f"{model} {variant}: {str(error)[:300]}")
            return
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
        numbers = self.spec["models"][model]
        mean, std = (np.array(numbers[key], np.float32) for key in ("mean", "std"))
        return normalised(named["images"], mean, std), named

    def measure(self, model: str) -> None:
        """All variants that are built, with and without graph, interleaved, batch by batch."""
        images, _ = self.images(model)
        runners = {}
        for variant in VARIANTS:
            for graph in (False, True):
                runner = None if variant.endswith("half-in") else self.runner(model, variant, cuda_graphs=graph)
                if runner is not None:
                    runners[variant, graph] = runner
        try:
            for batch in self.args.batches:
                if self.left() < 10 or f"{batch}" in self.results.get("measured", {}).get(model, {}):
                    continue
                candidates = [Candidate(variant, runner, graph) for (variant, graph), runner in runners.items()]
                name = candidates[0].runner.inputs[0].name
                shapes = {name: (batch, *images.shape[1:])}
                found = measure_compute(candidates, shapes, rounds=self.args.rounds, samples={name: images[:batch]})
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

    def accuracy(self, model: str) -> None:
        images, stored = self.images(model)
        labels = stored["labels"]
        for variant in VARIANTS:
            runner = self.runner(model, variant, in_flight=2)
            if runner is None or self.left() < 5:
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
            self.put("accuracy", model, variant, value=figures)
            self.note(f"{model} {variant}: {figures}")

    def overlap(self, model: str) -> None:
        for variant in ("int8", "int8-half-in", "fp16"):
            runner = self.runner(model, variant, cuda_graphs=True, in_flight=self.args.in_flight)
            if runner is None or self.left() < 8:
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
        images, _ = self.images(model)
        for variant in VARIANTS:
            runner = self.runner(model, variant)
            if runner is None or self.left() < 5:
                continue
            with runner:
                name = runner.inputs[0].name
                for batch in (1, 64):
                    times = runner.layer_times({name: images[:batch].astype(runner.inputs[0].dtype)}, runs=20)
                    path = self.args.at / "engines" / model / variant / f"layer-times-{batch}.json"
                    path.write_text(json.dumps(times, indent=1))
                self.put("layer_counts", model, variant, value=count_layers(runner.layer_information()).model_dump())

    def details(self) -> None:
        """Everything worth looking at later, in one file."""
        with tarfile.open(self.args.out / "details.tar.gz", "w:gz") as tar:
            for path in sorted([*self.args.at.rglob("*.json"), *self.args.at.rglob("*.cache")]):
                tar.add(path, arcname=path.relative_to(self.args.at))

    def run(self) -> None:
        order = [(model, variant) for variant in self.args.variants for model in self.models]
        for model, variant in order:
            if self.left() > self.args.reserve_s:
                self.build(model, variant)
                self.details()
        for step in (self.measure, self.accuracy, self.overlap, self.layers):
            for model in self.models:
                try:
                    step(model)
                except QuantizeError as error:
                    self.put("failures", f"{model}/{step.__name__}", value=str(error)[:2000])
                    self.note(f"{model} {step.__name__}: {error}")
        for model in self.models:
            done = "second_build" in self.results.get("builds", {}).get(model, {}).get("int8", {})
            if not done and self.left() > 20:
                self.build(model, "int8", again=True)
        self.details()
        text = table(self.results)
        (self.args.out / "table.md").write_text(text)
        print(text)


def table(results: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = []
    for model, batches in results.get("measured", {}).items():
        lines += [f"\n{model}, images/s without / with CUDA graph (P50 in ms with graph)\n"]
        names = list(dict.fromkeys(m["name"] for found in batches.values() for m in found))
        lines += ["| batch | " + " | ".join(names) + " |", "|---:|" + "---:|" * len(names)]
        for batch, found in sorted(batches.items(), key=lambda item: int(item[0])):
            cells = []
            for name in names:
                pair = {m["cuda_graph"]: m for m in found if m["name"] == name}
                rates = " / ".join(
                    f"{pair[graph]['throughput']:,.0f}" if graph in pair else "-" for graph in (False, True)
                )
                cells.append(rates + (f" ({pair[True]['p50_ms']:.3f})" if True in pair else ""))
            lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    if results.get("accuracy"):
        lines += ["\n| model | engine | top-1 | onnxruntime, same graph | agreement |", "|---|---|---:|---:|---:|"]
        for model, variants in results["accuracy"].items():
            for name, f in variants.items():
                reference = (
                    f"{100 * f['top1_onnxruntime']:.2f} % | {100 * f['agreement']:.2f} %"
                    if "agreement" in f
                    else "- | -"
                )
                lines.append(f"| {model} | {name} | {100 * f['top1']:.2f} % | {reference} |")
    if results.get("overlap"):
        lines += [
            "\n| model | engine | batch | compute alone | one request at a time | overlapped | share | copies alone |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        for model, variants in results["overlap"].items():
            for name, f in variants.items():
                rates = " | ".join(f"{f[key]:,.0f}" for key in ("compute_alone", "one_at_a_time", "overlapped"))
                lines.append(
                    f"| {model} | {name} | {f['batch']} | {rates} | {f['share']:.1%} | {f['copy_in_alone']:,.0f} |"
                )
    if results.get("builds"):
        lines += [
            "\n| model | engine | first build | with timing cache | plan | int8 / float convolutions |",
            "|---|---|---:|---:|---:|---:|",
        ]
        for model, variants in results["builds"].items():
            for name, builds in variants.items():
                first, second = builds.get("build", {}), builds.get("second_build", {})
                seconds = " | ".join(f"{b['build_seconds']:.1f} s" if b else "-" for b in (first, second))
                counts = first.get("layers") or {}
                kinds = f"{counts['convolutions_int8']} / {counts['convolutions_float']}" if counts else "-"
                lines.append(f"| {model} | {name} | {seconds} | {first.get('plan_bytes', 0) / 1e6:.1f} MB | {kinds} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("prepare")
    one.add_argument(
        "--model", action="append", required=True, help="NAME=ARTIFACT[:MEAN:STD], numbers joined by commas"
    )
    one.add_argument("--rival", action="append", default=[], help="MODEL:modelopt=FILE.onnx or MODEL:onnxruntime=...")
    one.add_argument("--images", type=Path, required=True, help="folder with labels.csv (file,class_index)")
    one.add_argument("--skip", type=int, default=128, help="images calibrated on (evenly spaced), left out here")
    one.add_argument("--size", type=int, default=224)
    one.add_argument(
        "--predict", nargs="*", default=[], help="models of which onnxruntime's predictions are stored too"
    )
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(action=prepare)
    two = commands.add_parser("receive")
    two.add_argument("slice", type=Path)
    two.add_argument("--at", type=Path, required=True)
    two.set_defaults(action=receive)
    three = commands.add_parser("run")
    three.add_argument("--at", type=Path, required=True)
    three.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    three.add_argument("--budget-s", type=float, default=560)
    three.add_argument("--reserve-s", type=float, default=60, help="no build is started when less than this is left")
    three.add_argument("--models", nargs="*", default=[])
    three.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    three.add_argument("--batches", type=lambda text: [int(v) for v in text.split(",")], default=[1, 8, 64, 128])
    three.add_argument(
        "--profiles", default="1:1:1,2:64:128", help="MIN:OPT:MAX batch of each profile, joined by commas"
    )
    three.add_argument("--level", type=int, default=None, help="builder optimisation level")
    three.add_argument("--rounds", type=int, default=5)
    three.add_argument("--in-flight", type=int, default=3)
    three.set_defaults(action=lambda args: Bench(args).run())
    args = parser.parse_args()
    if hasattr(args, "out"):
        args.out.mkdir(parents=True, exist_ok=True)
    args.action(args)


if __name__ == "__main__":
    main()
