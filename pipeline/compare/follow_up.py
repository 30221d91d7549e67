"""`--build`: from the recommendation to an artifact, without another calibration pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.combinations import refuse
from pipeline.config import BuildConfig, CalibratorConfig, check_profiles
from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.artifact import Artifact
    from pipeline.compare.config import CompareConfig
    from pipeline.compare.records import Outcome
    from pipeline.export import ExportResult
    from pipeline.stages import Build

__all__ = ["ARTIFACT_FOLDER", "artifact_targets", "build_recommended", "check_exported", "check_follow_up"]

ARTIFACT_FOLDER = "artifact"
_OF_THE_PASS = ("calibration", "device", "on_nonfinite")


def artifact_targets(config: CompareConfig) -> tuple[str, ...]:
    """What the artifact is built for.

    Raises:
        InputError: a target does not work here.
    """
    return _build(config).targets()


def check_follow_up(config: CompareConfig, targets: Sequence[str]) -> None:
    """Refuse at once what the build after the experiment would be refused for, as far as options alone decide it.

    Raises:
        InputError: channels are to be equalised, or scales taken from a cache; a target cannot do what an engine option
            asks for; a point of a search that there is not; the artifact's folder holds something else.
    """
    from pipeline import package

    if config.equalise:
        raise InputError(
            "equalise: the experiment's statistics are of the graph as it is, and --build would build another one",
            remedy="leave equalise out, or build afterwards with the calibrator that is recommended: "
            "quantize build --equalise --calibrator NAME",
        )
    build = _build(config)
    refuse(build.engine_options, targets, ())
    if build.engine_options.calibration_cache is not None:
        raise InputError(
            "engine.calibration_cache: the artifact's graph has Q/DQ nodes, with which TensorRT would ignore it",
            remedy="leave it out",
        )
    build.mixed_target()
    package.check_folder(build.out, force=False)


def _build(config: CompareConfig) -> Build:
    from pipeline import stages

    return stages.Build(_build_config(config, CalibratorConfig()), force=False, fresh=False, progress=SILENT)


def check_exported(config: CompareConfig, exported: ExportResult) -> None:
    """As :func:`check_follow_up`, as soon as the model is known.

    Raises:
        InputError: labels for a model without class scores, profiles that do not fit it, or the artifact's folder
            holds one of another model.
    """
    from pipeline import package
    from pipeline.data import check_class_scores

    if config.labels is not None:
        check_class_scores(exported.outputs)
    check_profiles(config.profiles, exported.inputs)
    package.check_owner(config.out / ARTIFACT_FOLDER, exported.source_sha256, force=False)


def build_recommended(
    config: CompareConfig, outcome: Outcome, targets: Sequence[str], *, progress: Progress = SILENT
) -> Artifact:
    """Build the artifact of the recommended calibrator into ``OUT/artifact``, from the experiment's statistics.

    Args:
        targets: as :func:`artifact_targets` gave them.

    Raises:
        InputError, CheckFailed, ToolError: as `quantize build` does.
    """
    from pipeline import stages

    chosen = next(item for item in outcome.measured if item.label == outcome.recommendation.calibrator)
    if chosen.variant is None:
        raise ValueError("an INT8 graph has a variant")
    calibrator = CalibratorConfig(name=chosen.variant.calibrator, params=chosen.variant.params)
    asked = _build_config(config, calibrator).model_copy(update={"calibration": outcome.statistics})
    return stages.build(asked, targets=targets, progress=progress)


def _build_config(config: CompareConfig, calibrator: CalibratorConfig) -> BuildConfig:
    """Of the artifact, without what is only for the pass over the data, which the experiment made."""
    fields = {name: getattr(config, name) for name in BuildConfig.model_fields if name not in _OF_THE_PASS}
    fields.update(
        out=config.out / ARTIFACT_FOLDER,
        name=config.name or config.out.name,
        calibrator=calibrator,
        targets=config.targets or ((config.target,) if config.target == "tensorrt" else ()),
    )
    return BuildConfig(**fields)
