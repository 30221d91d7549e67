"""The part of ``gpu_bench.py`` that packs models, images and timing caches for a GPU machine: needs onnx and pillow."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image

from pipeline.artifact import FP32_MODEL, INT8_MODEL
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.ort import make_session
from scripts.gpu_common import PACK, RIVALS, normalised

__all__ = ["lower_opset", "prepare"]

SLICE_BYTES = 48_000_000
SHARED_BYTES = 1024  # smaller weights stay in the graph
OPSET = 17  # the newest that TensorRT 8.6 reads
MORE_TYPES_ONLY = ("Constant", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Shape")
"""Operators that opsets 18 and 19 define anew to add types or an attribute for float8, and nothing else."""
REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin")
"""From opset 18 on their axes are an input."""


def lower_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph in opset 17. onnx's own converter does not go down from 19.

    Raises:
        InputError: an operator that means something else in opset 17, or is used in a way that it does not know.
    """
    opset = next(entry for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset.version <= OPSET:
        return model
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in lowered.graph.initializer}
    for node in lowered.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = onnx.numpy_helper.to_array(node.attribute[0].t)
        new, old = (onnx.defs.get_schema(node.op_type, version, "") for version in (opset.version, OPSET))
        if new.since_version == old.since_version:
            continue
        if node.op_type in REDUCTIONS and opset.version <= 19:
            _axes_as_attribute(node, constants)
        elif node.op_type not in MORE_TYPES_ONLY or opset.version > 19:
            raise InputError(f"{node.op_type} {node.name!r} of opset {opset.version} is not the same in opset {OPSET}")
        kept = [attribute for attribute in node.attribute if attribute.name != "saturate"]  # of float8 only
        if unknown := [attribute.name for attribute in kept if attribute.name not in old.attributes]:
            raise InputError(f"{node.op_type} {node.name!r} has attribute {unknown[0]}, which opset {OPSET} lacks")
        del node.attribute[:]
        node.attribute.extend(kept)
    for entry in lowered.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = OPSET
    lowered.ir_version = min(lowered.ir_version, 8)
    onnx.checker.check_model(lowered, full_check=True)
    return lowered


