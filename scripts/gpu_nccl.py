#!/usr/bin/env python3
"""Calibration over GPUs with NCCL: the same bits on every rank and on one GPU, near the CPU's, and what faults do.

    gpu_nccl.py pack --out .gpu/nccl               here: EfficientNet-Lite0 and photographs, 27 MB
    gpu_nccl.py images --from .gpu/nccl --at DIR   there: the calibration data as one array, and wrong ones
    gpu_nccl.py models --from .gpu/nccl --at DIR   there: ResNet-50 with seeded weights; both models as calibrated
    gpu_nccl.py ranks --at DIR                     there, under torchrun: `quantize calibrate`, `quantize consistency`
    gpu_nccl.py cpu --at DIR                       there: the same calibration on the CPU
    gpu_nccl.py fault --kind KIND --at DIR         there, under torchrun: a run that is broken in rank 1
    gpu_nccl.py compare --at DIR                   there: `quantize consistency` over what these have written
    gpu_nccl.py report --at DIR --out OUT          there: nccl.md and nccl.json of all that is finished

scripts/gpu_nccl.sh does all of it there; it can do so on CPUs over gloo, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
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
CALIBRATORS = ("entropy", "minmax", "percentile")
SIDE = 224
BATCH = 32
FEW, FEW_BATCH = 256, 16
"""Samples of the runs that are broken."""
BITS_BATCHES = 3
"""Batches that each GPU's kernels and the CPU bin both."""
PROFILE = f"x=1x3x{SIDE}x{SIDE},8x3x{SIDE}x{SIDE},64x3x{SIDE}x{SIDE}"
DRIFT_RTOL = 0.01
"""GPU and CPU round activations differently: this is what their scales are compared by."""

DIR = click.option("--at", "folder", type=click.Path(path_type=Path), required=True)
DEVICE = click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
SAMPLES = click.option("--samples", type=click.IntRange(1), default=2048, show_default=True)


@click.group()
def main() -> None:
    """See the top of the file."""


