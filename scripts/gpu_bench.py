#!/usr/bin/env python3
"""Measure engines on a GPU machine that has no network: FP32, FP16, implicit INT8 and the pipeline's Q/DQ graph.

    gpu_bench.py prepare --model NAME=ARTIFACT ... --images FOLDER --out PACK    here: needs onnx and pillow
    gpu_bench.py receive SLICE --at DIR                                         there: once for each PACK/slice-NN
    gpu_bench.py run --at DIR --out OUT                                         there: needs TensorRT and PyCUDA only

`prepare` writes each model's FP32 and INT8 graph with their common weights stored once, the test images, those that
calibrate, the predictions that the Q/DQ graph gives in onnxruntime and the timing caches of earlier runs, cut into
slices of 48 MB; a rival's graph newer than opset 17 is written in opset 17 and proved to compute the same. `run` goes
on where an earlier call stopped (engines and timing caches stay in DIR), ends inside --budget-s, and writes
OUT/results.json after every step, OUT/table.md at the end, and OUT/details.tar.gz with layer tables, layer times and
timing caches.
Implicit INT8 has the ranges of TensorRT's own calibrator (`gpu_calibrator.py`).

The variant `fastest` is the runner that picks by shape between the plans of int8 and fp16, as after `quantize build
--fastest`: fp16 for the profiles at whose optimum it was measured to be faster, int8 for the others. It is measured
interleaved with both.

Beside every engine int8's plan is measured a second time, from an engine that is loaded anew (`int8-again`): the same
kernels in other memory. What lies between these two is no difference between engines.

The variants of `run --first` are built and measured before the others are built; what came later is measured again
together with them, since only figures of one interleaved measurement are ranked. Several runs on one card wait for each
other: builds may run side by side, a measurement has the card to itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu_common import PACK, RIVALS
from scripts.gpu_run import FASTEST, FIRST, VARIANTS, Bench


def _prepare(args: argparse.Namespace) -> None:
    from scripts.gpu_pack import prepare

    prepare(args)


def receive(args: argparse.Namespace) -> None:
    args.at.mkdir(parents=True, exist_ok=True)
    for part in args.slice.glob(f"{PACK}.*"):
        (args.at / part.name).write_bytes(part.read_bytes())
    print(len(list(args.at.glob(f"{PACK}.*"))), "slices")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("prepare")
    one.add_argument(
        "--model", action="append", required=True, help="NAME=ARTIFACT[:MEAN:STD], numbers joined by commas"
    )
    one.add_argument("--rival", action="append", default=[], help=f"MODEL:RIVAL=FILE.onnx; RIVAL: {', '.join(RIVALS)}")
    one.add_argument("--images", type=Path, required=True, help="folder with labels.csv (file,class_index)")
    one.add_argument("--skip", type=int, default=128, help="images calibrated on (evenly spaced), left out here")
    one.add_argument("--size", type=int, default=224)
    one.add_argument(
        "--predict", nargs="*", default=[], help="models of which onnxruntime's predictions are stored too"
    )
    one.add_argument("--out", type=Path, required=True)
    one.add_argument(
        "--timing-cache",
        action="append",
        default=[],
        help="[MODEL=]FILE of an earlier run on such a card, with its name unchanged; builds take a fraction then",
    )
    one.set_defaults(action=_prepare)
    two = commands.add_parser("receive")
    two.add_argument("slice", type=Path)
    two.add_argument("--at", type=Path, required=True)
    two.set_defaults(action=receive)
    three = commands.add_parser("run")
    three.add_argument("--at", type=Path, required=True)
    three.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    three.add_argument("--budget-s", type=float, default=560)
    three.add_argument("--reserve-s", type=float, default=90, help="kept for measuring: builds end before")
    three.add_argument("--models", nargs="*", default=[])
    every = (*VARIANTS, FASTEST)
    three.add_argument("--variants", nargs="*", default=list(every), choices=every)
    three.add_argument("--first", nargs="*", default=list(FIRST), choices=VARIANTS, help="built and measured first")
    three.add_argument("--batches", type=lambda text: [int(v) for v in text.split(",")], default=[1, 8, 64, 128])
    three.add_argument(
        "--profiles", default="1:1:1,2:64:128", help="MIN:OPT:MAX batch of each profile, joined by commas"
    )
    three.add_argument("--level", type=int, default=None, help="builder optimisation level")
    three.add_argument(
        "--timing-iterations", type=int, default=None, help="runs that the builder's choice of a kernel is the mean of"
    )
    three.add_argument("--rounds", type=int, default=5)
    three.add_argument("--in-flight", type=int, default=3)
    three.set_defaults(action=lambda args: Bench(args).run())
    args = parser.parse_args()
    if hasattr(args, "out"):
        args.out.mkdir(parents=True, exist_ok=True)
    args.action(args)


if __name__ == "__main__":
    main()
