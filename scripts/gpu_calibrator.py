#!/usr/bin/env python3
"""TensorRT's own entropy calibrator, for the implicit INT8 engines that ``gpu_bench.py`` and ``gpu_builds.py`` measure.

    gpu_calibrator.py PACK MODEL

Reads PACK/images.npz (``calibration``: the images that the artifact was calibrated on), lets TensorRT (8.6 to 10)
calibrate PACK/MODEL/fp32.onnx with ``IInt8EntropyCalibrator2``, and writes PACK/MODEL/calibration.cache as TensorRT
wrote it. Optimisation level 0: ranges do not depend on the choice of kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.core.errors import ToolError
from pipeline.core.files import write_bytes
from scripts.gpu_common import batch_profiles, model_images

__all__ = ["CACHE", "calibration_cache"]

CACHE = "calibration.cache"
BATCH = 8


def calibration_cache(pack: Path, model: str) -> Path:
    """The cache of ``model``, made by a process of its own where it is not there.

    Raises:
        ToolError: TensorRT made none.
    """
    path = pack / model / CACHE
    if not path.exists():
        done = subprocess.run([sys.executable, __file__, str(pack), model], capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            raise ToolError(f"TensorRT's calibrator failed on {model}: {done.stderr.strip()[-1000:]}")
    return path


def calibrate(model: Path, images: np.ndarray) -> bytes:
    """The cache that TensorRT writes after ``images``, float32 of shape (count, ...) as the model takes them."""
    from pipeline.engine.compat import load_api
    from pipeline.engine.cuda import open_device

    api, device = load_api("tensorrt"), open_device()
    trt = api.trt
    written: list[bytes] = []
    with device.active():
        memory = device.allocate(images[:BATCH].nbytes)
        calibrator = _calibrator(trt, _uploads(device, memory.address, images), written)
        builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
        network = builder.create_network(api.network_flags(weakly_typed=True))
        parser = trt.OnnxParser(network, trt.Logger(trt.Logger.WARNING))
        if not parser.parse_from_file(str(model)):
            raise ToolError(f"{api.title} does not read {model}: {parser.get_error(0).desc()}")
        config = builder.create_builder_config()
        config.set_flag(trt.BuilderFlag.INT8)
        config.builder_optimization_level = 0
        config.int8_calibrator = calibrator
        (profile,) = batch_profiles(model, [f"{BATCH}:{BATCH}:{BATCH}"])
        handle = builder.create_optimization_profile()
        for name, shapes in profile.inputs.items():
            handle.set_shape(name, shapes.min, shapes.opt, shapes.max)
        config.add_optimization_profile(handle)
        config.set_calibration_profile(handle)
        plan = builder.build_serialized_network(network, config)
        memory.free()
    if plan is None or not written:
        raise ToolError(f"{api.title} builds no engine of {model}, or wrote no calibration cache")
    return written[-1]


def _uploads(device: Any, address: int, images: np.ndarray) -> Iterator[int]:
    """The address of each whole batch, once it is on the card."""
    for start in range(0, len(images) - BATCH + 1, BATCH):
        device.driver.memcpy_htod(address, np.ascontiguousarray(images[start : start + BATCH]))
        yield address


def _calibrator(trt: Any, batches: Iterator[int], written: list[bytes]) -> Any:
    base = trt.IInt8EntropyCalibrator2

    class Calibrator(base):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            base.__init__(self)

        def get_batch_size(self) -> int:
            return BATCH

        def get_batch(self, names: list[str]) -> list[int] | None:
            address = next(batches, None)
            return None if address is None else [address]

        def read_calibration_cache(self) -> None:
            """None: it measures."""

        def write_calibration_cache(self, cache: Any) -> None:
            written.append(bytes(cache))

    return Calibrator()


def main() -> None:
    pack, name = Path(sys.argv[1]), sys.argv[2]
    numbers = json.loads((pack / "spec.json").read_text())["models"][name]
    with np.load(pack / "images.npz", allow_pickle=False) as stored:
        images = model_images(stored["calibration"], numbers)
    cache = calibrate(pack / name / "fp32.onnx", images)
    write_bytes(pack / name / CACHE, cache)
    print(f"{name}: {len(images)} images, {len(cache.splitlines()) - 1} ranges")


if __name__ == "__main__":
    main()
