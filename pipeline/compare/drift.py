"""Has the data moved away from what was calibrated? Ranges of recent data against an artifact's, layer by layer.

The range by which movement is judged is the 99.99th percentile of |x|, with the same groups and known limits as in the
build; a tensor whose range moved by more than the limit in either direction is flagged. The artifact's own calibrator
can be asked instead (``measure="calibrator"``), but some calibrators jump without any drift: of EfficientNet-Lite0
calibrated on 128 images of imagenet500, 4 of 51 ranges move by more than 15 % on the other 372 images of the same set
under minmax and 6 under ema 0.99, while the 99.99th percentile moves by 4 % at most (by 6 % on 32 images).

What the movement costs is estimated from the histograms (:func:`pipeline.compare.histogram.expected_error`): the
relative error of the tensor under the range in force, on the calibration data and on the recent data; and on the recent
data under the range that the artifact's calibrator would give them. It is the error made at this tensor alone, not what
reaches the outputs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pipeline import artifact as layout
from pipeline.artifact import Artifact
from pipeline.compare.histogram import clipped_values, expected_error
from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.floatgraph import check_float_graph
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibrators import Calibrator, TensorStatistics
    from pipeline.config import Preprocess
    from pipeline.placement import PlacementPlan

__all__ = [
    "DEFAULT_LIMIT",
    "JUDGED_PERCENTILE",
    "DriftReport",
    "Measure",
    "TensorDrift",
    "compare_ranges",
    "measure_drift",
]

Measure: TypeAlias = Literal["percentile", "calibrator"]

DEFAULT_LIMIT: Final = 0.15
JUDGED_PERCENTILE: Final = 99.99
_MIN_SAMPLES: Final = 8
_BATCH_SIZE: Final = 8
"""A build's default, for artifacts that do not say theirs."""


class TensorDrift(Record):
    """One quantised activation."""

    tensor: str
    calibrated: float
    """Range of the calibration data, as judged."""
    recent: float
    """The same of the recent data."""
    change: float
    """recent / calibrated - 1."""
    flagged: bool
    amax: float
    """The range in force, by the artifact's calibrator."""
    error_calibrated: float
    """Expected relative L2 error of this tensor on the calibration data, under the range in force."""
    error_recent: float
    """On the recent data, under the range in force."""
    error_recalibrated: float
    """On the recent data, under the range that the artifact's calibrator gives them."""
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
    measure: Measure
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
    *,
    limit: float = DEFAULT_LIMIT,
    measure: Measure = "percentile",
) -> tuple[TensorDrift, ...]:
    """Judge every tensor that was calibrated, from the statistics of both data sets.

    Args:
        calibrator: the artifact's.
        limit: movement beyond which a tensor is flagged, 0.15 being 15 %.
        measure: what a range is (module docstring).
    """
    from calibrators import get
    from pipeline.quantize import activation_ranges

    judge = calibrator if measure == "calibrator" else get("percentile", {"percentile": JUDGED_PERCENTILE})
    before, now = (activation_ranges(plan.activations, stats, judge)[0] for stats in (calibrated, recent))
    in_force, renewed = (activation_ranges(plan.activations, stats, calibrator)[0] for stats in (calibrated, recent))
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
                amax=in_force[name],
                error_calibrated=expected_error(calibrated[name], in_force[name]),
                error_recent=expected_error(recent[name], in_force[name]),
                error_recalibrated=expected_error(recent[name], renewed[name]),
                clipped_recent=clipped_values(recent[name], in_force[name]) / max(recent[name].finite, 1),
            )
        )
    return tuple(found)


def measure_drift(
    artifact: Path,
    data: str,
    *,
    preprocess: Preprocess | None = None,
    samples: int | None = None,
    batch_size: int | None = None,
    limit: float = DEFAULT_LIMIT,
    measure: Measure = "percentile",
    progress: Progress = SILENT,
) -> DriftReport:
    """Run the artifact's float model over recent data and compare the ranges.

    Args:
        data: as ``--data`` of a build; all of it, or the first ``samples``.
        preprocess: of images; None: as in the build.
        batch_size: what a moving average sees as one step; None: as in the build.
        limit, measure: as for :func:`compare_ranges`.

    Raises:
        InputError: no artifact, one without calibration, data that do not fit or are too few.
        CheckFailed: a NaN or infinity in an activation.
    """
    import calibrators
    from pipeline import calibrate
    from pipeline.data import batched, open_again

    opened = Artifact.open(artifact)
    record = opened.manifest.calibration
    plan = _plan(opened)
    calibrated, meta = calibrators.load_statistics(opened.path(layout.CALIBRATION))
    doubt = check_float_graph(
        opened.path(layout.CALIBRATION),
        meta,
        opened.path(layout.FP32_MODEL),
        remedy="the artifact was put together of two builds: build it again",
    )
    if doubt is not None:
        progress.warn(doubt)
    calibrator = calibrators.get(record.calibrator, record.params)
    source = open_again(opened.manifest, data, preprocess, progress=progress)
    options = opened.manifest.data.options
    size = batch_size or (_BATCH_SIZE if options is None else options.batch_size)
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
            batched(wanted, size, opened.manifest.inputs),
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
        measure=measure,
        tensors=compare_ranges(plan, calibrated, recent, calibrator, limit=limit, measure=measure),
    )


def _plan(opened: Artifact) -> PlacementPlan:
    from pipeline.errors.opening import load_plan

    plan = load_plan(opened)
    if not plan.tensors:
        raise InputError(
            f"{opened.folder} has no calibrated tensor: its scales came with the model",
            remedy="drift can be told only for artifacts that were calibrated here",
        )
    return plan
