#!/usr/bin/env python3
"""Make the ONNX files and images that bench_placement.py times on a GPU machine.

    OUT/models-NN/, OUT/images-NN/     folders below 48 MB each, so that each can be copied over in one transfer

Networks: EfficientNet-Lite0 with its trained weights, calibrated and tested on a folder of ImageNet photographs, and
ResNet-50 with random ones (for speed alone). For each of them:

    fp32             the prepared float model: FP16 and implicit INT8 engines come from it
    ours             this project's Q/DQ graph; ours-int8: the same, weights stored as INT8 in front of a DQ
    ours-no-pool     without the rule average-pool
    modelopt         NVIDIA ModelOpt, entropy (with --modelopt-python, an interpreter that can import modelopt)
    modelopt-max     the same with --calibration_method max
    onnxruntime      onnxruntime.quantization.quantize_static, entropy, symmetric, float bias

ModelOpt and onnxruntime get the model as exported (with Pad nodes), as their users would give it. All calibrate on the
same 128 images. The weights of ResNet-50 do not travel: every initializer above 4 kB is replaced by external data that
bench_placement.py makes from a seed (scales are those of the weights here; for the time of an engine that is the same).

usage: bench_placement_prepare.py OUT --images FOLDER [--modelopt-python PATH] [--calibrator entropy] [--only NETWORK]
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICE_BYTES = 46_000_000
CALIBRATION_IMAGES = 128
CROP = 224
STRIPPED_ABOVE = 4096
BATCH = 8


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


def calibration_rows(count: int) -> np.ndarray:
    """Evenly spaced."""
    return np.linspace(0, count - 1, CALIBRATION_IMAGES).round().astype(int)


class Network:
    """One network's float models and its calibration data."""

    def __init__(self, name: str, exported: Path, prepared: Path, data: np.ndarray, scratch: Path) -> None:
        self.name, self.exported, self.prepared, self.data, self.scratch = name, exported, prepared, data, scratch

    def batches(self) -> Iterator[Any]:
        from pipeline.data.batching import Batch

        for number, start in enumerate(range(0, len(self.data), BATCH)):
            rows = self.data[start : start + BATCH]
            yield Batch(number, tuple(range(start, start + len(rows))), {"x": rows})

    def ours(self, folder: Path, calibrator: str, *, rules_off: tuple[str, ...] = (), stored: bool = False) -> Path:
        """This project's graph, through its own stages."""
        import calibrators
        from calibrators.statistics import load_statistics
        from pipeline import calibrate, quantize
        from pipeline.config import PlacementConfig
        from pipeline.placement import make_plan

        config = PlacementConfig(rules_off=rules_off)
        plan = make_plan(self.prepared, config)
        calibrated = calibrate.run(self.prepared, plan.tensors, self.batches(), folder=folder / "calibrated")
        statistics, _ = load_statistics(calibrated.statistics_path)
        result = quantize.run(
            self.prepared,
            plan,
            statistics,
            calibrators.get(calibrator),
            folder=folder,
            config=config,
            weights="int8" if stored else "float",
        )
        return result.model_path

    def modelopt(self, folder: Path, python: str, method: str) -> Path:
        np.save(folder / "data.npy", self.data)
        output = folder / "modelopt.onnx"
        command = [
            python, "-m", "modelopt.onnx.quantization", f"--onnx_path={self.exported}", "--quantize_mode=int8",
            f"--calibration_method={method}", f"--calibration_data_path={folder / 'data.npy'}", "--calibration_eps",
            "cpu", "--high_precision_dtype=fp32", "--opset=17", f"--output_path={output}",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return in_opset_17(output, self.data[:2])

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

    from pipeline import prepare
    from tests.zoo.convnets import resnet50
    from tests.zoo.export import export_onnx
    from tests.zoo.trained import efficientnet_lite0

    torch.manual_seed(0)
    module = efficientnet_lite0() if name == "efficientnet-lite0" else resnet50()
    example = {"x": torch.zeros(2, 3, CROP, CROP)}
    axes = {"x": {0: "batch"}, "output": {0: "batch"}}
    exported = export_onnx(module, example, scratch / "exported.onnx", dynamic_axes=axes)
    prepared = prepare.run(exported, folder=scratch / "prepared").model_path
    return Network(name, exported, prepared, data, scratch)


def in_opset_17(path: Path, sample: np.ndarray) -> Path:
    """The same graph marked as opset 17, for TensorRT 8.6; ModelOpt raises every graph to 19.

    The operators of these two networks mean the same in both, which is checked on ``sample``.
    """
    import onnx

    from pipeline.core.ort import make_session

    model = onnx.load(path)
    expected = make_session(model, optimise=False).run(None, {"x": sample})[0]
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = 17
    model.ir_version = min(model.ir_version, 9)
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "saturate"]
        del node.attribute[:]
        node.attribute.extend(kept)
    onnx.checker.check_model(model, full_check=True)
    found = make_session(model, optimise=False).run(None, {"x": sample})[0]
    if not np.array_equal(expected, found):
        raise ValueError(f"{path} computes something else in opset 17")
    target = path.with_name("opset17.onnx")
    onnx.save(model, target)
    return target


