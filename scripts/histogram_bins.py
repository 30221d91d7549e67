"""How many bins the statistic needs: what each number of them does to the calibrators' results, against exact values.

    python scripts/histogram_bins.py [--activations FILE.npz] [--values 300000]

For percentiles the exact value is that of the sorted values; for entropy, the threshold from 2048 bins made directly
over [0, max |x|]; for mse, the true squared error of the threshold found, over the least of 100 thresholds. All are
differences in per cent, over several distributions (or the arrays in FILE.npz): the median and the worst.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

import calibrators
from calibrators.entropy import CANDIDATE_BINS, least_divergence
from calibrators.statistics import TensorStatistics

Array = np.ndarray
BINS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def distributions(count: int) -> dict[str, Array]:
    random = np.random.default_rng(0)
    normal = random.standard_normal(count)
    return {
        "normal": normal,
        "relu": np.maximum(normal, 0.0),
        "relu6": np.clip(3.0 * normal, 0.0, 6.0),
        "gelu": normal * 0.5 * (1.0 + np.tanh(0.79788456 * (normal + 0.044715 * normal**3))),
        "laplace": random.laplace(size=count),
        "heavy tail": random.standard_t(3, count),
        "mixture": np.where(random.random(count) < 0.99, normal, 20.0 * random.standard_normal(count)),
        "uniform": random.random(count),
        "scaled 1.01": 1.01
        * normal
        / np.abs(normal).max(),  # the maximum just above a power of two: half the bins empty
        "scaled 0.99": 0.99 * normal / np.abs(normal).max(),
    }


def with_bins(x: Array, bins: int) -> TensorStatistics:
    """The statistic of ``x``, but with another number of bins."""
    magnitudes = np.abs(x)
    amax = float(magnitudes.max())
    exponent = math.frexp(amax)[1] - int(math.log2(bins))
    counts = np.bincount((magnitudes * 2.0**-exponent).astype(np.int64), minlength=bins)
    return TensorStatistics(counts, exponent, float(x.min()), float(x.max()), x.size, int((x == 0).sum()))


def squared_error(x: Array, amax: float) -> float:
    scale = amax / 127.0
    return float(np.square(x - scale * np.clip(np.rint(x / scale), -127, 127)).sum())


def exact_entropy(x: Array) -> float:
    amax = float(np.abs(x).max())
    counts = np.histogram(np.abs(x), CANDIDATE_BINS, (0.0, amax))[0].astype(np.float64)
    counts[0] = counts[1]
    return min((least_divergence(counts) + 0.5) * amax / CANDIDATE_BINS, amax)


def measures(x: Array) -> dict[str, Callable[[TensorStatistics], float]]:
    """Per calibrator: the difference from the exact value, in per cent."""
    best = min(squared_error(x, t) for t in np.abs(x).max() * np.linspace(0.01, 1.0, 100))
    entropy = exact_entropy(x)
    found: dict[str, Callable[[TensorStatistics], float]] = {
        "entropy": lambda stats: 100.0 * abs(calibrators.get("entropy").amax(stats) / entropy - 1.0),
        "mse": lambda stats: 100.0 * max(squared_error(x, calibrators.get("mse").amax(stats)) / best - 1.0, 0.0),
    }
    for percentile in (99.0, 99.9, 99.99):
        exact = float(np.percentile(np.abs(x), percentile))
        found[f"p{percentile:g}"] = lambda stats, p=percentile, e=exact: 100.0 * abs(stats.percentile(p) / e - 1.0)  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--activations", type=Path, help="float arrays by tensor name")
    parser.add_argument("--values", type=int, default=300_000, help="of each tensor, at most")
    options = parser.parse_args()
    arrays = dict(np.load(options.activations)) if options.activations else distributions(options.values)
    arrays = {name: np.asarray(x, np.float32).astype(np.float64).ravel() for name, x in arrays.items() if np.any(x)}
    arrays = {name: x[:: -(-x.size // options.values)] for name, x in arrays.items()}
    wanted = {name: measures(x) for name, x in arrays.items()}
    columns = list(next(iter(wanted.values())))
    print(f"{len(arrays)} tensors; difference in per cent, median / worst")
    print(f"{'bins':>6} {'bytes':>8} " + " ".join(f"{column:>17}" for column in columns))
    for bins in BINS:
        errors = {column: [] for column in columns}
        for name, x in arrays.items():
            stats = with_bins(x, bins)
            for column in columns:
                errors[column].append(wanted[name][column](stats))
        cells = (f"{np.median(errors[column]):8.3f} /{np.max(errors[column]):7.2f}" for column in columns)
        print(f"{bins:6} {8 * bins:8} " + " ".join(cells))


if __name__ == "__main__":
    main()
