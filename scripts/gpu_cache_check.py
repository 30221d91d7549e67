"""Does TensorRT take our calibration cache and our minmax for its own? (TensorRT <= 10 on a GPU; PyCUDA, no torch.)

    python scripts/gpu_cache_check.py model.fp32.onnx images.npy OUT [--caches tests/calibrators/data]

``images.npy``: uint8, samples along the first axis; the model's one input is (image - mean) / std in float32. For each
entropy cache that TensorRT wrote (scripts/gpu_reference_caches.py): an engine from its bytes and one from what our
reader and writer make of them must give the same bits, and one with every scale 10 % larger must not. Then the ranges:
an FP32 engine without TF32 returns every tensor of the cache, and their largest magnitudes are compared with minmax's.
Writes OUT/cache_check.json; exit code 1 when a cache is refused or the outputs differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calibrators.cache import cache_text, read_cache
from pipeline.engine.calibration import make_calibrator
from pipeline.engine.compat import load_api
from pipeline.engine.marking import mark_outputs
from pipeline.engine.runner import Runner
from scripts.gpu_reference_caches import normalised

BATCH = 8
LARGER = 1.1


class Engines:
    """Builds from one parsed model with one timing cache, so that equal networks get equal kernels."""

    def __init__(self, model: Path, images: np.ndarray) -> None:
        import tensorrt as trt

        self.trt, self.images = trt, images
        self.logger = trt.Logger(trt.Logger.WARNING)
        self.model = model.read_bytes()
        self.timing = b""

    def build(self, *, calibrator: Any = None, outputs: Collection[str] = ()) -> Runner:
        """An engine for batches of 8: implicit INT8 with ``calibrator``, or FP32 without TF32."""
        trt = self.trt
        builder = trt.Builder(self.logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
        parser = trt.OnnxParser(network, self.logger)
        if not parser.parse(self.model):
            sys.exit("\n".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
        # A cache also names the network's inputs and tensors that the parser drops: those are not there to be marked.
        mark_outputs(network, load_api("tensorrt"), sorted(outputs), "itself", what="the FP32 network", strictly=False)
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        config.builder_optimization_level = 0
        config.set_timing_cache(config.create_timing_cache(self.timing), False)
        if calibrator is not None:
            config.set_flag(trt.BuilderFlag.INT8)
            config.int8_calibrator = calibrator
        profile = builder.create_optimization_profile()
        self.source = network.get_input(0).name
        profile.set_shape(self.source, *[(BATCH, *self.images.shape[1:])] * 3)
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            sys.exit("TensorRT built no engine")
        self.timing = bytes(config.get_timing_cache().serialize())
        return Runner(bytes(plan))

    def feeds(self) -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, len(self.images), BATCH):
            yield {self.source: normalised(self.images[start : start + BATCH])}

    def int8_outputs(self, cache: bytes) -> tuple[np.ndarray, list[str]]:
        """The first output of the implicit INT8 engine, and what TensorRT asked data for (it refused the cache)."""
        calibrator, asked = make_calibrator(load_api("tensorrt"), cache)
        with self.build(calibrator=calibrator) as runner:
            first = runner.outputs[0].name
            return np.concatenate([found[first] for found in runner.map(self.feeds())]), asked


def check_cache(engines: Engines, own: Path) -> dict[str, Any]:
    """TensorRT's bytes, ours, and ours made larger."""
    known = read_cache(own)
    raw = own.read_bytes()
    ours, larger = (
        cache_text(
            {name: scale * factor for name, scale in sorted(known.scales.items())},
            version=known.version,
            algorithm=known.algorithm,
        ).encode()
        for factor in (1.0, LARGER)
    )
    (expected, *_), (same, asked), (other, *_) = (engines.int8_outputs(cache) for cache in (raw, ours, larger))
    return {
        "cache": own.name,
        "tensors": len(known.scales),
        "asked_for_data": asked,
        "same_output_bits": bool(np.array_equal(expected, same)),
        "larger_scales_differ": not np.array_equal(expected, other),
    }


def compare_ranges(engines: Engines, cache: Path) -> dict[str, Any]:
    """minmax over the engine's own activations against the scales that TensorRT's minmax found."""
    scales = read_cache(cache).scales
    largest: dict[str, float] = {}
    with engines.build(outputs=scales) as runner:
        for feed in engines.feeds():
            for name, values in {**feed, **runner(feed)}.items():
                largest[name] = max(largest.get(name, 0.0), float(np.abs(values).max()))
    ratios = {name: largest[name] / 127.0 / scale - 1.0 for name, scale in scales.items() if name in largest}
    off = np.abs(list(ratios.values()))
    return {
        "cache": cache.name,
        "tensors": len(scales),
        "seen": len(ratios),
        "unseen": sorted(set(scales) - set(ratios)),
        "largest_difference": float(off.max()),
        "within_1e-6": float((off <= 1e-6).mean()),
        "ratios_minus_1": ratios,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--caches", type=Path, default=Path("tests/calibrators/data"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    images = np.load(given.images)
    engines = Engines(given.model, images[: len(images) // BATCH * BATCH])
    result: dict[str, Any] = {"accepted": [], "ranges": None}
    steps: list[tuple[str, Callable[[Engines, Path], dict[str, Any]], str]] = [
        ("accepted", check_cache, "entropy2-batch8"),
        ("ranges", compare_ranges, "minmax-batch8"),
    ]
    for key, step, pattern in steps:
        for own in sorted(given.caches.glob(f"*-{pattern}.cache")):
            start = time.monotonic()
            found = step(engines, own)
            result[key] = [*(result[key] or []), found]
            print(
                {k: v for k, v in found.items() if k != "ratios_minus_1"},
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
            (given.out / "cache_check.json").write_text(json.dumps(result, indent=1) + "\n")
    checks = result["accepted"]
    right = [a["same_output_bits"] and a["larger_scales_differ"] and not a["asked_for_data"] for a in checks]
    return 0 if right and all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
