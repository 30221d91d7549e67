#!/usr/bin/env python3
"""Are the scales that a real engine uses those of its artifact? On a GPU machine; numpy, pydantic, TensorRT and PyCUDA.

    gpu_on_device.py pack NAME=ARTIFACT... --out PACK                 here: the parts of the artifacts that it needs
    gpu_on_device.py run PACK --out OUT [--bench DIR...]              there

For each artifact a probe is built (an engine of the same Q/DQ graph that returns every DequantizeLinear's output), run
on the recorded samples, and the scale of each tensor is measured from its values. The outputs of the artifact's own
engine, or of the probe where there is none for the target, are compared with the recorded ones: what `quantize verify
--on-device` does. A graph too large for PACK, and a TensorRT engine, are taken from the first DIR of ``gpu_bench.py``
that has NAME. Writes OUT/on_device.md and OUT/on_device.json after every artifact; exit code 1 when a scale or an
output is wrong or an artifact could not be checked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.artifact import INT8_MODEL, MANIFEST, SAMPLES, SCALES, Artifact, engine_folder
from pipeline.consistency.device import DEFAULT_RTOL, DeviceCheck, check_on_device, check_probe, device_text
from pipeline.consistency.loading import context_of_artifact
from pipeline.core.errors import InputError, QuantizeError
from pipeline.core.files import link_or_copy

SMALL = 30_000_000
"""Bytes of a graph that goes into the pack."""
WEIGHTS = "weights.bin"
"""Where ``gpu_pack.py`` puts the weights of all graphs of a model."""
COLUMNS = ("artifact", "quantised", "visible", "within 1e-5", "largest difference", "too few levels", "wrong",
           "invisible", "engine", "outputs", "seconds")  # fmt: skip


def pack(artifacts: list[str], out: Path) -> None:
    for text in artifacts:
        name, _, source = text.partition("=")
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        large = (Path(source) / INT8_MODEL).stat().st_size > SMALL
        for file in (MANIFEST, SCALES, SAMPLES, *(() if large else (INT8_MODEL,))):
            shutil.copyfile(Path(source) / file, folder / file)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder}: {size / 1e6:.1f} MB" + (f", {INT8_MODEL} comes from gpu_bench.py's pack" if large else ""))


def assembled(source: Path, benches: list[Path], target: str, work: Path) -> Path:
    """The artifact in a folder of its own, with the graph and the engine of the bench where they are there."""
    folder = work / source.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    added = []
    if not (folder / INT8_MODEL).exists():
        graphs = [graph for bench in benches if (graph := bench / source.name / "int8.onnx").exists()]
        if not graphs:
            raise InputError(f"{source} has no {INT8_MODEL}", remedy="give gpu_bench.py's folder with --bench")
        link_or_copy(graphs[0], folder / INT8_MODEL)
        link_or_copy(graphs[0].with_name(WEIGHTS), folder / WEIGHTS)
        added += [INT8_MODEL, WEIGHTS]
    engines = [bench / "engines" / source.name / "int8" for bench in benches if target == "tensorrt"]
    for engine in [engine for engine in engines if (engine / "build.json").exists()][:1]:
        place = folder / engine_folder(target)
        place.mkdir(parents=True, exist_ok=True)
        for file in ("model.plan", "build.json"):
            link_or_copy(engine / file, place / file)
            added.append(f"{engine_folder(target)}/{file}")
    if added:
        Artifact.open(folder).updated(files=tuple(added))
    return folder


def check(folder: Path, target: str, probe: Path) -> tuple[DeviceCheck, bool]:
    """The check, and whether it ran the artifact's own engine."""
    plan = f"{engine_folder(target)}/model.plan"
    own = plan in Artifact.open(folder).manifest.files and (folder / plan).exists()
    return (check_on_device if own else check_probe)(folder, target=target, probe=probe, rtol=DEFAULT_RTOL), own


def row(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {name} | {found['error'].splitlines()[0]} |" + " - |" * (len(COLUMNS) - 2)
    right = [scale for scale in found["scales"] if scale["verdict"] == "ok"]
    outputs = ", ".join(f"{o['output']} {o['relative_l2']:.3g} (allowed {o['allowed']:.3g})" for o in found["outputs"])
    cells = [
        name, found["quantised"], len(found["scales"]), len(right),
        f"{max((scale['relative'] for scale in right), default=0.0):.2g}",
        sum(scale["verdict"] == "undetermined" for scale in found["scales"]),
        sum(scale["verdict"] in ("other scale", "not quantised") for scale in found["scales"]),
        len(found["hidden"]), found["engine"], outputs, f"{found['seconds']:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def run(given: argparse.Namespace) -> int:
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    sources = [path for path in sorted(given.pack.iterdir()) if (path / MANIFEST).exists()]
    if not sources:
        raise SystemExit(f"{given.pack} has no artifact")
    for source in sources:
        start = time.monotonic()
        found: dict[str, Any] = {"artifact": source.name, "passed": False}
        try:
            folder = assembled(source, given.bench, given.target, given.work)
            seen, own = check(folder, given.target, given.work / f"{source.name}.probe.plan")
        except QuantizeError as error:
            found["error"] = str(error)
            print(f"{source.name}: {error}", flush=True)
        else:
            activations = [tensor for tensor in context_of_artifact(folder).tensors if tensor.kind == "activation"]
            print(f"{source.name}:\n{device_text(seen)}", flush=True)
            found.update(seen.model_dump(mode="json"))
            found["quantised"] = len(activations)
            shown = {scale.tensor for scale in seen.scales}
            found["hidden"] = [tensor.name for tensor in activations if tensor.name not in shown]
            found["engine"] = "its own" if own else "probe"
            found["passed"] = seen.passed and bool(seen.determined)
        found["seconds"] = time.monotonic() - start
        results.append(found)
        lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [row(each["artifact"], each) for each in results]
        (given.out / "on_device.md").write_text("\n".join(lines) + "\n")
        (given.out / "on_device.json").write_text(json.dumps(results, indent=1) + "\n")
    print((given.out / "on_device.md").read_text())
    return 0 if all(each["passed"] for each in results) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("pack")
    here.add_argument("artifacts", nargs="+", metavar="NAME=ARTIFACT")
    here.add_argument("--out", type=Path, required=True)
    there = commands.add_parser("run")
    there.add_argument("pack", type=Path)
    there.add_argument("--out", type=Path, required=True)
    there.add_argument("--bench", type=Path, nargs="+", default=[])
    there.add_argument("--target", default="tensorrt", choices=["tensorrt", "rtx"])
    there.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "quantize-probes")
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.artifacts, given.out)
        return 0
    given.work.mkdir(parents=True, exist_ok=True)
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
