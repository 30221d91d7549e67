"""Time and memory of calibration beside a plain pass of the float model, and beside other tools.

    python scripts/bench_calibration.py [--model efficientnet-lite0|resnet50] [--images 128] [--rounds 5] [--out FOLDER]
    python scripts/bench_calibration.py --flat               peak memory at 128, 256, 512 and 1024 images
    python scripts/bench_calibration.py --tools ort,modelopt --modelopt-python PATH/TO/python

Every measurement is a process of its own, and the processes of a round run one after the other, so that a slow moment
of the machine meets all of them alike; the ratio of a round is to that round's plain pass. The models are prepared as a
build does, the tensors are those of the placement plan, the images are photographs (../shared/data/imagenet500, else
crops of those in scikit-image), read from a file in batches of 8. Measured is from after the imports to the result: the
session's creation, the pass, all calibrators' ranges of all tensors and the written file. All tools get the prepared
model; `onnxruntime-exported` gets the model as exported, as its users give it, with twice as many tensors. The imports
are everything that a tool loads of Python: onnxruntime.quantization, the modules that numba loads at its first call.
The compiled kernels are in numba's cache (a first, unmeasured process makes sure), as they are after the first
calibration on a machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (3, 224, 224)
BATCH = 8
OWN = ("plain", "all calibrators")
TOOLS = {
    "ort": ("onnxruntime entropy", "onnxruntime percentile", "onnxruntime-exported entropy"),
    "modelopt": ("modelopt entropy", "modelopt max"),
}
FLAT = (128, 256, 512, 1024)


# What runs in a process of its own


def batches(images: Path, count: int) -> Iterator[Any]:
    """Float32 batches read from the file one after the other (a memory map would count as memory)."""
    size = int(np.prod(SHAPE))
    with images.open("rb") as stream:
        for start in range(0, count, BATCH):
            rows = min(BATCH, count - start)
            yield np.fromfile(stream, np.float32, rows * size).reshape(rows, *SHAPE)


def plain(work: Path, count: int) -> None:
    from pipeline.core.ort import make_session

    session = make_session(work / "model.onnx")
    output, name = session.get_outputs()[0].name, session.get_inputs()[0].name
    for batch in batches(work / "images.f32", count):
        session.run([output], {name: batch})


def all_calibrators(work: Path, count: int) -> None:
    import calibrators
    from pipeline import calibrate
    from pipeline.data import Batch

    plan = json.loads((work / "plan.json").read_text())
    stream = (
        Batch(index, tuple(range(index * BATCH, index * BATCH + len(rows))), {plan["input"]: rows})
        for index, rows in enumerate(batches(work / "images.f32", count))
    )
    with tempfile.TemporaryDirectory() as folder:
        result = calibrate.run(work / "model.onnx", plan["tensors"], stream, folder=Path(folder))
        statistics, _ = calibrators.load_statistics(result.statistics_path)
    for name in calibrators.names():
        calibrator = calibrators.get(name)
        for stats in statistics.values():
            calibrators.resolve_amax(stats, calibrator)


def onnxruntime_static(work: Path, count: int, method: str, model: str = "model.onnx") -> None:
    from onnxruntime import quantization

    plan = json.loads((work / "plan.json").read_text())

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.stream = batches(work / "images.f32", count)

        def get_next(self) -> dict[str, Any] | None:
            rows = next(self.stream, None)
            return None if rows is None else {plan["input"]: rows}

    with tempfile.TemporaryDirectory() as folder:
        quantization.quantize_static(
            work / model,
            Path(folder) / "int8.onnx",
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=getattr(quantization.CalibrationMethod, method),
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
        )


def modelopt_quantize(work: Path, count: int, method: str) -> None:
    from modelopt.onnx.quantization import quantize

    plan = json.loads((work / "plan.json").read_text())
    data = np.concatenate(list(batches(work / "images.f32", count)))
    with tempfile.TemporaryDirectory() as folder:
        quantize(
            str(work / "model.onnx"),
            calibration_data={plan["input"]: data},
            calibration_method=method,
            calibration_shapes=f"{plan['input']}:{'x'.join(map(str, (BATCH, *SHAPE)))}",
            calibration_eps=["cpu"],
            output_path=str(Path(folder) / "int8.onnx"),
            log_level="ERROR",
        )


def child(mode: str, work: Path, count: int) -> None:
    """Run one mode and print a JSON line: seconds, processor seconds, peak memory in MB."""
    if mode.startswith("modelopt"):
        import modelopt.onnx.quantization  # noqa: F401
    else:
        sys.path.insert(0, str(ROOT))
        import onnx  # noqa: F401
        import onnxruntime

    if mode.startswith("onnxruntime"):
        import onnxruntime.quantization  # noqa: F401

    if mode == "all calibrators":
        import onnx_ir  # noqa: F401
        from numba.core.registry import cpu_target

        import pipeline.calibrate  # noqa: F401

        cpu_target.typing_context.refresh()  # numba imports its own modules here, else at its first call
        cpu_target.target_context.refresh()
    start, processor = time.perf_counter(), time.process_time()
    match mode.split():
        case ["plain"]:
            plain(work, count)
        case ["all", "calibrators"]:
            all_calibrators(work, count)
        case ["onnxruntime", method]:
            onnxruntime_static(work, count, method.capitalize())
        case ["onnxruntime-exported", method]:
            onnxruntime_static(work, count, method.capitalize(), "exported.onnx")
        case ["modelopt", method]:
            modelopt_quantize(work, count, method)
        case _:
            raise SystemExit(f"unknown mode {mode!r}")
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor
    sys.path.insert(0, str(ROOT))  # ModelOpt runs in a Python of its own
    from pipeline.core.memory import peak_resident_bytes

    peak = peak_resident_bytes() / 1024**2
    print("RESULT " + json.dumps({"seconds": seconds, "processor": processor_seconds, "peak_mb": peak}))


# What starts them


def prepare(work: Path, model: str, count: int) -> None:
    """Model, tensors and images into ``work``."""
    sys.path.insert(0, str(ROOT))
    import torch

    from pipeline import prepare as stage
    from pipeline.config import PlacementConfig
    from pipeline.placement import make_plan
    from tests.zoo import convnets, trained
    from tests.zoo.export import export_onnx

    torch.manual_seed(0)
    module = trained.efficientnet_lite0() if model == "efficientnet-lite0" else convnets.resnet50(classes=1000)
    exported = export_onnx(
        module,
        {"x": torch.zeros(2, *SHAPE)},
        work / "exported.onnx",
        dynamic_axes={"x": {0: "batch"}, "output": {0: "batch"}},
    )
    photographs(work / "images.f32", count)
    feeds = [{"x": next(batches(work / "images.f32", 2))}]
    result = stage.run(exported, folder=work / "prepared", sample_feeds=feeds)
    result.model_path.rename(work / "model.onnx")
    tensors = make_plan(work / "model.onnx", PlacementConfig()).tensors
    (work / "plan.json").write_text(json.dumps({"input": "x", "tensors": list(tensors)}))
    print(f"{model}: {len(tensors)} tensors to calibrate, {count} images, batches of {BATCH}")


def photographs(path: Path, count: int) -> None:
    """``count`` crops of 224x224, (pixel - 127) / 128, seeded."""
    from PIL import Image

    folder = ROOT.parent / "shared" / "data" / "imagenet500"
    files = sorted(folder.rglob("*.jpg")) if folder.is_dir() else []
    if files:
        sources = [np.asarray(Image.open(file).convert("RGB")) for file in files[:count]]
    else:
        from skimage import data

        sources = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.immunohistochemistry()]
    random = np.random.default_rng(0)
    with path.open("wb") as stream:
        for index in range(count):
            pixels = sources[index % len(sources)]
            top, left = (int(random.integers(0, size - 224 + 1)) for size in pixels.shape[:2])
            crop = pixels[top : top + 224, left : left + 224].astype(np.float32)
            stream.write(np.ascontiguousarray(((crop - 127.0) / 128.0).transpose(2, 0, 1)).tobytes())


def measure(mode: str, work: Path, count: int, python: str) -> dict[str, float]:
    command = [python, str(Path(__file__).resolve()), "--child", mode, "--work", str(work), "--images", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{mode} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def compare(work: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All modes, interleaved; slow ones fewer times."""
    tools = [mode for tool in options.tools for mode in TOOLS[tool]]
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in (*OWN, *tools)}
    ratios: dict[str, list[float]] = {mode: [] for mode in results}
    measure("all calibrators", work, BATCH, sys.executable)
    for number in range(options.rounds):
        for mode, found in results.items():
            if mode in tools and number >= options.tool_rounds:
                continue
            python = options.modelopt_python if mode.startswith("modelopt") else sys.executable
            found.append(measure(mode, work, options.images, python))
            ratios[mode].append(found[-1]["seconds"] / results["plain"][-1]["seconds"])
            print(f"  round {number + 1}: {mode:28} {found[-1]['seconds']:8.2f} s", flush=True)
    rows = []
    own_seconds = float(np.median([each["seconds"] for each in results["all calibrators"]]))
    plain_peak = float(np.median([each["peak_mb"] for each in results["plain"]]))
    for mode, found in results.items():
        seconds = float(np.median([each["seconds"] for each in found]))
        peak = float(np.median([each["peak_mb"] for each in found]))
        rows.append(
            {
                "mode": mode,
                "rounds": len(found),
                "seconds": seconds,
                "least": min(each["seconds"] for each in found),
                "processor": float(np.median([each["processor"] for each in found])),
                "ratio": float(np.median(ratios[mode])),
                "of_least": min(e["seconds"] for e in found) / min(e["seconds"] for e in results["plain"]),
                "times_ours": seconds / own_seconds,
                "peak_mb": peak,
                "over_plain_mb": peak - plain_peak,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'':24} {'median s':>9} {'least s':>8} {'cpu s':>7} {'x plain':>8} {'of least':>9} {'x ours':>7} "
        f"{'peak MB':>8} {'over plain':>11}"
    )
    for row in rows:
        print(
            f"{row['mode']:24} {row['seconds']:9.2f} {row['least']:8.2f} {row['processor']:7.2f} {row['ratio']:8.2f} "
            f"{row['of_least']:9.2f} {row['times_ours']:7.2f} {row['peak_mb']:8.0f} {row['over_plain_mb']:11.0f}"
        )


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import pandas as pd
    import seaborn
    from matplotlib.figure import Figure

    table = pd.DataFrame(rows)
    figure = Figure(figsize=(11, 0.7 + 0.5 * len(table)), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for axes, column, label in (
        (time_axes, "ratio", "time / plain pass"),
        (memory_axes, "peak_mb", "peak memory in MB"),
    ):
        seaborn.barplot(table, x=column, y="mode", ax=axes, color="steelblue")
        axes.bar_label(axes.containers[0], fmt="%.2f" if column == "ratio" else "%.0f", padding=3)
        axes.set(xlabel=label, ylabel="", xscale="log")
        axes.margins(x=0.25)
    memory_axes.set_yticklabels([])
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def flat(work: Path) -> list[dict[str, Any]]:
    """Peak memory of the plain pass and of ours, by number of images."""
    measure("all calibrators", work, BATCH, sys.executable)
    rows = []
    for count in FLAT:
        found = {mode: measure(mode, work, count, sys.executable) for mode in OWN}
        plain_mb, own_mb = (found[mode]["peak_mb"] for mode in OWN)
        rows.append({"images": count, "plain_mb": plain_mb, "own_mb": own_mb, "over_plain_mb": own_mb - plain_mb})
        print(
            f"{count:5} images: plain {plain_mb:6.0f} MB, ours {own_mb:6.0f} MB, {own_mb - plain_mb:+6.0f} MB",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=["efficientnet-lite0", "resnet50"], default="efficientnet-lite0")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tools", type=lambda text: text.split(",") if text else [], default=[], help="ort,modelopt")
    parser.add_argument("--tool-rounds", type=int, default=1, help="they are slow")
    parser.add_argument("--modelopt-python", default=sys.executable, help="a Python that has ModelOpt")
    parser.add_argument("--flat", action="store_true", help="peak memory by number of images instead")
    parser.add_argument("--out", type=Path, help="folder for results.json and the plot")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.work, options.images)
        return
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"unknown tools {', '.join(sorted(unknown))}; known: {', '.join(TOOLS)}")
    with tempfile.TemporaryDirectory(prefix="bench-calibration-") as folder:
        work = Path(folder)
        prepare(work, options.model, max(FLAT) if options.flat else options.images)
        rows = flat(work) if options.flat else compare(work, options)
    if not options.flat:
        show(rows)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"{options.model}-{'memory' if options.flat else options.images}"
        (options.out / f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n")
        if not options.flat:
            plot(rows, f"{options.model}, {options.images} images", options.out / f"{name}.png")


if __name__ == "__main__":
    main()
