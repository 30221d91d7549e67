"""Run TensorRT's own INT8 calibrators and keep their caches, as the reference for ours (TensorRT <= 10, a GPU).

Each calibrator runs in a child process that ends as soon as TensorRT hands over the cache, so no engine is built.

    python scripts/gpu_reference_caches.py model.fp32.onnx images.npy OUT [--batch 8 --batch 32]

``images.npy``: uint8, samples along the first axis; the model's one input is (image - mean) / std in float32.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ALGORITHMS = ("entropy2", "minmax", "legacy", "entropy")
MEAN, STD = 127, 128  # EfficientNet-Lite
LEGACY_QUANTILE, LEGACY_CUTOFF = 0.999, 0.5


def normalised(images: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32, same shape."""
    return np.asarray((images.astype(np.float32) - np.float32(MEAN)) / np.float32(STD), np.float32)


def _calibrator(
    trt: Any, algorithm: str, images: np.ndarray[Any, np.dtype[np.float32]], batch: int, path: Path, verbose: bool
) -> Any:
    import pycuda.autoprimaryctx  # noqa: F401
    import pycuda.driver as cuda

    base = {
        "entropy2": trt.IInt8EntropyCalibrator2,
        "minmax": trt.IInt8MinMaxCalibrator,
        "legacy": trt.IInt8LegacyCalibrator,
        "entropy": trt.IInt8EntropyCalibrator,
    }[algorithm]

    class Calibrator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.position = 0
            self.device = cuda.mem_alloc(images[:batch].nbytes)

        def get_batch_size(self) -> int:
            return batch

        def get_batch(self, names: list[str]) -> list[int] | None:
            if verbose:
                print(f"{algorithm}: batch {self.position // batch}", flush=True)
            if self.position + batch > len(images):
                return None
            cuda.memcpy_htod(self.device, np.ascontiguousarray(images[self.position : self.position + batch]))
            self.position += batch
            return [int(self.device)]

        def read_calibration_cache(self, *_: Any) -> None:
            return None

        def write_calibration_cache(self, *arguments: Any) -> None:
            path.write_bytes(bytes(arguments[0]))
            os._exit(0)

        def get_quantile(self) -> float:
            return LEGACY_QUANTILE

        def get_regression_cutoff(self) -> float:
            return LEGACY_CUTOFF

        def read_histogram_cache(self, *_: Any) -> None:
            if verbose:
                print(f"{algorithm}: asked for a histogram cache", flush=True)

        def write_histogram_cache(self, *_: Any) -> None:
            if verbose:
                print(f"{algorithm}: histograms done", flush=True)

    return Calibrator()


def calibrate(model: Path, images_path: Path, algorithm: str, batch: int, path: Path, verbose: bool) -> None:
    """Build far enough that TensorRT writes the calibration cache to ``path`` (the process then ends)."""
    import tensorrt as trt

    images = normalised(np.load(images_path))
    images = images[: len(images) // batch * batch]
    logger = trt.Logger(trt.Logger.VERBOSE if verbose else trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.read_bytes()):
        sys.exit("\n".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.INT8)
    config.builder_optimization_level = 0
    config.int8_calibrator = _calibrator(trt, algorithm, images, batch, path, verbose)
    profile = builder.create_optimization_profile()
    shape = (batch, *images.shape[1:])
    profile.set_shape(network.get_input(0).name, shape, shape, shape)
    config.add_optimization_profile(profile)
    config.set_calibration_profile(profile)
    builder.build_serialized_network(network, config)
    sys.exit("the build ended without a calibration cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--algorithm", choices=ALGORITHMS, action="append")
    parser.add_argument("--limit-s", type=float, help="a calibrator that takes longer is ended")
    parser.add_argument("--verbose", action="store_true", help="print each call and TensorRT's own words")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for algorithm in options.algorithm or ALGORITHMS:
        for batch in options.batch or (8,):
            path = options.out / f"{algorithm}-batch{batch}.cache"
            start = time.monotonic()
            child = multiprocessing.get_context("spawn").Process(
                target=calibrate, args=(options.model, options.images, algorithm, batch, path, options.verbose)
            )
            child.start()
            child.join(options.limit_s)
            if child.is_alive():
                child.kill()
                child.join()
            lines = len(path.read_text().splitlines()) - 1 if path.exists() else 0
            print(
                f"{path.name}: {lines} tensors, {time.monotonic() - start:.1f} s, exit code {child.exitcode}",
                flush=True,
            )


if __name__ == "__main__":
    main()
