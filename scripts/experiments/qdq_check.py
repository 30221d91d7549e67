"""Build every export of ``qdq_exports.py`` into an artifact, and tell in a table what became of it.

    python scripts/experiments/qdq_check.py exports [--match convnet-brevitas]

For each ``<network>-<tool>-<form>.onnx`` in the folder: ``quantize build`` for the targets onnx and rtx; whether a pair
was added; whether ``model.int8.onnx`` computes the same numbers as the export (in onnxruntime, optimisation off); and
how many convolutions and matrix products the TensorRT-RTX plan has in INT8, of how many.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

NETWORKS = ("convnet", "block", "resnet18")
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def outputs(path: Path, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float64 first output, with graph optimisation off."""
    from pipeline.core.ort import make_session

    session = make_session(path, optimise=False)
    name, kind = session.get_inputs()[0].name, session.get_inputs()[0].type
    found = session.run(None, {name: x.astype(np.float16 if kind == "tensor(float16)" else np.float32)})[0]
    return np.asarray(found, np.float64)


def quantizers(path: Path) -> int:
    import onnx

    return sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)


def distance(export: Path, built: Path, x: np.ndarray[Any, Any]) -> str:
    before, after = outputs(export, x), outputs(built, x)
    if np.array_equal(before, after):
        return "equal bits"
    return f"relative L2 {np.linalg.norm(before - after) / np.linalg.norm(before):.1e}"


def check(export: Path, data: Path, out: Path) -> tuple[str, list[str]]:
    """A row of the table, and what the build said."""
    from rtx_int8_layers import int8_nodes, read_plan

    shape = "x".join(map(str, np.load(data, mmap_mode="r").shape[1:]))
    command = [sys.executable, "-m", "pipeline.cli", "build", str(export), "--data", str(data), "--out", str(out),
               "--target", "onnx", "--target", "rtx", "--samples", "32", "--verify-samples", "16",
               "--profile", f"x=1x{shape},8x{shape},16x{shape}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        return f"| {export.stem} | exit {done.returncode} | | | | |", said
    plan = json.loads((out / "placement.json").read_text())
    added = quantizers(out / "model.int8.onnx") - quantizers(export)
    layers = [item for item in plan["decisions"] if item["op"] in WEIGHTED]
    intended = [item["node"] for item in layers if item["quantized"]]
    real = int8_nodes(read_plan(next(out.glob("**/model.plan")).read_bytes()))
    same = distance(export, out / "model.int8.onnx", np.load(data)[:16])
    row = f"| {export.stem} | {'prequantised' if plan['prequantized'] else 'FLOAT'} | {added:+d} | {same} "
    missed = [name for name in intended if name not in real]
    others = [item["node"] for item in layers if item["node"] in real and not item["quantized"]]
    plan_says = f"{len(intended) - len(missed)}" + (f", not {missed}" if missed else "")
    return f"{row}| {len(intended)} of {len(layers)} | {plan_says}{f', also {others}' if others else ''} |", said


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--match", default="", help="Only exports with this in their name.")
    parser.add_argument("--verbose", action="store_true", help="All that each build said.")
    args = parser.parse_args()
    folder = args.folder.resolve()
    print("| export | read as | pairs added | numbers | quantised layers | INT8 in the RTX plan |")
    print("| --- | --- | --- | --- | --- | --- |")
    for export in sorted(folder.glob("*.onnx")):
        network, tool, *_ = export.stem.split("-")
        if network not in NETWORKS or tool == "float" or args.match not in export.stem:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            row, said = check(export, folder / f"{network}.npy", Path(temporary) / "artifact")
        print(row)
        for line in said:
            if args.verbose or row.count("exit") or "warning" in line or "note" in line:
                print("    ", line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