def strip_weights(source: Path, target: Path) -> list[dict[str, Any]]:
    """Save ``source`` without its large initializers; what bench_placement.py needs to make others in their place."""
    import onnx
    from onnx import TensorProto, numpy_helper

    model = onnx.load(source)
    made, offset = [], 0
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.nbytes <= STRIPPED_ABOVE or array.dtype not in (np.float32, np.int8):
            continue
        spread = float(array.astype(np.float64).std())
        made.append({"dtype": str(array.dtype), "count": int(array.size), "std": spread})
        tensor.ClearField("raw_data")
        tensor.ClearField("float_data")
        tensor.ClearField("int32_data")
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in (("location", f"{target.stem}.weights"), ("offset", offset), ("length", array.nbytes)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        offset += array.nbytes
    target.write_bytes(model.SerializeToString())
    return made


def slice_into(files: list[Path], out: Path, prefix: str) -> None:
    """xz every file and spread the bytes over folders of at most SLICE_BYTES: NAME.xz.00, NAME.xz.01, ..."""
    number, room = 0, SLICE_BYTES
    folder = out / f"{prefix}-{number:02d}"
    folder.mkdir(parents=True)
    for file in files:
        data = lzma.compress(file.read_bytes(), preset=6)
        piece = 0
        while data:
            if room < 1_000_000:
                number, room = number + 1, SLICE_BYTES
                folder = out / f"{prefix}-{number:02d}"
                folder.mkdir()
            part, data = data[:room], data[room:]
            (folder / f"{file.name}.xz.{piece:02d}").write_bytes(part)
            piece, room = piece + 1, room - len(part)


def filtered(images: np.ndarray) -> np.ndarray:
    """Each pixel minus its left neighbour, so that xz finds something; bench_placement.py sums it up again."""
    return np.diff(images, axis=2, prepend=np.zeros_like(images[:, :, :1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--images", type=Path, required=True, help="folder with labels.csv (file, class_index) and images"
    )
    parser.add_argument("--modelopt-python", help="interpreter that can import modelopt")
    parser.add_argument("--calibrator", default="entropy")
    parser.add_argument("--only", choices=("efficientnet-lite0", "resnet50"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    images, labels = load_images(arguments.images)
    rows = calibration_rows(len(images))
    data = normalised(images[rows])
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        files: list[Path] = []
        description: dict[str, Any] = {"calibration_rows": rows.tolist(), "networks": {}}
        for name in ("efficientnet-lite0", "resnet50"):
            if arguments.only in (None, name):
                files += build_network(name, data, scratch / name, arguments, description)
        listing = scratch / "networks.json"
        listing.write_text(json.dumps(description, indent=1))
        slice_into([listing, *files], arguments.out, "models")
        np.save(scratch / "images.npy", filtered(images))
        np.save(scratch / "labels.npy", labels)
        slice_into([scratch / "labels.npy", scratch / "images.npy"], arguments.out, "images")
    for path in sorted(arguments.out.iterdir()):
        print(path, f"{sum(file.stat().st_size for file in path.iterdir()) / 1e6:.1f} MB")
    return 0


def build_network(
    name: str, data: np.ndarray, scratch: Path, arguments: argparse.Namespace, description: dict[str, Any]
) -> list[Path]:
    """Every variant of one network, as files ready to travel."""
    scratch.mkdir()
    trained = name == "efficientnet-lite0"
    network = make_network(name, data if trained else data[: 2 * BATCH], scratch)
    variants: dict[str, Path] = {"fp32": network.prepared}

    def folder(variant: str) -> Path:
        made = scratch / variant
        made.mkdir()
        return made

    variants["ours"] = network.ours(folder("ours"), arguments.calibrator)
    variants["ours-int8"] = network.ours(folder("ours-int8"), arguments.calibrator, stored=True)
    variants["ours-no-pool"] = network.ours(folder("ours-no-pool"), arguments.calibrator, rules_off=("average-pool",))
    variants["onnxruntime"] = network.onnxruntime(folder("onnxruntime"))
    if arguments.modelopt_python:
        variants["modelopt"] = network.modelopt(folder("modelopt"), arguments.modelopt_python, "entropy")
        if trained:
            variants["modelopt-max"] = network.modelopt(folder("modelopt-max"), arguments.modelopt_python, "max")
    files, entries = [], {}
    for variant, path in variants.items():
        target = scratch / f"{name}.{variant}.onnx"
        if trained:
            shutil.copy(path, target)
            entries[variant] = {"file": target.name, "weights": []}
        else:
            entries[variant] = {"file": target.name, "weights": strip_weights(path, target)}
        files.append(target)
        print(f"{name} {variant}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
    description["networks"][name] = {"trained": trained, "variants": entries}
    return files


if __name__ == "__main__":
    sys.exit(main())
