#!/usr/bin/env python3
"""Calibration over GPUs with NCCL: the same bits on every rank, on one GPU and on the CPU, and what faults do.

    gpu_nccl.py pack --out .gpu/nccl                   here: EfficientNet-Lite0 and photographs, a few MB
    gpu_nccl.py inputs --from .gpu/nccl --at DIR       there: the data as one array, ResNet-50 with seeded weights
    gpu_nccl.py measure --at DIR --model NAME --out F  there, under torchrun: one run; writes F.json in rank 0
    gpu_nccl.py report --runs DIR --out OUT            there: nccl.md and nccl.json

scripts/gpu_nccl.sh does all of it there. The float model runs on the GPU, in onnxruntime's CUDA provider where it is
installed and otherwise operator by operator in PyTorch; its activations stay there and are binned by the kernels of
``plugins/statistics.cu``. Convolution algorithms are chosen without timing them and TF32 is off, so that a batch gives
the same bits on every GPU of a kind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MODELS = ("efficientnet-lite0", "resnet50")
SIDE = 224
FEW = 256
"""Samples of the runs that are broken."""


class TorchModel:
    """The operators of prepared convolution networks, in PyTorch on the GPU, one by one."""

    name = "PyTorch"

    def __init__(self, path: Path, device: str, tensors: tuple[str, ...]) -> None:
        import onnx
        import torch
        from onnx import numpy_helper

        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        graph = onnx.load(path).graph
        self._torch, self._device, self._tensors = torch, device, tensors
        value_of = onnx.helper.get_attribute_value
        self._nodes = [
            (node.op_type, list(node.input), node.output[0], {each.name: value_of(each) for each in node.attribute})
            for node in graph.node
        ]
        arrays = {init.name: numpy_helper.to_array(init) for init in graph.initializer}
        self._weights = {name: torch.from_numpy(array.copy()).to(device) for name, array in arrays.items()}
        self._shapes = {name: array.tolist() for name, array in arrays.items() if array.dtype == np.int64}

    def __call__(self, feeds: dict[str, np.ndarray]) -> list[Any]:
        """The tensors, on the GPU and finished."""
        torch = self._torch
        values = dict(self._weights)
        values.update({name: torch.from_numpy(array).to(self._device) for name, array in feeds.items()})
        with torch.inference_mode():
            for op, inputs, output, attributes in self._nodes:
                values[output] = self._run(op, [values.get(name) for name in inputs], inputs, attributes)
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)
        return [values[name].contiguous() for name in self._tensors]

    def _run(self, op: str, x: list[Any], names: list[str], a: dict[str, Any]) -> Any:
        functional = self._torch.nn.functional
        if op in ("Conv", "MaxPool"):
            top, left, bottom, right = a.get("pads", [0, 0, 0, 0])
            fill = 0.0 if op == "Conv" else float("-inf")
            padded = (
                functional.pad(x[0], (left, right, top, bottom), value=fill)
                if any((top, left, bottom, right))
                else x[0]
            )
            if op == "MaxPool":
                return functional.max_pool2d(padded, a["kernel_shape"], a.get("strides"))
            bias = x[2] if len(x) > 2 else None
            return functional.conv2d(
                padded, x[1], bias, a.get("strides", 1), 0, a.get("dilations", 1), a.get("group", 1)
            )
        if op == "Relu":
            return functional.relu(x[0])
        if op == "Clip":
            return self._torch.clamp(x[0], x[1], x[2])
        if op == "Add":
            return x[0] + x[1]
        if op == "GlobalAveragePool":
            return x[0].mean((2, 3), keepdim=True)
        if op == "ReduceMean":
            return x[0].mean(tuple(a["axes"]), keepdim=bool(a.get("keepdims", 1)))
        if op == "Flatten":
            return x[0].flatten(a.get("axis", 1))
        if op == "Reshape":
            return x[0].reshape([x[0].shape[i] if dim == 0 else dim for i, dim in enumerate(self._shapes[names[1]])])
        if op == "Gemm":
            return functional.linear(x[0], x[1] if a.get("transB") else x[1].T, x[2])
        raise click.ClickException(f"operator {op} is not among those of this script")

    def describe(self, tensor: Any) -> tuple[int, int]:
        return int(tensor.data_ptr()), int(tensor.numel())

    def on_host(self, tensor: Any) -> np.ndarray:
        array: np.ndarray = tensor.cpu().numpy()
        return array


class OrtModel:
    """onnxruntime's CUDA provider, every captured tensor bound on the GPU."""

    name = "onnxruntime"

    def __init__(self, path: Path, device: str, tensors: tuple[str, ...]) -> None:
        import onnx
        import onnxruntime

        self._ort, self._device = onnxruntime, int(device.partition(":")[2])
        model = onnx.load(path)
        self._inputs = [value.name for value in model.graph.input]
        self._tensors = tensors
        self._captured = [name for name in tensors if name not in self._inputs]
        present = {value.name for value in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._captured if name not in present)
        options = {"device_id": self._device, "cudnn_conv_algo_search": "HEURISTIC", "use_tf32": 0}
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=[("CUDAExecutionProvider", options), "CPUExecutionProvider"]
        )
        if "CUDAExecutionProvider" not in self._session.get_providers():
            raise click.ClickException("onnxruntime did not take its CUDA provider")

    def __call__(self, feeds: dict[str, np.ndarray]) -> list[Any]:
        """The tensors, on the GPU and finished."""
        binding = self._session.io_binding()
        given = {
            name: self._ort.OrtValue.ortvalue_from_numpy(array, "cuda", self._device) for name, array in feeds.items()
        }
        for name, value in given.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._captured:
            binding.bind_output(name, "cuda", self._device)
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        outputs = dict(zip(self._captured, binding.get_outputs(), strict=True))
        return [given[name] if name in given else outputs[name] for name in self._tensors]

    def describe(self, tensor: Any) -> tuple[int, int]:
        return int(tensor.data_ptr()), int(np.prod(tensor.shape(), dtype=np.int64))

    def on_host(self, tensor: Any) -> np.ndarray:
        array: np.ndarray = tensor.numpy()
        return array


