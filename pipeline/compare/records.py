"""What an experiment's stages and the experiment itself return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.records import Record, StageResult

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.compare.measured import Floats, Measured, Score
    from pipeline.compare.recommend import Recommendation

__all__ = ["FIGURES_NPZ", "OUTPUTS_NPZ", "SAMPLES_NPZ", "Outcome", "RunResult", "SamplesResult"]

SAMPLES_NPZ = "samples.npz"
FIGURES_NPZ = "figures.npz"
OUTPUTS_NPZ = "outputs.npz"


class Extremes(Record):
    """Of one input over the samples."""

    low: float
    high: float


class SamplesResult(StageResult):
    """Preprocessed samples on the disk. Files: ``samples.npz`` (:mod:`pipeline.compare.archive`)."""

    samples: int
    extremes: dict[str, Extremes]


class RunResult(StageResult):
    """One finished task. Files: ``figures.npz``; of FP32 ``outputs.npz`` as well."""

    label: str


@dataclass(frozen=True)
class Outcome:
    """Everything an experiment found."""

    fp32: Measured
    measured: tuple[Measured, ...]
    """INT8 graphs calibrated on all calibration samples."""
    subsets: tuple[Measured, ...]
    """INT8 graphs calibrated on fewer samples."""
    layers: tuple[str, ...]
    layer_nodes: tuple[str, ...]
    samples: int
    score: Score
    recommendation: Recommendation
    table: tuple[dict[str, Any], ...]
    document: Mapping[str, Any]
    """What ``compare.json`` holds."""
    statistics: Path
    """The experiment's calibration statistics."""
    folder: Path

    def layer_matrix(self) -> Floats:
        """Relative L2 error, (layers, calibrators)."""
        import numpy as np

        return np.stack([item.layers for item in self.measured if item.layers is not None], axis=1)