def _axes_as_attribute(node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> None:
    if any(attribute.name == "noop_with_empty_axes" and attribute.i for attribute in node.attribute):
        raise InputError(f"{node.op_type} {node.name!r} has noop_with_empty_axes, which opset {OPSET} lacks")
    kept = [attribute for attribute in node.attribute if attribute.name != "noop_with_empty_axes"]
    axes = node.input[1] if len(node.input) > 1 else ""
    if axes:
        if axes not in constants:
            raise InputError(f"{node.op_type} {node.name!r} computes its axes; opset {OPSET} needs constants")
        kept.append(onnx.helper.make_attribute("axes", constants[axes].tolist()))
    del node.attribute[:], node.input[1:]
    node.attribute.extend(kept)


def lowered_file(source: Path, folder: Path, probe: dict[str, np.ndarray]) -> Path:
    """``source``, or a copy in opset 17 of which onnxruntime gives bit-equal outputs on ``probe``."""
    model = onnx.load(source)
    lowered = lower_opset(model)
    if lowered is model:
        return source
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(lowered, path)
    before, after = (make_session(file, optimise=False).run(None, probe) for file in (source, path))
    if not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
        raise CheckFailed(f"{source} computes something else in opset {OPSET}")
    return path


def share_weights(folder: Path, sources: dict[str, Path]) -> None:
    """Write ``sources`` (name: ONNX file) into ``folder`` with their large weights in one common ``weights.bin``."""
    places: dict[str, tuple[int, int]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "weights.bin").open("wb") as blob:
        for name, source in sources.items():
            model = onnx.load(source)
            for tensor in model.graph.initializer:
                values = onnx.numpy_helper.to_array(tensor)
                if values.nbytes < SHARED_BYTES:
                    continue
                data = np.ascontiguousarray(values).tobytes()
                digest = hashlib.sha256(data).hexdigest()
                if digest not in places:
                    places[digest] = (blob.tell(), len(data))
                    blob.write(data)
                tensor.ClearField("raw_data")
                for kind in ("float_data", "int32_data", "int64_data", "double_data"):
                    tensor.ClearField(kind)
                tensor.data_location = onnx.TensorProto.EXTERNAL
                del tensor.external_data[:]
                offset, length = places[digest]
                for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
                    tensor.external_data.add(key=key, value=str(value))
            (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def centre_crops(folder: Path, size: int, names: list[str]) -> np.ndarray:
    """uint8, (images, 3, size, size)."""
    crops = []
    for name in names:
        with Image.open(folder / name) as image:
            pixels = np.asarray(image.convert("RGB"))
        top, left = ((side - size) // 2 for side in pixels.shape[:2])
        crops.append(pixels[top : top + size, left : left + size].transpose(2, 0, 1))
    return np.stack(crops)


def predictions(model: Path, images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Arg-max per image, from onnxruntime without graph optimisation."""
    session = make_session(model, optimise=False)
    name = session.get_inputs()[0].name
    parts = [images[start : start + 16] for start in range(0, len(images), 16)]
    return np.concatenate([session.run(None, {name: normalised(p, mean, std)})[0].argmax(-1) for p in parts])


def _split_rival(text: str) -> tuple[str, str, str]:
    return text.partition("=")


def prepare(args: argparse.Namespace) -> None:
    """Write ``args.out``/pack.tar and its slices."""
    work = args.out / "content"
    with (args.images / "labels.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    names, labels = [row["file"] for row in rows], np.array([int(row["class_index"]) for row in rows])
    calibrated = {index * len(names) // args.skip for index in range(args.skip)}  # as `quantize build` spaces them
    chosen = np.array([index for index in range(len(names)) if index not in calibrated])
    images = centre_crops(args.images, args.size, [names[index] for index in chosen])
    spec: dict[str, Any] = {"models": {}}
    stored = {
        "images": images,
        "labels": labels[chosen],
        "calibration": centre_crops(args.images, args.size, [names[index] for index in sorted(calibrated)]),
    }
    for text in args.model:
        name, _, rest = text.partition("=")
        artifact, _, numbers = rest.partition(":")
        mean, std = (
            np.array([float(v) for v in part.split(",")], np.float32) for part in (numbers or "127:128").split(":")
        )
        sources = {"fp32": Path(artifact) / FP32_MODEL, "int8": Path(artifact) / INT8_MODEL}
        for key, _, path in map(_split_rival, args.rival):
            owner, _, rival = key.partition(":")
            if rival not in RIVALS:
                raise SystemExit(f"--rival {key}: known are {', '.join(RIVALS)}")
            if owner == name:
                probe = {onnx.load(sources["fp32"]).graph.input[0].name: normalised(images[:4], mean, std)}
                sources[rival] = lowered_file(Path(path), args.out / "lowered" / name / rival, probe)
        share_weights(work / name, sources)
        for cache in args.timing_cache:
            owner, _, path = cache.rpartition("=")
            if owner in ("", name):
                (work / name / "timing").mkdir(exist_ok=True)
                shutil.copy(path, work / name / "timing")
        for kind in sources if name in args.predict else ():
            stored[f"{name}/{kind}"] = predictions(sources[kind], images, mean, std)
        spec["models"][name] = {"mean": mean.tolist(), "std": std.tolist()}
    np.savez_compressed(work / "images.npz", **stored)
    (work / "spec.json").write_text(json.dumps(spec, indent=1))
    with tarfile.open(args.out / PACK, "w") as tar:
        tar.add(work, arcname=".")
    with (args.out / PACK).open("rb") as stream:
        for number in range(100):
            if not (data := stream.read(SLICE_BYTES)):
                break
            part = args.out / f"slice-{number:02d}"
            part.mkdir(exist_ok=True)
            (part / f"{PACK}.{number:02d}").write_bytes(data)
            print(f"{part}  {len(data) / 1e6:.1f} MB")