def float_model(path: Path, device: str, tensors: tuple[str, ...], runtime: str) -> TorchModel | OrtModel:
    import onnxruntime

    cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    return (OrtModel if runtime == "onnxruntime" or (runtime == "auto" and cuda) else TorchModel)(path, device, tensors)


class GpuMeasure:
    """A :data:`pipeline.consistency.distributed.Measure` that bins on the GPU."""

    def __init__(self, device: str, runtime: str, fault: str | None) -> None:
        self.device, self.runtime, self.fault = device, runtime, fault
        self.seconds = 0.0
        """Of the last pass, without loading the model."""
        self.statistics: dict[str, Any] = {}
        """What the last pass gave."""
        self._model: TorchModel | OrtModel | None = None

    def __call__(self, work: Any, batches: Iterator[Any], group: Any, progress: Any) -> Any:
        from pipeline.consistency.distributed import Measured
        from plugins.statistics import DeviceArray, GpuStatistics

        if self._model is None:
            self._model = float_model(work.model, self.device, work.tensors, self.runtime)
        model, measured = self._model, Measured({})
        with GpuStatistics(work.tensors, device=int(self.device.partition(":")[2])) as binned:
            start = 0.0
            for number, batch in enumerate(batches):
                group.check()
                self._break(number)
                if number == 0:
                    model(batch.feeds)  # chooses algorithms, fills caches
                    start = time.perf_counter()
                tensors = model(batch.feeds)
                binned.update([DeviceArray(*model.describe(tensor)) for tensor in tensors], batch.index)
                binned.stream.synchronize()
                measured.batches.append(batch.index)
                measured.samples += len(batch.samples)
            measured.statistics = self.statistics = binned.collect()
            self.seconds = time.perf_counter() - start if measured.batches else 0.0
        return measured

    def _break(self, number: int) -> None:
        if number == 1:  # past the batch that every rank runs
            if self.fault == "kill-batch":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "stop-batch":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "hang":
                time.sleep(1e6)
            if self.fault == "delay":
                time.sleep(4)

    def on_cpu(self, work: Any, batches: Iterator[Any]) -> dict[str, Any]:
        """The same activations, copied to the host and binned there."""
        from calibrators.accumulate import BatchAccumulator
        from calibrators.statistics import TensorStatistics

        result = {name: TensorStatistics() for name in work.tensors}
        if self._model is not None:
            for batch in batches:
                for name, tensor in zip(work.tensors, self._model(batch.feeds), strict=True):
                    gathered = BatchAccumulator()
                    gathered.add(self._model.on_host(tensor))
                    result[name].absorb(gathered.statistics(batch.index))
        return result


