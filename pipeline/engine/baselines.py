"""Engines of an artifact's FP32 model in other precisions, to measure the artifact's engine against."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact import CALIBRATION_CACHE, FP32_MODEL
from pipeline.core.errors import InputError
from pipeline.core.files import sha256_json, write_text
from pipeline.core.lazy import require
from pipeline.core.progress import SILENT
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import load_api
from pipeline.engine.device import describe_device
from pipeline.engine.loading import check_float_model
from pipeline.engine.records import BUILD_FILE, PLAN_FILE, BuildOptions, EngineRecord
from pipeline.engine.timing_cache import default_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.artifact import Artifact
    from pipeline.config import Profile
    from pipeline.core.progress import Progress
    from pipeline.engine.compat import Api

__all__ = ["BASELINES", "baseline_engine", "check_baselines"]

BASELINES = ("fp32", "fp16", "implicit")


def check_baselines(artifacts: Sequence[Artifact], against: Sequence[str], api: Api) -> None:
    """Whether every baseline can be built, before one is.

    Raises:
        InputError: a model with Q/DQ nodes of its own; implicit INT8 where this TensorRT has none; FP16, where it takes
            the types from the graph, without the packages that write them there.
    """
    for artifact in artifacts if against else ():
        check_float_model(artifact, f"--against {','.join(against)}")
    if "implicit" in against and not api.calibrators:
        raise InputError(
            f"--against implicit: {api.title} has no implicit INT8 (removed in TensorRT 11)",
            remedy="leave implicit out of --against",
        )
    if "fp16" in against and not api.weak_typing:
        require("onnx_ir", extra="gpu", purpose=f"--against fp16 with {api.title}")


def baseline_engine(
    artifact: Artifact,
    kind: str,
    target: str,
    profiles: Sequence[Profile],
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> tuple[Path, EngineRecord]:
    """An engine of the artifact's FP32 model in another precision, from ``cache`` where it was built before.

    FP16 and implicit INT8 take and give float16 where the artifact's INT8 graph does. FP16 is a flag up to TensorRT 10;
    from 11 on and for RTX the types are written into a copy of the model.
    """
    device, api = describe_device(), load_api(target)
    half_inputs, half_outputs = (
        kind != "fp32" and half for half in (artifact.manifest.half_inputs, artifact.manifest.half_outputs)
    )
    key = sha256_json(
        {
            "model": artifact.manifest.files[FP32_MODEL].sha256,
            "scales": artifact.manifest.files[CALIBRATION_CACHE].sha256 if kind == "implicit" else "",
            "kind": kind,
            "target": target,
            "profiles": [str(profile) for profile in profiles],
            "float16": [half_inputs, half_outputs],
            "tensorrt": api.version,
            "device": device.model_dump() if device else None,
        }
    )[:16]
    folder = (cache or default_folder().with_name("engines")) / f"{kind}-{key}"
    plan, path = folder / PLAN_FILE, folder / BUILD_FILE
    if plan.exists() and path.exists():
        return plan, EngineRecord.model_validate_json(path.read_bytes())
    progress.note(f"building the {kind} engine to compare with")
    options = BuildOptions(
        fp16=kind in ("fp16", "implicit") and api.weak_typing,
        half_inputs=half_inputs and api.weak_typing,
        half_outputs=half_outputs and api.weak_typing,
        calibration_cache=artifact.path(CALIBRATION_CACHE) if kind == "implicit" else None,
    )
    with tempfile.TemporaryDirectory(prefix="quantize-") as scratch:
        model = artifact.path(FP32_MODEL)
        if kind == "fp16" and not api.weak_typing:
            from pipeline.placement.half import write_half

            model = write_half(model, Path(scratch), inputs=half_inputs, outputs=half_outputs)
        record = build_engine(
            model, target=target, profiles=profiles, plan_path=plan, options=options, progress=progress
        )
    write_text(path, record.model_dump_json(indent=2) + "\n")
    return plan, record
