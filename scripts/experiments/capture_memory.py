"""Peak memory of the per-layer error capture of a large network: `python scripts/experiments/capture_memory.py`.

Builds a chain of convolutions with Q/DQ, captures every layer of the FP32 and the INT8 graph on random samples and
prints the largest resident set of the process, before and after. Options: --layers N [300], --samples N [256],
--width CHANNELS [16], --side PIXELS [32].
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipeline.core.memory import peak_resident_bytes
from pipeline.data.batching import Batch
from pipeline.errors.graphs import Graph
from pipeline.errors.layers import layers_of_graph
from pipeline.errors.measure import measure
from tests.errors.networks import chain

BATCH = 8


def batches(samples: int, side: int) -> Iterator[Batch]:
    random = np.random.default_rng(0)
    for start in range(0, samples, BATCH):
        count = min(BATCH, samples - start)
        values = random.normal(0, 1, (count, 3, side, side)).astype(np.float32)
        yield Batch(start // BATCH, tuple(range(start, start + count)), {"x": values})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=300)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--side", type=int, default=32)
    given = parser.parse_args()
    network = chain(given.layers, width=given.width, side=given.side)
    int8 = Graph(network.int8)
    layers = layers_of_graph(int8)
    activations = given.layers * given.width * given.side**2 * 4
    print(f"{len(layers)} layers, {activations / 1e6:.0f} MB of activations for each sample and graph")
    print(f"before: {peak_resident_bytes() / 1e6:.0f} MB")
    start, cpu = time.monotonic(), time.process_time()
    measured = measure(Graph(network.fp32), int8, layers, batches(given.samples, given.side))
    wall, cpu = time.monotonic() - start, time.process_time() - cpu
    rows = len(measured.table.frame())
    peak = peak_resident_bytes() / 1e6
    print(f"after {given.samples} samples: {peak:.0f} MB, {rows} rows, {cpu:.0f} CPU s, {wall:.0f} s")


if __name__ == "__main__":
    main()
