#!/usr/bin/env python3
"""The INT8 graphs that other tools make of the same networks and images, to measure ours against.

    rivals.py OUT --images FOLDER [--modelopt-python PATH] [--only NETWORK]

EfficientNet-Lite0 with its trained weights and ResNet-50 with random ones (for speed alone). Writes for each of them
OUT/NETWORK.onnxruntime.onnx (onnxruntime.quantization.quantize_static, entropy, symmetric, float bias) and, with an
interpreter that can import NVIDIA ModelOpt, OUT/NETWORK.modelopt.onnx (entropy): the files for `gpu_bench.py prepare
--rival`. Both get the model as exported (with Pad nodes), as their users would give it, and the 128 evenly spaced
images on which ours calibrates. `accuracy.py` compares the same graphs in onnxruntime.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

CALIBRATION_IMAGES = 128
CROP = 224
BATCH = 8
TRAINED = "efficientnet-lite0"
NETWORKS = (TRAINED, "resnet50")


def load_images(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (N, 224, 224, 3) centre crops and int64 (N,) classes of every image in ``labels.csv``."""
    from PIL import Image

    images, labels = [], []
    with (folder / "labels.csv").open() as stream:
        for row in csv.DictReader(stream):
            pixels = np.asarray(Image.open(folder / row["file"]).convert("RGB"))
            top, left = ((size - CROP) // 2 for size in pixels.shape[:2])
            images.append(pixels[top : top + CROP, left : left + CROP])
            labels.append(int(row["class_index"]))
    return np.stack(images), np.array(labels)


def normalised(images: np.ndarray) -> np.ndarray:
    """float32 (N, 3, 224, 224): (pixel - 127) / 128."""
    return np.ascontiguousarray(((images.astype(np.float32) - 127.0) / 128.0).transpose(0, 3, 1, 2))


def evenly(count: int, wanted: int) -> np.ndarray:
    """``wanted`` numbers below ``count``, evenly spaced."""
    return np.linspace(0, count - 1, wanted).round().astype(int)


class Network:
    """One network's float model and its calibration data."""

    def __init__(self, exported: Path, data: np.ndarray) -> None:
        self.exported, self.data = exported, data

    def modelopt(self, folder: Path, python: str, method: str) -> Path:
        np.save(folder / "data.npy", self.data)
        output = folder / "modelopt.onnx"
        command = [
            python, "-m", "modelopt.onnx.quantization", f"--onnx_path={self.exported}", "--quantize_mode=int8",
            f"--calibration_method={method}", f"--calibration_data_path={folder / 'data.npy'}", "--calibration_eps",
            "cpu", "--high_precision_dtype=fp32", "--opset=17", f"--output_path={output}",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return output

    def onnxruntime(self, folder: Path) -> Path:
        from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static

        class Reader(CalibrationDataReader):
            def __init__(self, data: np.ndarray) -> None:
                self.rows = iter([{"x": data[start : start + BATCH]} for start in range(0, len(data), BATCH)])

            def get_next(self) -> Any:
                return next(self.rows, None)

        output = folder / "onnxruntime.onnx"
        options = {
            "QuantizeBias": False, "ActivationSymmetric": True, "WeightSymmetric": True, "AddQDQPairToWeight": True,
        }  # fmt: skip
        quantize_static(
            str(self.exported), str(output), Reader(self.data), per_channel=True, activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod.Entropy, extra_options=options,
        )  # fmt: skip
        return output


def make_network(name: str, data: np.ndarray, scratch: Path) -> Network:
    import torch

    from tests.zoo.convnets import resnet50
    from tests.zoo.export import export_onnx
    from tests.zoo.trained import efficientnet_lite0

    torch.manual_seed(0)
    module = efficientnet_lite0() if name == TRAINED else resnet50()
    example = {"x": torch.zeros(2, 3, CROP, CROP)}
    axes = {"x": {0: "batch"}, "output": {0: "batch"}}
    exported = export_onnx(module, example, scratch / "exported.onnx", dynamic_axes=axes)
    return Network(exported, data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--images", type=Path, required=True, help="folder with labels.csv (file, class_index) and images"
    )
    parser.add_argument("--modelopt-python", help="interpreter that can import modelopt")
    parser.add_argument("--only", choices=NETWORKS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    images, _ = load_images(arguments.images)
    data = normalised(images[evenly(len(images), CALIBRATION_IMAGES)])
    for name in NETWORKS if arguments.only is None else (arguments.only,):
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            network = make_network(name, data if name == TRAINED else data[: 2 * BATCH], scratch)
            made = {"onnxruntime": network.onnxruntime(scratch)}
            if arguments.modelopt_python:
                made["modelopt"] = network.modelopt(scratch, arguments.modelopt_python, "entropy")
            for tool, path in made.items():
                shutil.copy(path, arguments.out / f"{name}.{tool}.onnx")
                print(f"{name} {tool}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
