"""`--build`: from the recommendation to an artifact, without another calibration pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import BuildConfig, CalibratorConfig
from pipeline.core.progress import SILENT, Progress

if TYPE_CHECKING:
    from pipeline.artifact import Artifact
    from pipeline.compare.config import CompareConfig
    from pipeline.compare.records import Outcome

__all__ = ["ARTIFACT_FOLDER", "build_recommended"]

ARTIFACT_FOLDER = "artifact"


def build_recommended(config: CompareConfig, outcome: Outcome, *, progress: Progress = SILENT) -> Artifact:
    """Build the artifact of the recommended calibrator into ``OUT/artifact``, from the experiment's statistics.

    Raises:
        InputError, CheckFailed, ToolError: as `quantize build` does.
    """
    from pipeline import stages

    chosen = next(item for item in outcome.measured if item.label == outcome.recommendation.calibrator)
    if chosen.variant is None:
        raise ValueError("an INT8 graph has a variant")
    fields = {name: getattr(config, name) for name in BuildConfig.model_fields}
    fields.update(
        out=config.out / ARTIFACT_FOLDER,
        name=config.name or config.out.name,
        calibrator=CalibratorConfig(name=chosen.variant.calibrator, params=chosen.variant.params),
        calibration=outcome.statistics,
        targets=config.targets or ((config.target,) if config.target == "tensorrt" else ()),
    )
    return stages.build(BuildConfig(**fields), progress=progress)