# Here


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--images", type=click.Path(path_type=Path), default=ROOT.parent / "shared" / "data" / "imagenet500")
@click.option("--count", default=64, show_default=True)
def pack(out: Path, images: Path, count: int) -> None:
    """Write EfficientNet-Lite0 as ONNX, and photographs as pixels (decoders differ between machines)."""
    from PIL import Image

    from pipeline import export
    from pipeline.config import Profile

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = f"{ROOT}/scripts/models.py:efficientnet_lite0"
        result = export.run(model, profiles=(Profile.parse(PROFILE),), folder=Path(folder))
        shutil.copyfile(result.model_path, out / "efficientnet-lite0.onnx")
    files = sorted(images.glob("*.jpg"))
    chosen = files[:: max(1, len(files) // count)][:count]
    np.savez_compressed(out / "photographs.npz", *[np.asarray(Image.open(path).convert("RGB")) for path in chosen])
    size = sum(path.stat().st_size for path in out.iterdir())
    click.echo(f"{out}: {size / 1e6:.1f} MB, {len(chosen)} photographs")


# There


@main.command()
@click.option("--from", "source", type=click.Path(path_type=Path), required=True)
@DIR
@SAMPLES
def images(source: Path, folder: Path, samples: int) -> None:
    """Random crops, (pixel - 127) / 128; a few of them, the few in another order, and with one changed pixel."""
    with np.load(source / "photographs.npz") as archive:
        photographs = [archive[name] for name in archive.files]
    generator = np.random.default_rng(0)
    data = np.lib.format.open_memmap(folder / "images.npy", "w+", np.float32, (max(samples, FEW), 3, SIDE, SIDE))
    for number in range(len(data)):
        pixels = photographs[number % len(photographs)]
        top, left = (int(generator.integers(0, size - SIDE + 1)) for size in pixels.shape[:2])
        crop = pixels[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1)
        data[number] = (crop.astype(np.float32) - 127.0) / 128.0
    data.flush()
    few = np.array(data[:FEW])
    np.save(folder / "few.npy", few)
    few[3, 0, 5, 7] += np.float32(0.25)
    np.save(folder / "other-image.npy", few)
    few[3, 0, 5, 7] -= np.float32(0.25)
    few[[3, FEW - 5]] = few[[FEW - 5, 3]]
    np.save(folder / "other-order.npy", few)
    click.echo(f"{len(data)} samples of {len(photographs)} photographs")


@main.command()
@click.option("--from", "source", type=click.Path(path_type=Path), required=True)
@DIR
def models(source: Path, folder: Path) -> None:
    """ResNet-50 with seeded random weights; the float models as they are calibrated, and their placement plans."""
    import torch

    from pipeline.consistency.opening import open_work
    from tests.zoo import convnets
    from tests.zoo.export import export_onnx

    shutil.copyfile(source / "efficientnet-lite0.onnx", folder / "efficientnet-lite0.onnx")
    torch.manual_seed(0)
    export_onnx(
        convnets.resnet50(classes=1000), {"x": torch.zeros(2, 3, SIDE, SIDE)}, folder / "resnet50.onnx",
        dynamic_axes={"x": {0: "batch"}, "output": {0: "batch"}},
    )  # fmt: skip
    few = folder / "two.npy"
    np.save(few, np.random.default_rng(1).uniform(-1, 1, (2, 3, SIDE, SIDE)).astype(np.float32))
    for model in MODELS:
        opened = open_work(str(folder / f"{model}.onnx"), str(few), folder=folder / model, samples=2)
        (folder / model / "plan.json").write_text(opened.plan.model_dump_json())
        (folder / model / "work.json").write_text(
            json.dumps({"model": str(opened.work.model), "tensors": list(opened.work.tensors)})
        )
        click.echo(f"{model}: {len(opened.work.tensors)} tensors")


_sessions = 0


def quantize(command: click.Command, arguments: list[str]) -> tuple[str, float]:
    """A command inside this process, which a rank can give several of; its output and wall seconds.

    A mismatch (exit code 1) is in the output, too. Each command has its own names in the ranks' common store, as an
    attempt of torchrun has, and starts with all cores.
    """
    global _sessions
    _sessions += 1
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(_sessions)
    cores = os.sched_getaffinity(0)
    output, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            command.main(arguments, standalone_mode=False)
    finally:
        os.sched_setaffinity(0, cores)
    return output.getvalue(), time.perf_counter() - start


def same_bits(model: Path, tensors: list[str], images: np.ndarray, device: int) -> dict[str, Any]:
    """Statistics of a few batches by the GPU's kernels and by the CPU, of the very same activations."""
    import pycuda.driver as cuda

    from calibrators import TensorStatistics
    from calibrators.accumulate import add_batch
    from pipeline.activations_cuda import CudaActivationPass

    expected = {name: TensorStatistics() for name in tensors}
    with CudaActivationPass(model, tensors, device=device) as own:
        for index in range(BITS_BATCHES):
            feeds = {"x": np.ascontiguousarray(images[index * FEW_BATCH : (index + 1) * FEW_BATCH])}
            binding = own.bind(feeds)
            own.upload(feeds, binding)
            own.forward(binding, index)
            own.take(binding, index)
            own.statistics.stream.synchronize()
            for name, array in zip(tensors, binding.arrays, strict=True):
                values = np.empty(array.elements, array.dtype)
                cuda.memcpy_dtoh(values, array.pointer)
                add_batch(expected[name], values, index)
        found = own.collect()
    return {"tensors": len(tensors), "different": [name for name in tensors if found[name] != expected[name]]}


def common(folder: Path, model: str, samples: int) -> list[str]:
    return [str(folder / f"{model}.onnx"), "--data", str(folder / "images.npy"), "--samples", str(samples),
            "--batch-size", str(BATCH), "--rank-timeout", "60"]  # fmt: skip


@main.command()
@DIR
@DEVICE
@SAMPLES
@click.option("--model", "chosen", multiple=True, default=MODELS, show_default=True)
def ranks(folder: Path, device: str, samples: int, chosen: tuple[str, ...]) -> None:
    """Under torchrun: both commands for each model, then each GPU's kernels against the CPU."""
    from pipeline.cli.calibrate import command as calibrate
    from pipeline.cli.consistency import command as consistency

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for model in chosen:
        base = folder / f"{model}-{size}"
        options = [*common(folder, model, samples), "--device", device, "--json", "-q"]
        _, calibrate_s = quantize(calibrate, [*options, "-o", f"{base}.npz"])
        text, consistency_s = quantize(consistency, [*options, "--save", f"{base}.context.json"])
        if rank == 0:
            report = {**json.loads(text), "command_seconds": {"calibrate": calibrate_s, "consistency": consistency_s}}
            base.with_name(f"{base.name}.json").write_text(json.dumps(report, indent=1) + "\n")
            click.echo(f"{model}, {size} ranks: calibrate {calibrate_s:.1f} s, consistency {consistency_s:.1f} s")
    if device == "cuda":
        few = np.load(folder / "few.npy", mmap_mode="r")
        for model in chosen:
            work = json.loads((folder / model / "work.json").read_text())
            found = same_bits(Path(work["model"]), work["tensors"], few, int(os.environ["LOCAL_RANK"]))
            (folder / f"{model}-{size}.rank{rank}.bits").write_text(json.dumps(found))


@main.command()
@DIR
@SAMPLES
def cpu(folder: Path, samples: int) -> None:
    """The same calibration in onnxruntime's CPU provider."""
    from pipeline.cli.calibrate import command as calibrate

    for model in MODELS:
        options = [*common(folder, model, samples), "--device", "cpu", "-q"]
        _, seconds = quantize(calibrate, [*options, "-o", str(folder / f"{model}-cpu.npz")])
        click.echo(f"{model} on the CPU: {seconds:.1f} s")


FAULTS = {
    "none": "",
    "kill-batch": r"rank 1 .*died",
    "kill-merge": r"rank 1 .*died",
    "other-image": r"another data in rank.*sample 3 of rank [01] is another one",
    "other-order": r"another data in rank.*rank [01] has the same samples in another order",
    "other-model": r"another model in rank",
    "stop-batch": r"rank 1 .*no sign of life",
    "hang": r"rank 1 .*stalls",
    "delay": "",
}
"""What the one reason has to say; nothing: the run has to succeed."""


@main.command()
@click.option("--kind", type=click.Choice(list(FAULTS)), required=True)
@DIR
@DEVICE
@click.option("--rank-timeout", default=15.0, show_default=True)
@click.option("--victim", default=1, show_default=True)
def fault(kind: str, folder: Path, device: str, rank_timeout: float, victim: int) -> None:
    """Under torchrun: `quantize consistency` on a few samples, with harm done to one rank.

    A file says when: what another model or other data do begins when the rank has them ready to be compared.
    """
    import calibrators
    from pipeline.cli.ranks import rank_session
    from pipeline.consistency import Tolerance, exchange
    from pipeline.consistency.group import PREPARING
    from pipeline.consistency.measure import measure_on
    from pipeline.consistency.opening import open_work
    from pipeline.consistency.ranks import check_ranks

    def moment() -> None:
        (folder / f"{kind}.moment").write_text(str(time.time()))

    def act() -> None:
        moment()
        if kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop-batch":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1e6 if kind == "hang" else 4.0)

    def disturbed(batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 1:  # past the one batch that every rank runs
                act()
            yield batch

    def measure(work: Any, batches: Iterator[Any], group: Any, progress: Any) -> Any:
        return measure_on(device)(work, disturbed(batches) if in_batch else batches, group, progress)

    with rank_session(backend="auto" if device == "cuda" else "gloo", limit_s=rank_timeout) as group:
        mine = kind if group.rank == victim else "none"
        in_batch = mine in ("kill-batch", "stop-batch", "hang", "delay")
        if mine == "kill-merge":
            exchange.pack = lambda *_: act()  # type: ignore[assignment,misc,return-value]
        data = f"{mine}.npy" if mine in ("other-image", "other-order") else "few.npy"
        model = MODELS[1] if mine == "other-model" else MODELS[0]
        group.phase("preparing the model", patience=PREPARING)
        with tempfile.TemporaryDirectory() as scratch:
            opened = open_work(
                str(folder / f"{model}.onnx"), str(folder / data), folder=Path(scratch), samples=FEW,
                batch_size=FEW_BATCH,
            )  # fmt: skip
            if mine.startswith("other"):
                moment()
            found = check_ranks(
                group, opened, calibrators.get("entropy"), tolerance=Tolerance(), measure=measure
            )
        if group.rank == 0:
            (folder / f"{kind}.result").write_text(found.statistics)


@main.command()
@DIR
@click.option("--gpus", default=2, show_default=True)
def compare(folder: Path, gpus: int) -> None:
    """`quantize consistency` over the calibrations that are there: several GPUs against one, one against the CPU."""
    from calibrators import get, load_statistics
    from pipeline.cli.consistency import command as consistency
    from pipeline.consistency import QuantContext, load_context, save_context
    from pipeline.placement import PlacementPlan
    from pipeline.quantize import activation_ranges

    found: dict[str, Any] = {}
    for model in MODELS:
        plan = PlacementPlan.model_validate_json((folder / model / "plan.json").read_text())
        whos = [who for who in (*map(str, range(1, gpus + 1)), "cpu") if (folder / f"{model}-{who}.npz").exists()]
        files = {who: folder / f"{model}-{who}.npz" for who in whos}
        for calibrator in CALIBRATORS:
            for who, path in files.items():
                ranges, _ = activation_ranges(plan.activations, load_statistics(path)[0], get(calibrator))
                context = QuantContext.of_amax(ranges, label=who, calibrator=calibrator, params=get(calibrator).params)
                save_context(folder / f"{model}-{who}-{calibrator}.json", context)
        rows = found[model] = {
            "sha256": {who: hashlib.sha256(path.read_bytes()).hexdigest() for who, path in files.items()},
            "pairs": [],
        }
        for calibrator in CALIBRATORS:
            for other in whos[1:]:
                arguments = [str(folder / f"{model}-{who}-{calibrator}.json") for who in ("1", other)]
                exact = other != "cpu"
                limits = ["--atol", "0" if exact else "1e-12", "--rtol", "0" if exact else str(DRIFT_RTOL)]
                out = ["--out", str(folder / f"{model}-1-{other}-{calibrator}")]
                text, _ = quantize(consistency, [*arguments, *limits, "--json", *out])
                shown = json.loads(text)
                relative = [row["relative"] for row in shown["rows"]]
                rows["pairs"].append(
                    {
                        "calibrator": calibrator, "with": other, "tensors": len(relative), "rate": shown["rate"],
                        "identical": len(set(shown["digests"])) == 1, "largest": max(relative),
                        "median": float(np.median(relative)),
                        "within_1e-5": sum(value <= 1e-5 for value in relative) / len(relative),
                    }
                )  # fmt: skip
        rows["commands_agree"] = {
            who: load_context(folder / f"{model}-{who}.context.json").scales_digest
            == load_context(folder / f"{model}-{who}-entropy.json").scales_digest
            for who in whos
            if (folder / f"{model}-{who}.context.json").exists()
        }
    (folder / "compare.json").write_text(json.dumps(found, indent=1) + "\n")
    click.echo(json.dumps(found, indent=1))


def judge_fault(kind: str, folder: Path) -> dict[str, Any]:
    """From the output, the exit status and the times that gpu_nccl.sh kept."""
    text = (folder / f"{kind}.log").read_text()
    status, start, end = (folder / f"{kind}.end").read_text().split()
    moment = folder / f"{kind}.moment"
    said = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    result = folder / f"{kind}.result"
    digest = result.read_text() if result.exists() else None
    if FAULTS[kind]:
        good = int(status) != 0 and digest is None and len(said) == 1 and re.search(FAULTS[kind], said[0]) is not None
    else:
        undisturbed = folder / "none.result"
        good = int(status) == 0 and not said and undisturbed.exists() and digest == undisturbed.read_text()
    seconds = float(end) - float(start)
    after = float(end) - float(moment.read_text()) if moment.exists() else seconds
    return {
        "fault": kind,
        "seconds": round(seconds, 1),
        "seconds_after_fault": round(after, 1) if moment.exists() else None,
        "status": int(status),
        "said": said,
        "digest": digest,
        "passed": good and (kind == "none" or after < 60),
    }


def rate(run: dict[str, Any]) -> float | None:
    """Images a second of all ranks together, without the model's loading and the first batch.

    None: no rank has a second one.
    """
    size = len(run["seconds"])
    batches = run["batches"] / size - 1
    if batches <= 0:
        return None
    slowest = max(whole - first for whole, first in zip(run["seconds"], run["first_seconds"], strict=True))
    return float(size * batches * run["samples"] / run["batches"] / slowest)


@main.command()
@DIR
@click.option("--gpus", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def report(folder: Path, gpus: int, out: Path) -> None:
    """Tables of all that is finished; exit code 1 when anything is missing or differs that should not."""
    compared = json.loads(path.read_text()) if (path := folder / "compare.json").exists() else {}
    lines = [
        "| model | ranks | after the first batch | whole pass | merge | statistics as one GPU | file as one GPU "
        "| kernels as the CPU |",
        "|---" * 8 + "|",
    ]
    runs: list[dict[str, Any]] = []
    missing: list[str] = []
    wrong: list[str] = []

    def check(what: str, flag: bool | None) -> str:
        if not flag:
            (missing if flag is None else wrong).append(what)
        return {True: "bit for bit", False: "NO", None: "not run"}[flag]

    for model in MODELS:
        one: dict[str, Any] | None = None
        for count in range(1, gpus + 1):
            path = folder / f"{model}-{count}.json"
            name = f"{model} on {count}"
            if not path.exists():
                missing.append(name)
                continue
            run = json.loads(path.read_text())
            one = one or (run if count == 1 else None)
            files = compared.get(model, {}).get("sha256", {})
            bits = [json.loads(each.read_text()) for each in sorted(folder.glob(f"{model}-{count}.rank*.bits"))]
            kernels = all(not each["different"] for each in bits) if len(bits) == count else None
            alike = None if one is None else (run["statistics"], run["digest"]) == (one["statistics"], one["digest"])
            same_file = files[str(count)] == files["1"] if {str(count), "1"} <= set(files) else None
            on_gpu = run["backend"] == "nccl"
            check(f"{name}: every rank runs the first batch alike", run["passed"])
            speed = rate(run)
            runs.append({"model": model, "ranks": count, "images_per_s": speed, "bits": bits, **run})
            cells = [
                model,
                f"{count} over {run['backend']}",
                f"{speed:.0f} images/s ({run['samples'] / speed:.2f} s for {run['samples']})" if speed else "-",
                f"{max(run['seconds']):.2f} s",
                f"{1e3 * run['merge_seconds']:.0f} ms",
                check(f"{name}: statistics as on one", alike),
                check(f"{name}: calibration file as of one", same_file),
                check(f"{name}: kernels as the CPU", kernels) if on_gpu else "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "", "| model | calibrator | 1 GPU with | tensors | identical | within 1e-5 | largest | median |",
        "|---" * 8 + "|",
    ]  # fmt: skip
    for model in MODELS:
        found = compared.get(model, {"pairs": [], "commands_agree": {}})
        partners = {pair["with"] for pair in found["pairs"]}
        missing += [f"{model}: comparison with {who}" for who in (*map(str, range(2, gpus + 1)), "cpu")
                    if who not in partners]  # fmt: skip
        for who, flag in found["commands_agree"].items():
            check(f"{model} on {who}: calibrate and consistency give the same scales", flag)
        for pair in found["pairs"]:
            if pair["with"] != "cpu":
                check(f"{model}: {pair['calibrator']} scales of {pair['with']}", pair["identical"])
            lines.append(
                f"| {model} | {pair['calibrator']} | {pair['with']} | {pair['tensors']} | {pair['identical']} "
                f"| {100 * pair['within_1e-5']:.1f} % | {pair['largest']:.2g} | {pair['median']:.2g} |"
            )
    faults = [judge_fault(kind, folder) for kind in FAULTS if (folder / f"{kind}.end").exists()]
    missing += [f"fault {kind}" for kind in FAULTS if gpus > 1 and not (folder / f"{kind}.end").exists()]
    lines += ["", "| fault in rank 1 | run ended after | after the fault | verdict | reason |", "|---" * 5 + "|"]
    for each in faults:
        check(f"fault {each['fault']}", each["passed"])
        after = "-" if each["seconds_after_fault"] is None else f"{each['seconds_after_fault']:.1f} s"
        reason = " / ".join(each["said"]) or "none: the run succeeded"
        verdict = "as it should" if each["passed"] else "WRONG"
        lines.append(f"| {each['fault']} | {each['seconds']:.1f} s | {after} | {verdict} | {reason} |")
    lines += ["", f"wrong: {'; '.join(wrong) or 'nothing'}", f"not run: {'; '.join(missing) or 'nothing'}"]
    text = "\n".join(lines) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "nccl.md").write_text(text)
    content = {"runs": runs, "compared": compared, "faults": faults, "wrong": wrong, "missing": missing}
    (out / "nccl.json").write_text(json.dumps(content, indent=1) + "\n")
    click.echo(text)
    raise SystemExit(1 if wrong or missing else 0)


if __name__ == "__main__":
    main()
