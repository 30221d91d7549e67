"""Drift: moved ranges are found, unmoved ones are not, and the estimate of the cost is right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import calibrators
from calibrators import TensorStatistics
from calibrators.accumulate import add_batch
from pipeline.artifact import Artifact
from pipeline.cli.drift import command
from pipeline.compare.drift import compare_ranges, measure_drift
from pipeline.config import BuildConfig, CalibratorConfig
from pipeline.core.errors import InputError
from pipeline.placement import ActivationPoint, PlacementPlan
from tests.compare.networks import classifier


def plain_images(count: int, seed: int) -> np.ndarray:
    """float32 (count, 3, 8, 8) of one kind."""
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small artifact, calibrated on 128 of 400 images with percentile 99.9."""
    from pipeline.stages import build

    folder = tmp_path_factory.mktemp("drift")
    np.save(folder / "data.npy", plain_images(400, seed=0))
    config = BuildConfig(
        model=str(classifier(folder / "model.onnx")),
        data=str(folder / "data.npy"),
        out=folder / "artifact",
        targets=("onnx",),
        profiles=("x=1x3x8x8,4x3x8x8,8x3x8x8",),
        calibrator=CalibratorConfig(name="percentile", params={"percentile": 99.9}),
    )
    return build(config).folder


def recent(folder: Path, factor: float, count: int = 300) -> str:
    np.save(folder / "recent.npy", factor * plain_images(count, seed=1))
    return str(folder / "recent.npy")


def test_other_data_of_the_same_kind_is_not_flagged(artifact: Path, tmp_path: Path) -> None:
    report = measure_drift(artifact, recent(tmp_path, 1.0))
    assert report.flagged == ()
    assert report.samples == 300
    assert report.calibrator == "percentile"
    assert len(report.tensors) >= 2
    for item in report.tensors:
        assert abs(item.change) < 0.15
        assert abs(item.extra_error) < 0.002


def test_brighter_data_is_flagged_with_its_cost(artifact: Path, tmp_path: Path) -> None:
    report = measure_drift(artifact, recent(tmp_path, 1.5))
    (entry,) = [item for item in report.tensors if item.tensor == "x"]
    assert entry in report.flagged
    assert entry.change == pytest.approx(0.5, abs=0.05)
    assert entry.clipped_recent > 0.005
    assert entry.error_recent > entry.error_recalibrated
    assert entry.extra_error > 0.0
    changes = [abs(item.change) for item in report.flagged]
    assert changes == sorted(changes, reverse=True)


def test_the_range_in_force_is_the_artifacts(artifact: Path, tmp_path: Path) -> None:
    scales = json.loads((artifact / "scales.json").read_text())["tensors"]
    for item in measure_drift(artifact, recent(tmp_path, 1.0)).tensors:
        assert item.amax == scales[item.tensor]["amax"]


def test_the_artifacts_calibrator_can_judge_instead(artifact: Path, tmp_path: Path) -> None:
    for item in measure_drift(artifact, recent(tmp_path, 1.0), measure="calibrator").tensors:
        assert item.calibrated == item.amax


def test_the_same_data_has_not_moved(artifact: Path, tmp_path: Path) -> None:
    calibrated, _ = calibrators.load_statistics(artifact / "calibration.npz")
    plan = PlacementPlan(activations=(ActivationPoint(tensor="x", consumers=(), rule="r"),))
    (item,) = compare_ranges(plan, calibrated, calibrated, calibrators.get("entropy"))
    assert item.change == 0.0
    assert item.error_recent == item.error_calibrated == item.error_recalibrated


def statistics(values: np.ndarray) -> TensorStatistics:
    stats = TensorStatistics()
    add_batch(stats, values.astype(np.float32), 0)
    return stats


@pytest.mark.parametrize(("factor", "flagged"), [(1.14, False), (1.16, True), (0.86, False), (0.84, True)])
def test_the_limit_counts_in_both_directions(factor: float, flagged: bool) -> None:
    values = np.random.default_rng(0).standard_normal(50_000)
    plan = PlacementPlan(activations=(ActivationPoint(tensor="t", consumers=(), rule="r"),))
    (item,) = compare_ranges(
        plan, {"t": statistics(values)}, {"t": statistics(factor * values)}, calibrators.get("minmax")
    )
    assert item.change == pytest.approx(factor - 1.0, abs=2e-4)
    assert item.flagged == flagged


def test_the_expected_error_is_the_error_of_the_recent_values() -> None:
    before = np.random.default_rng(0).standard_normal(100_000)
    now = np.random.default_rng(1).standard_normal(100_000) * 2.0
    plan = PlacementPlan(activations=(ActivationPoint(tensor="t", consumers=(), rule="r"),))
    (item,) = compare_ranges(
        plan, {"t": statistics(before)}, {"t": statistics(now)}, calibrators.get("percentile", {"percentile": 99})
    )

    def error(values: np.ndarray, amax: float) -> float:
        scale = amax / 127
        rounded = scale * np.clip(np.rint(values / scale), -127, 127)
        return float(np.linalg.norm(values - rounded) / np.linalg.norm(values))

    assert item.error_calibrated == pytest.approx(error(before, item.amax), rel=0.02)
    assert item.error_recent == pytest.approx(error(now, item.amax), rel=0.02)
    assert item.error_recalibrated == pytest.approx(error(now, np.percentile(np.abs(now), 99)), rel=0.02)
    assert item.clipped_recent == pytest.approx((np.abs(now) > item.amax).mean(), rel=0.02)


