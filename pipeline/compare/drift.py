"""Has the data moved away from what was calibrated? Ranges of recent data against an artifact's, layer by layer.

The *range* of a tensor is what the artifact's own calibrator makes of a statistic, with the same groups and known
limits as in the build: so the calibrated range is the one in force, and the recent one is what a build on the recent
data would use. A tensor whose range moved by more than the limit in either direction is flagged.

What the movement costs is estimated from the histograms (:func:`pipeline.compare.histogram.expected_error`): the
relative error of the tensor under the range in force, on the calibration data and on the recent data; and on the recent
data under their own range. It is the error made at this tensor alone, not what reaches the outputs.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from pipeline import artifact as layout
from pipeline.artifact import Artifact
from pipeline.compare.histogram import clipped_values, expected_error
from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibrators import Calibrator, TensorStatistics
    from pipeline.config import Preprocess
    from pipeline.placement import PlacementPlan

__all__ = ["DEFAULT_LIMIT", "DriftReport", "TensorDrift", "compare_ranges", "measure_drift"]

DEFAULT_LIMIT: Final = 0.15
_MIN_SAMPLES: Final = 8


class TensorDrift(Record):
    """One quantised activation."""

    tensor: str
    calibrated: float
    """amax in force."""
    recent: float
    """amax that the same calibrator gives on the recent data."""
    change: float
    """recent / calibrated - 1."""
    flagged: bool
    error_calibrated: float
    """Expected relative L2 error of this tensor on the calibration data, under the range in force."""
    error_recent: float
    """On the recent data, under the range in force."""
    error_recalibrated: float
    """On the recent data, under their own range."""
    clipped_recent: float
    """Share of the recent values beyond the range in force."""

    @property
    def extra_error(self) -> float:
        """What the movement adds to the expected error of the tensor."""
        return self.error_recent - self.error_calibrated


class DriftReport(Record):
    """Every quantised activation in the order of the network."""

    artifact: str
    data: str
    samples: int
    calibration_samples: int
    calibrator: str
    limit: float
    tensors: tuple[TensorDrift, ...]

    @property
    def flagged(self) -> tuple[TensorDrift, ...]:
        """Largest movement first."""
        return tuple(
            sorted((item for item in self.tensors if item.flagged), key=lambda item: (-abs(item.change), item.tensor))
        )


def compare_ranges(
    plan: PlacementPlan,
    calibrated: Mapping[str, TensorStatistics],
    recent: Mapping[str, TensorStatistics],
    calibrator: Calibrator,
    limit: float,
) -> tuple[TensorDrift, ...]:
    """Judge every tensor that was calibrated, from the statistics of both data sets."""
    from pipeline.quantize import activation_ranges

    before, _ = activation_ranges(plan.activations, calibrated, calibrator)
    now, _ = activation_ranges(plan.activations, recent, calibrator)
    found = []
    for name in plan.tensors:
        change = now[name] / before[name] - 1.0
        found.append(
            TensorDrift(
                tensor=name,
                calibrated=before[name],
                recent=now[name],
                change=change,
                flagged=abs(change) > limit,
                error_calibrated=expected_error(calibrated[name], before[name]),
                error_recent=expected_error(recent[name], before[name]),
                error_recalibrated=expected_error(recent[name], now[name]),
                clipped_recent=clipped_values(recent[name], before[name]) / max(recent[name].finite, 1),
            )
        )
    return tuple(found)


def measure_drift(
    artifact: Path,
    data: str,
    *,
    preprocess: Preprocess | None = None,
    samples: int | None = None,
    batch_size: int = 8,
    limit: float = DEFAULT_LIMIT,
    progress: Progress = SILENT,
) -> DriftReport:
    """Run the artifact's float model over recent data and compare the ranges.

    Args:
        data: as ``--data`` of a build; all of it, or the first ``samples``.
        batch_size: the calibration's own, where the calibrator is a moving average over batches.

    Raises:
        InputError: no artifact, one without calibration, data that do not fit or are too few.
        CheckFailed: a NaN or infinity in an activation.
    """
    import calibrators
    from pipeline import calibrate
    from pipeline.data import batched, open_source

    opened = Artifact.open(artifact)
    record = opened.manifest.calibration
    plan = _plan(opened)
    calibrated, _ = calibrators.load_statistics(opened.path(layout.CALIBRATION))
    calibrator = calibrators.get(record.calibrator, record.params)
    source = open_source(data, opened.manifest.inputs, preprocess)
    count = source.count(samples)
    if count < _MIN_SAMPLES:
        raise InputError(
            f"{source.describe()}: {count} samples say nothing about ranges, at least {_MIN_SAMPLES} are needed",
            remedy="give more recent data",
        )
    wanted = source.read(lambda number: number < count)
    with tempfile.TemporaryDirectory(prefix="quantize-drift-") as folder:
        result = calibrate.run(
            opened.path(layout.FP32_MODEL),
            plan.tensors,
            batched(wanted, batch_size, opened.manifest.inputs),
            folder=Path(folder),
            on_nonfinite="error",
            progress=progress,
            total=count,
            data_key=source.key(),
        )
        recent, _ = calibrators.load_statistics(result.statistics_path)
    for note in source.notes:
        progress.note(note)
    return DriftReport(
        artifact=opened.manifest.name,
        data=source.describe(),
        samples=count,
        calibration_samples=opened.manifest.data.calibration_samples,
        calibrator=record.calibrator,
        limit=limit,
        tensors=compare_ranges(plan, calibrated, recent, calibrator, limit),
    )


def _plan(opened: Artifact) -> PlacementPlan:
    from pipeline.placement import PlacementPlan

    path = opened.path(layout.PLACEMENT)
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        plan = PlacementPlan.model_validate({key: values[key] for key in PlacementPlan.model_fields if key in values})
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(f"{path} cannot be read: {error}", remedy="build the artifact again") from error
    if not plan.tensors:
        raise InputError(
            f"{opened.folder} has no calibrated tensor: its scales came with the model",
            remedy="drift can be told only for artifacts that were calibrated here",
        )
    return plan
