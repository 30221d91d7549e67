"""Ours against TensorRT 8.6.0's own calibrators: EfficientNet-Lite0, 128 photographs, batches of 8 and of 32.

The caches were written by IInt8MinMaxCalibrator and IInt8EntropyCalibrator2 on an H200, see
scripts/gpu_reference_caches.py. TensorRT's activations are the GPU's, ours come from onnxruntime on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import calibrators
from calibrators import TensorStatistics
from calibrators.accumulate import BatchAccumulator, add_batch
from calibrators.cache import read_cache
from calibrators.entropy import CANDIDATE_BINS, least_divergence
from calibrators.protocol import Calibrator
from calibrators.statistics import BINS
from pipeline.core.ort import make_session
from tests.paths import IMAGENET500

DATA = Path(__file__).parent / "data"
BATCHES = (8, 32)
SPLIT_GEMM = {
    "(Unnamed Layer* 405) [Constant]_output",
    "(Unnamed Layer* 406) [Matrix Multiply]_output",
    "(Unnamed Layer* 407) [Constant]_output",
    "(Unnamed Layer* 408) [Shuffle]_output",
}
"""What TensorRT's parser made of the last Gemm; the other 107 tensors of a cache are the model's own."""

pytestmark = [
    pytest.mark.skipif(not IMAGENET500.is_dir(), reason="needs ../shared/data/imagenet500"),
    pytest.mark.slow,
]


class TensorRtHistogram:
    """2048 bins up to the first batch's maximum, which doubles until the later batches fit."""

    def __init__(self) -> None:
        self.limit = 0.0
        self.bins = np.zeros(CANDIDATE_BINS, np.int64)

    def update(self, x: np.ndarray, amax: float) -> None:
        self.limit = self.limit or amax
        while amax > self.limit:
            self.limit *= 2.0
            self.bins = np.append(self.bins.reshape(-1, 2).sum(axis=1), np.zeros(CANDIDATE_BINS // 2, np.int64))
        units = BatchAccumulator()  # |x| in units of a bin, counted at a finer power of two
        units.add(x * np.float32(CANDIDATE_BINS / self.limit))
        found = units.statistics(0)
        assert found.exponent <= 0, "at most 4096 units"
        fine = np.append(found.bins, np.zeros(CANDIDATE_BINS << -found.exponent, np.int64))
        whole = fine[: (fine.size >> -found.exponent) << -found.exponent].reshape(-1, 1 << -found.exponent).sum(axis=1)
        self.bins += whole[:CANDIDATE_BINS]
        self.bins[-1] += whole[CANDIDATE_BINS:].sum()


class Measured:
    """Statistics of every tensor in the caches at both batch sizes, and histograms made as TensorRT makes them."""

    def __init__(self, folder: Path) -> None:
        import onnx

        from pipeline.config import Preprocess
        from pipeline.data import batched, open_source, select, split
        from pipeline.records import TensorSpec
        from tests.zoo.registry import build

        model = build("efficientnet-lite0", folder).path
        nodes = onnx.load(model).graph.node
        produced = {name for node in nodes for name in node.output}
        known = read_cache(DATA / "efficientnet-lite0-minmax-batch8.cache").scales
        # a zero Pad adds zeros, which no calibrator looks at: its output has its input's range
        self.padded = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Pad"}
        tensors = [name for name in known if name in produced and name not in self.padded]
        session = make_session(model, capture=tensors)
        inputs = [TensorSpec(name="x", dtype="float32", shape=("n", 3, 224, 224))]
        source = open_source(str(IMAGENET500), inputs, Preprocess.model_validate("efficientnet-lite"))
        chosen = frozenset(split(source.length, 128, None, labelled=True).calibration)
        by_8 = {name: TensorStatistics() for name in ("x", *tensors, "y")}
        self.histograms = {name: TensorRtHistogram() for name in by_8}
        for batch in batched(select(source, chosen), 8, inputs):
            found = session.run([*tensors, "output"], batch.feeds)
            for name, value in zip(by_8, [batch.feeds["x"], *found], strict=True):
                add_batch(by_8[name], value, batch.index)
                self.histograms[name].update(value, float(by_8[name].batch_amax[-1]))
        by_32 = {
            name: replace(
                stats, batch_index=stats.batch_index[:4], batch_amax=stats.batch_amax.reshape(4, 4).max(axis=1)
            )
            for name, stats in by_8.items()
        }
        self.statistics = {8: by_8, 32: by_32}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("tensorrt"))


def errors(measured: Measured, calibrator: Calibrator, algorithm: str, batch: int) -> np.ndarray:
    """|ratio - 1| of each range to TensorRT's, for every tensor that the model has a name for."""
    own = read_cache(DATA / f"efficientnet-lite0-{algorithm}-batch{batch}.cache").scales
    found = {name: calibrator.amax(stats) for name, stats in measured.statistics[batch].items()}
    found |= {output: found[source] for output, source in measured.padded.items()}
    assert found.keys() == own.keys() - SPLIT_GEMM
    return np.abs([amax / (own[name] * 127.0) - 1.0 for name, amax in found.items()])


@pytest.mark.parametrize("batch", BATCHES)
def test_minmax(measured: Measured, batch: int) -> None:
    off = errors(measured, calibrators.get("minmax"), "minmax", batch)
    assert off.size > 80
    assert (off <= 1e-6).mean() > 0.95
    assert off.max() < 3e-6, "what remains is rounding: convolutions were added up in another order"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tensorrt_range", [0, 1])
def test_entropy(measured: Measured, batch: int, tensorrt_range: int) -> None:
    """What remains: the divergence is ragged, with another bin width some tensors fall into another minimum."""
    off = errors(measured, calibrators.get("entropy", {"tensorrt_range": tensorrt_range}), "entropy2", batch)
    assert np.median(off) <= 0.02
    assert (off <= 0.10).mean() >= 0.95


BY_QUANTILE = [
    "/_blocks.4/_swish_1/Clip_output_0",
    "/_blocks.8/_swish_1/Clip_output_0",
    "/_blocks.11/_swish_1/Clip_output_0",
]
"""Where TensorRT's log says that the legacy calibrator took the quantile, and the values are not all at a limit."""


@pytest.mark.parametrize("name", BY_QUANTILE)
def test_the_quantile_of_the_legacy_calibrator(measured: Measured, name: str) -> None:
    theirs = read_cache(DATA / "efficientnet-lite0-legacy-batch8.cache").scales[name] * 127.0
    stats = measured.statistics[8][name]
    ours = calibrators.get("legacy", {"quantile": 0.999}).amax(stats)
    assert 0.0 <= theirs - ours <= stats.amax / CANDIDATE_BINS, "the upper edge of one of 2048 bins"


def test_the_rules_of_entropy_are_tensorrts_on_its_own_histogram(measured: Measured) -> None:
    own = read_cache(DATA / "efficientnet-lite0-entropy2-batch8.cache").scales
    same = []
    for name, histogram in measured.histograms.items():
        theirs = own[name] * 127.0 / histogram.limit * CANDIDATE_BINS
        assert theirs == pytest.approx(round(theirs - 0.5) + 0.5, abs=0.02), "the middle of one of these bins"
        counts = histogram.bins.astype(np.float64)
        counts[0] = counts[1]
        same.append(least_divergence(counts) == round(theirs - 0.5))
    assert np.mean(same) >= 0.97


def test_the_emulated_histogram_counts_every_value() -> None:
    histogram = TensorRtHistogram()
    for amax in (1.0, 3.0, 0.1):
        histogram.update(np.linspace(-amax, amax, 1001, dtype=np.float32), amax)
    assert histogram.limit == 4.0
    assert int(histogram.bins.sum()) == 3003
    assert BINS >= 2 * CANDIDATE_BINS