def test_a_known_range_and_a_group_count_as_in_the_build() -> None:
    points = (
        ActivationPoint(tensor="a", consumers=(), rule="r", group="g"),
        ActivationPoint(tensor="b", consumers=(), rule="r", group="g"),
        ActivationPoint(tensor="c", consumers=(), rule="r", known_amax=6.0),
    )
    small, large = np.linspace(-1, 1, 100), np.linspace(-8, 8, 100)
    before = {"a": statistics(small), "b": statistics(large), "c": statistics(large)}
    now = {"a": statistics(4 * small), "b": statistics(large), "c": statistics(2 * large)}
    found = compare_ranges(PlacementPlan(activations=points), before, now, calibrators.get("minmax"))
    assert [(item.calibrated, item.change) for item in found] == [(8.0, 0.0), (8.0, 0.0), (6.0, 0.0)]


def test_too_few_samples(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="7 samples say nothing about ranges, at least 8 are needed"):
        measure_drift(artifact, recent(tmp_path, 1.0, count=7))
    with pytest.raises(InputError, match="4 samples say nothing about ranges"):
        measure_drift(artifact, recent(tmp_path, 1.0), samples=4)


def test_a_damaged_plan_and_an_artifact_that_was_not_calibrated_here(artifact: Path, tmp_path: Path) -> None:
    opened = Artifact.open(artifact)
    original = (artifact / "placement.json").read_text()
    try:
        (artifact / "placement.json").write_text("{")
        opened.updated(files=("placement.json",))
        with pytest.raises(InputError, match=r"placement\.json cannot be read"):
            measure_drift(opened.folder, recent(tmp_path, 1.0))
        (artifact / "placement.json").write_text(json.dumps({"prequantized": True}))
        opened.updated(files=("placement.json",))
        with pytest.raises(InputError, match="has no calibrated tensor: its scales came with the model"):
            measure_drift(opened.folder, recent(tmp_path, 1.0))
    finally:
        (artifact / "placement.json").write_text(original)
        opened.updated(files=())


def test_the_command_line(artifact: Path, tmp_path: Path) -> None:
    quiet = CliRunner().invoke(command, [str(artifact), "--data", recent(tmp_path, 1.0), "-q"])
    assert quiet.exit_code == 0, quiet.output
    assert quiet.stdout == ""
    fine = CliRunner().invoke(command, [str(artifact), "--data", recent(tmp_path, 1.0), "--json", "-q"])
    assert fine.exit_code == 0
    assert json.loads(fine.stdout)["flagged"] == []
    moved = CliRunner().invoke(command, [str(artifact), "--data", recent(tmp_path, 2.0), "-q"])
    assert moved.exit_code == 1
    assert "ranges moved by more than 15 %" in moved.stderr
    assert "with the range that a new calibration would give" in " ".join(moved.stdout.split())
    as_json = CliRunner().invoke(command, [str(artifact), "--data", recent(tmp_path, 2.0), "--json", "-q"])
    assert as_json.exit_code == 1
    shown = json.loads(as_json.stdout)
    assert "x" in shown["flagged"]
    assert shown["tensors"][0]["calibrated"] > 0
    assert "ranges moved by more than 15 %" in shown["error"]
    assert "ranges moved by more than 15 %" in as_json.stderr
    wide = CliRunner().invoke(command, [str(artifact), "--data", recent(tmp_path, 1.5), "-q", "--limit", "200"])
    assert wide.exit_code == 0
    wrong = CliRunner().invoke(command, [str(artifact), "--data", str(tmp_path), "--preprocess", "imagnet"])
    assert wrong.exit_code == 2
    assert "unknown preprocessing preset 'imagnet'; did you mean 'imagenet'" in wrong.stderr
    nothing = CliRunner().invoke(command, [str(tmp_path), "--data", recent(tmp_path, 1.0)])
    assert nothing.exit_code == 2
    assert "is no artifact" in nothing.stderr


def test_images_are_read_as_in_the_build(tmp_path: Path) -> None:
    """Drift and errors need no --preprocess again; an artifact that does not say asks for it."""
    from PIL import Image

    from pipeline.cli.errors import command as errors
    from pipeline.stages import build

    (tmp_path / "images").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number:02d}.png")
    done = build(
        BuildConfig(
            model=str(classifier(tmp_path / "model.onnx")),
            data=str(tmp_path / "images"),
            out=tmp_path / "artifact",
            targets=("onnx",),
            profiles=("x=1x3x8x8,4x3x8x8,8x3x8x8",),
            preprocess="mean=127;std=64",
            batch_size=4,
        )
    )
    recorded = done.manifest.data.options
    assert recorded is not None
    assert (recorded.data, recorded.batch_size) == (str(tmp_path / "images"), 4)
    arguments = [str(done.folder), "--data", str(tmp_path / "images")]
    said = "images are preprocessed as in the build: interpolation=bilinear;channels=rgb;mean=127.0;std=64.0"
    found = CliRunner().invoke(command, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    assert said in found.stderr
    assert all(abs(item["change"]) < 0.15 for item in json.loads(found.stdout)["tensors"])
    told = CliRunner().invoke(errors, [*arguments, "--json", "--out", str(tmp_path / "report")])
    assert told.exit_code == 0, told.output
    assert said in told.stderr
    # An artifact of before.
    manifest = json.loads((done.folder / "manifest.json").read_text())
    del manifest["data"]["options"]
    (done.folder / "manifest.json").write_text(json.dumps(manifest))
    for which in (command, errors):
        old = CliRunner().invoke(which, arguments)
        assert old.exit_code == 2
        assert "its manifest does not say how images are preprocessed" in " ".join(old.stderr.split())
        assert "give --preprocess as in the build" in old.stderr
    given = CliRunner().invoke(command, [*arguments, "--preprocess", "mean=127;std=64", "-q"])
    assert given.exit_code == 0, given.output
