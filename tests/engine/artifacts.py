"""A small artifact around a fake engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import package
from pipeline.artifact import Artifact, CalibrationRecord, DataRecord, Manifest, SourceRecord
from pipeline.config import Profile
from pipeline.engine.fastest import Fastest, decide
from pipeline.records import TensorSpec
from tests.engine.fakes import plan
from tests.engine.records import measurement, record

PROFILE = "x=1x3,4x3,8x3"


def make_artifact(
    folder: Path,
    *,
    factor: float = 2.0,
    engine: bool = False,
    samples: int = 2,
    name: str = "net",
    given: bool = False,
) -> Artifact:
    """What the recorded INT8 outputs are: ``factor`` times the inputs. ``given``: the model came with Q/DQ nodes."""
    source = folder.parent / f"{folder.name}-source"
    source.mkdir(parents=True)
    values = np.arange(1, 3 * samples + 1, dtype=np.float32).reshape(samples, 3)
    np.savez(source / "samples.npz", **{"inputs/x": values, "int8/y": factor * values, "fp32/y": 2 * values})
    for file in ("model.int8.onnx", "model.fp32.onnx", "calibration.cache"):
        (source / file).write_text(file)
    files = {file: source / file for file in ("samples.npz", "model.int8.onnx", "model.fp32.onnx", "calibration.cache")}
    targets: dict[str, dict[str, Any]] = {}
    if engine:
        (source / "model.plan").write_bytes(plan())
        built = record(profiles=(Profile.parse(PROFILE),))
        (source / "build.json").write_text(built.model_dump_json())
        files |= {f"engines/tensorrt/{file}": source / file for file in ("model.plan", "build.json")}
        targets["tensorrt"] = built.manifest_entry()
    made = manifest((PROFILE,), shape=("N", 3), name=name, targets=targets)
    calibration = made.calibration.model_copy(update={"given": given})
    return package.run(files, made.model_copy(update={"calibration": calibration}), folder=folder)


def manifest(
    profiles: tuple[str, ...],
    *,
    shape: tuple[int | str, ...],
    name: str = "net",
    targets: dict[str, dict[str, Any]] | None = None,
) -> Manifest:
    """From ``x`` to ``y``, both of ``shape``."""
    spec = TensorSpec(name="x", dtype="float32", shape=shape)
    return Manifest(
        name=name,
        created="2026-01-01T00:00:00+00:00",
        tools={},
        source=SourceRecord(kind="onnx", spec="net.onnx", sha256="a" * 64),
        data=DataRecord(spec="data", sha256="d", calibration_samples=2, verification_samples=1, held_aside=True),
        calibration=CalibrationRecord(calibrator="entropy", params={}, batches=1, skipped_batches=0, tensors=3),
        inputs=(spec,),
        outputs=(spec.model_copy(update={"name": "y"}),),
        profiles=profiles,
        targets=targets or {},
    )


def add_float_plan(artifact: Artifact, *, operation: str = "triple") -> Artifact:
    """Give an artifact two profiles, 1 and 2 to 8 samples, and a float plan that serves the first."""
    folder = artifact.folder / "engines/tensorrt"
    one, many = (Profile.parse(text) for text in ("x=1x3,1x3,1x3", "x=2x3,4x3,8x3"))
    sizes = [(r.min, r.opt, r.max) for profile in (one, many) for r in profile.inputs.values()]
    (folder / "model.plan").write_bytes(plan(profiles=sizes))
    (folder / "build.json").write_text(record(profiles=(one, many)).model_dump_json())
    (folder / "float.plan").write_bytes(plan(operation, profiles=sizes[:1]))
    (folder / "float.json").write_text(record(profiles=(one,), plan_bytes=7, build_seconds=2.0).model_dump_json())
    pairs = {
        0: (measurement("int8", 0.4, 0.5, batch=1), measurement("float", 0.2, 0.3, batch=1)),
        1: (measurement("int8", 1.0, batch=4), measurement("float", 2.0, batch=4)),
    }
    fastest = Fastest(choices=decide((one, many), pairs))
    (folder / "fastest.json").write_text(fastest.model_dump_json())
    files = ("model.plan", "build.json", "float.plan", "float.json", "fastest.json")
    entry = {**artifact.manifest.targets["tensorrt"], "fastest": fastest.model_dump(mode="json")}
    names = tuple(f"engines/tensorrt/{file}" for file in files)
    return artifact.updated(files=names, targets={"tensorrt": entry})


class FakeBuilder:
    """Stands in for ``build_engine``: writes a fake plan and remembers what was asked."""

    def __init__(self, operation: str = "double", **fields: Any) -> None:
        self.operation, self.fields, self.calls = operation, fields, []

    def __call__(
        self, model: Path, *, target: str, profiles: Sequence[Profile], plan_path: Path, options: Any, **rest: Any
    ):
        self.calls.append((model, target, tuple(profiles), options))
        plan_path.parent.mkdir(parents=True, exist_ok=True)
        shapes = [(r.min, r.opt, r.max) for profile in profiles for r in profile.inputs.values()]
        plan_path.write_bytes(plan(self.operation, profiles=shapes))
        return record(target=target, profiles=tuple(profiles), options=options, **self.fields)