@click.group()
def main() -> None:
    """See the top of the file."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--images", type=click.Path(path_type=Path), default=ROOT.parent / "shared" / "data" / "imagenet500")
@click.option("--count", default=128, show_default=True)
def pack(out: Path, images: Path, count: int) -> None:
    """Write EfficientNet-Lite0 as ONNX, and photographs."""
    from pipeline import export
    from pipeline.config import Profile

    with tempfile.TemporaryDirectory() as folder:
        profile = Profile.parse(f"x=1x3x{SIDE}x{SIDE},8x3x{SIDE}x{SIDE},64x3x{SIDE}x{SIDE}")
        result = export.run(f"{ROOT}/scripts/models.py:efficientnet_lite0", profiles=(profile,), folder=Path(folder))
        (out / "images").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(result.model_path, out / "efficientnet-lite0.onnx")
    files = sorted(images.glob("*.jpg"))
    for file in files[:: max(1, len(files) // count)][:count]:
        shutil.copyfile(file, out / "images" / file.name)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    click.echo(f"{out}: {size / 1e6:.1f} MB, {len(list((out / 'images').iterdir()))} photographs")


@main.command()
@click.option("--from", "source", type=click.Path(path_type=Path), required=True)
@click.option("--at", "folder", type=click.Path(path_type=Path), required=True)
@click.option("--samples", type=click.IntRange(FEW), default=1024, show_default=True)
def inputs(source: Path, folder: Path, samples: int) -> None:
    """Random crops of the photographs, (pixel - 127) / 128, as images.npy; ResNet-50 with seeded random weights."""
    import torch
    from PIL import Image

    from tests.zoo import convnets
    from tests.zoo.export import export_onnx

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "efficientnet-lite0.onnx", folder / "efficientnet-lite0.onnx")
    photographs = [np.asarray(Image.open(path).convert("RGB")) for path in sorted((source / "images").iterdir())]
    generator = np.random.default_rng(0)
    data = np.lib.format.open_memmap(folder / "images.npy", "w+", np.float32, (samples, 3, SIDE, SIDE))
    for number in range(samples):
        pixels = photographs[number % len(photographs)]
        top, left = (int(generator.integers(0, size - SIDE + 1)) for size in pixels.shape[:2])
        data[number] = (
            pixels[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1).astype(np.float32) - 127.0
        ) / 128.0
    data.flush()
    few = np.array(data[:FEW])
    np.save(folder / "few.npy", few)
    few[[3, FEW - 5]] = few[[FEW - 5, 3]]
    np.save(folder / "other-order.npy", few)
    torch.manual_seed(0)
    export_onnx(
        convnets.resnet50(classes=1000), {"x": torch.zeros(2, 3, SIDE, SIDE)}, folder / "resnet50.onnx",
        dynamic_axes={"x": {0: "batch"}, "output": {0: "batch"}},
    )  # fmt: skip
    click.echo(f"{samples} samples, {len(photographs)} photographs")


@main.command()
@click.option("--at", "folder", type=click.Path(path_type=Path), required=True)
@click.option("--model", type=click.Choice(MODELS), default=MODELS[0])
@click.option("--data", default="images.npy", show_default=True)
@click.option("--batch-size", default=32, show_default=True)
@click.option("--samples", default=1024, show_default=True)
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto")
@click.option("--runtime", type=click.Choice(["auto", "onnxruntime", "torch"]), default="auto")
@click.option("--rank-timeout", default=25.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option(
    "--fault", help="kill-batch, stop-batch, hang, delay, kill-merge, other-order or other-model, in --victim."
)
@click.option("--victim", default=1, show_default=True)
def measure(
    folder: Path, model: str, data: str, batch_size: int, samples: int, backend: Any, runtime: str, rank_timeout: float,
    out: Path, fault: str | None, victim: int,
) -> None:  # fmt: skip
    """One calibration and all its checks."""
    import calibrators
    from pipeline.cli.ranks import rank_session
    from pipeline.consistency import Tolerance, compare, exchange
    from pipeline.consistency.context import QuantContext
    from pipeline.consistency.distributed import measure_on_cpu
    from pipeline.consistency.group import PREPARING
    from pipeline.consistency.opening import open_work
    from pipeline.consistency.ranks import check_ranks
    from pipeline.consistency.shares import rank_batches
    from pipeline.consistency.wire import digest_statistics
    from pipeline.core.progress import SILENT
    from pipeline.quantize import activation_ranges

    report: dict[str, Any] = {}
    with rank_session(backend=backend, limit_s=rank_timeout) as group:
        mine = fault if group.rank == victim else None
        if mine == "kill-merge":
            exchange.pack = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
        if mine == "other-order":
            data = "other-order.npy"
        path = folder / (f"{MODELS[1]}.onnx" if mine == "other-model" else f"{model}.onnx")
        group.phase("preparing the model", patience=PREPARING)
        with tempfile.TemporaryDirectory() as scratch:
            opened = open_work(
                str(path), str(folder / data), folder=Path(scratch), samples=samples, batch_size=batch_size
            )
            work, calibrator = opened.work, calibrators.get("entropy")
            device = group.transport.device
            on_gpu = GpuMeasure(device, runtime, mine) if device != "cpu" else None
            found = check_ranks(
                group, opened, calibrator, tolerance=Tolerance(), measure=on_gpu or measure_on_cpu, progress=SILENT
            )
            seconds = on_gpu.seconds if on_gpu else found.seconds[group.rank]
            group.phase("checking against the CPU", patience=PREPARING)

            def own() -> Iterator[Any]:
                return rank_batches(
                    work.source, work.samples, work.batch_size, work.inputs, rank=group.rank, size=group.size
                )

            cpu_binned = None
            if on_gpu:
                same = digest_statistics(on_gpu.on_cpu(work, own())) == digest_statistics(on_gpu.statistics)
                flags = group.gather_text("binned on the CPU", json.dumps(same))
                cpu_binned = all(json.loads(flag) for flag in flags or [])
            few = [batch for batch, _ in zip(own(), range(1), strict=False)]
            drift = None
            if on_gpu and group.rank == 0:
                sides = [
                    ("GPU", on_gpu(work, iter(few), group, SILENT).statistics),
                    ("CPU", measure_on_cpu(work, iter(few), group, SILENT).statistics),
                ]
                contexts = [
                    QuantContext.of_amax(
                        activation_ranges(opened.plan.activations, statistics, calibrator)[0], label=label
                    )
                    for label, statistics in sides
                ]
                drift = compare(contexts, Tolerance())
            times = group.gather_text("seconds of the pass", json.dumps(seconds))
        if group.rank == 0:
            report = {
                "model": model,
                "runtime": type(on_gpu._model).name if on_gpu else "onnxruntime on the CPU",
                "backend": group.transport.backend,
                "ranks": group.size,
                "devices": [peer.device for peer in group.peers],
                "samples": found.samples,
                "batches": found.batches,
                "tensors": len(work.tensors),
                "statistics": found.statistics,
                "digest": found.digest,
                "same_batch_identical": found.scenarios[0].identical,
                "cpu_binned_identical": cpu_binned,
                "pass_seconds": [json.loads(text) for text in times or []],
                "merge_seconds": found.merge_seconds,
                "scenarios": [scenario.model_dump(mode="json") for scenario in found.scenarios],
                "cpu_drift": None
                if drift is None
                else {"within": drift.rate, "largest": drift.worst.relative, "tensor": drift.worst.tensor},
            }
    if report:
        out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


FAULTS = {
    "kill-batch": "rank 1 .*died",
    "kill-merge": "rank 1 .*died",
    "stop-batch": "rank 1 .*no sign of life",
    "hang": "rank 1 .*stalls",
    "other-order": "another data in rank|rank [01] has the same samples in another order",
    "other-model": "another model in rank",
    "delay": "",
}
"""What the one reason has to say; nothing: the run has to succeed."""


def judge_fault(kind: str, folder: Path) -> dict[str, Any]:
    """From the output, the exit status and the wall time that gpu_nccl.sh kept."""
    import re

    text = (folder / f"{kind}.log").read_text()
    status, seconds = (folder / f"{kind}.end").read_text().split()
    said = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    result = (folder / f"{kind}.json").exists()
    pattern = FAULTS[kind]
    if pattern:
        good = int(status) != 0 and not result and len(said) == 1 and re.search(pattern, said[0]) is not None
    else:
        good = int(status) == 0 and result and not said
    return {
        "fault": kind,
        "seconds": float(seconds),
        "status": int(status),
        "said": said,
        "passed": good and float(seconds) < 60,
    }


@main.command()
@click.option("--runs", type=click.Path(path_type=Path), required=True)
@click.option("--gpus", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def report(runs: Path, gpus: int, out: Path) -> None:
    """Tables of all runs; exit code 1 when anything differs that should not."""
    columns = ("model", "GPUs", "runtime", "pass", "merge", "ranks", "one GPU", "binned on the CPU", "CPU float model")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    measured, good = [], True
    for model in MODELS:
        one: dict[str, Any] | None = None
        for count in range(1, gpus + 1):
            path = runs / f"{model}-{count}.json"
            if not path.exists():
                lines.append(f"| {model} | {count} | FAILED |" + " - |" * (len(columns) - 3))
                good = False
                continue
            run = json.loads(path.read_text())
            one = one or run
            alike = (run["statistics"], run["digest"]) == (one["statistics"], one["digest"])
            good &= alike and run["cpu_binned_identical"] is not False and run["same_batch_identical"]
            measured.append({**run, "equal_to_one": alike})
            drift = run["cpu_drift"]
            cells = [
                model,
                f"{run['ranks']} over {run['backend']}",
                run["runtime"],
                f"{max(run['pass_seconds']):.2f} s ({run['samples'] / max(run['pass_seconds']):.0f} images/s)",
                f"{1e3 * run['merge_seconds']:.0f} ms",
                "bit for bit",
                "bit for bit" if alike else "NO",
                {True: "bit for bit", False: "NO", None: "-"}[run["cpu_binned_identical"]],
                f"{100 * drift['within']:.0f} % within 1e-5, largest {100 * drift['largest']:.2g} %" if drift else "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    faults = [judge_fault(kind, runs) for kind in FAULTS if (runs / f"{kind}.log").exists()]
    lines += ["", "| fault on rank 1 of 2 | ended after | verdict | reason |", "|---|---|---|---|"]
    for each in faults:
        verdict = "as it should" if each["passed"] else "WRONG"
        reason = " / ".join(each["said"]) or "none: the run succeeded"
        lines.append(f"| {each['fault']} | {each['seconds']:.0f} s | {verdict} | {reason} |")
        good &= each["passed"]
    text = "\n".join(lines) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "nccl.md").write_text(text)
    (out / "nccl.json").write_text(json.dumps({"runs": measured, "faults": faults, "passed": good}, indent=1) + "\n")
    click.echo(text)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
