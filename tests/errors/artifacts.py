"""A small artifact written by hand: the network of ``networks.py`` with its Q/DQ form, statistics and samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from calibrators import TensorStatistics, save_statistics
from calibrators.accumulate import add_batch
from pipeline import verify
from pipeline.artifact import (
    CALIBRATION,
    FP32_MODEL,
    INT8_MODEL,
    PLACEMENT,
    SAMPLES,
    Artifact,
    CalibrationRecord,
    DataOptions,
    DataRecord,
    Manifest,
    SourceRecord,
    file_record,
    write_manifest,
)
from pipeline.core.files import write_json
from pipeline.data.batching import Batch
from pipeline.errors.capture import OrtReading
from pipeline.placement.plan import ActivationPoint
from pipeline.records import TensorSpec
from tests.errors.networks import CLASSES, SIDE, Network, batches


def images(path: Path, count: int = 24, seed: int = 1) -> Path:
    """``.npy`` data of the network's input."""
    np.save(path, np.concatenate([batch.feeds["x"] for batch in batches(count, 8, seed=seed)]))
    return path


def make_artifact(
    folder: Path,
    net: Network,
    *,
    calibrator: str = "minmax",
    data_sha256: str = "0" * 64,
    data: list[Batch] | None = None,
    options: DataOptions | None = None,
) -> Artifact:
    """Everything `quantize errors` reads, verified on six samples or those of ``data``."""
    folder.mkdir(parents=True)
    (folder / "reports").mkdir()
    onnx.save(net.fp32, folder / FP32_MODEL)
    onnx.save(net.int8, folder / INT8_MODEL)
    points = tuple(ActivationPoint(tensor=name, consumers=(), rule="test") for name in net.amax)
    plan = net.plan.model_copy(update={"activations": points})
    write_json(folder / PLACEMENT, {"schema": 1, "precision": "fp32", **plan.model_dump(mode="json")})
    data = batches() if data is None else data
    reading = OrtReading(net.fp32, list(net.amax), label="fp32", optimise=True)
    statistics = {name: TensorStatistics() for name in net.amax}
    for batch in data:
        for name, values in reading(batch).items():
            add_batch(statistics[name], values, batch.index)
    save_statistics(folder / CALIBRATION, statistics, {})
    result = verify.run(folder / FP32_MODEL, folder / INT8_MODEL, plan, data, folder=folder / "reports")
    (folder / "reports" / SAMPLES).rename(folder / SAMPLES)
    files = [FP32_MODEL, INT8_MODEL, PLACEMENT, CALIBRATION, SAMPLES, "reports/errors.csv", "reports/errors.png"]
    manifest = Manifest(
        name=folder.name,
        created="2026-01-01T00:00:00+00:00",
        tools={},
        source=SourceRecord(kind="onnx", spec="net.onnx", sha256="1" * 64),
        data=DataRecord(
            spec="random",
            sha256=data_sha256,
            calibration_samples=6,
            verification_samples=result.samples,
            held_aside=True,
            options=options,
        ),
        calibration=CalibrationRecord(
            calibrator=calibrator, params={}, batches=3, skipped_batches=0, tensors=len(points)
        ),
        inputs=(TensorSpec(name="x", dtype="float32", shape=("N", 3, SIDE, SIDE)),),
        outputs=(TensorSpec(name="logits", dtype="float32", shape=("N", CLASSES)),),
        profiles=(),
        verification=result.model_dump(mode="json", exclude={"dependencies"}),
        files={name: file_record(folder / name) for name in files},
    )
    write_manifest(folder, manifest)
    return Artifact.open(folder)
