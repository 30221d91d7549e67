"""What a build writes down about itself: the manifest, and the versions of the packages that made it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from pipeline.artifact import CalibrationRecord, DataOptions, DataRecord, Manifest, SourceRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibrators import Calibrator
    from pipeline.build import BuildResult
    from pipeline.calibrate import CalibrationResult
    from pipeline.config import BuildConfig
    from pipeline.data import DataSource, Split
    from pipeline.export import ExportResult
    from pipeline.prepare import PrepareResult
    from pipeline.quantize import QuantizeResult
    from pipeline.runner import Finished
    from pipeline.verify import VerifyResult

__all__ = ["installed_versions", "manifest", "target_record"]

_TOOLS = (
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "torch",
    "tensorrt",
    "tensorrt-rtx",
    "pydantic",
    "numba",
)


def manifest(
    config: BuildConfig,
    exported: Finished[ExportResult],
    prepared: Finished[PrepareResult],
    calibrated: Finished[CalibrationResult],
    quantized: Finished[QuantizeResult],
    built: dict[str, Finished[BuildResult]],
    verified: Finished[VerifyResult],
    source: DataSource,
    split: Split,
    calibrator: Calibrator,
    said: Sequence[str],
    *,
    prequantized: bool,
) -> Manifest:
    """Everything about a build but the files, which the package stage hashes.

    Args:
        said: warnings of the build as a whole, beside those of its stages.
        prequantized: the model came with Q/DQ nodes.
    """
    export, calibration = exported.result, calibrated.result
    return Manifest(
        name=config.name or config.out.absolute().name,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        tools=installed_versions(_TOOLS) | {"quantize-trt": _own_version()},
        source=SourceRecord(kind=export.kind, spec=export.spec, sha256=export.source_sha256),
        data=DataRecord(
            spec=source.describe(),
            sha256=source.sha256(),
            calibration_samples=calibration.samples,
            verification_samples=verified.result.samples,
            held_aside=split.held_aside,
            options=DataOptions(
                data=config.data,
                preprocess=config.preprocess,
                batch_size=config.batch_size,
                on_nonfinite=config.on_nonfinite,
            ),
        ),
        calibration=CalibrationRecord(
            calibrator=calibrator.name,
            params=dict(calibrator.params),
            batches=calibration.batches,
            skipped_batches=calibration.skipped_batches,
            tensors=len(quantized.result.tensors),
            given=prequantized,
        ),
        inputs=export.inputs,
        outputs=export.outputs,
        fp16_io=quantized.result.fp16_io,
        profiles=tuple(str(profile) for profile in config.profiles),
        targets={target: target_record(stage.result) for target, stage in built.items()},
        verification=verified.result.model_dump(mode="json", exclude={"dependencies"}),
        warnings=tuple(
            dict.fromkeys(
                (
                    *export.warnings,
                    *source.notes,
                    *split.notes,
                    *prepared.result.warnings,
                    *said,
                    *calibration.warnings,
                    *quantized.result.warnings,
                )
            )
        ),
    )


def target_record(result: BuildResult) -> dict[str, Any]:
    """What the manifest says of one target; TensorRT's messages are in its ``build.json``."""
    engine = result.engine
    if engine is None:
        return {"version": f"onnxruntime {result.onnxruntime}"}
    return engine.manifest_entry()


def _own_version() -> str:
    from pipeline import __version__

    return __version__


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions, without importing the packages; those that are not installed are left out."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
