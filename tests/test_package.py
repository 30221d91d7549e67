"""Packaging and reading an artifact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import package
from pipeline.artifact import MANIFEST, WORK, Artifact, CalibrationRecord, DataRecord, Manifest, SourceRecord
from pipeline.core.errors import InputError


def manifest(sha256: str = "a" * 64) -> Manifest:
    return Manifest(
        name="net",
        created="2026-01-01T00:00:00+00:00",
        tools={},
        source=SourceRecord(kind="onnx", spec="net.onnx", sha256=sha256),
        data=DataRecord(spec="data", sha256="d", calibration_samples=2, verification_samples=1, held_aside=True),
        calibration=CalibrationRecord(calibrator="entropy", params={}, batches=1, skipped_batches=0, tensors=3),
        inputs=(),
        outputs=(),
        profiles=(),
    )


def packaged(tmp_path: Path) -> Artifact:
    (tmp_path / "m").write_text("model")
    (tmp_path / "p").write_text("plan")
    files = {"model.int8.onnx": tmp_path / "m", "engines/rtx/model.plan": tmp_path / "p"}
    return package.run(files, manifest(), folder=tmp_path / "out")


def test_written_artifact_opens_and_has_no_differences(tmp_path: Path) -> None:
    packaged(tmp_path)
    artifact = Artifact.open(tmp_path / "out")
    assert artifact.differences() == []
    assert set(artifact.manifest.files) == {"model.int8.onnx", "engines/rtx/model.plan", "reports/summary.md"}


def test_every_kind_of_difference_is_named(tmp_path: Path) -> None:
    artifact = packaged(tmp_path)
    plan = artifact.folder / "engines/rtx/model.plan"
    plan.unlink()
    plan.write_text("Plan")
    (artifact.folder / "model.int8.onnx").unlink()
    (artifact.folder / "notes.txt").write_text("mine")
    assert [(d.file, d.kind) for d in artifact.differences()] == [
        ("engines/rtx/model.plan", "changed"),
        ("model.int8.onnx", "missing"),
        ("notes.txt", "unlisted"),
    ]


def test_packaging_again_removes_files_of_the_old_build(tmp_path: Path) -> None:
    packaged(tmp_path)
    again = package.run({"model.int8.onnx": tmp_path / "m"}, manifest(), folder=tmp_path / "out")
    assert again.differences() == []
    assert not (again.folder / "engines").exists()


def test_a_folder_without_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no artifact"):
        Artifact.open(tmp_path)
    (tmp_path / WORK).mkdir()
    with pytest.raises(InputError, match="was not finished"):
        Artifact.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ('{"schema_version": 9}', "schema version 9"), ("[]", "schema version None")],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(InputError, match=message):
        Artifact.open(tmp_path)


def test_an_artifact_of_another_model_is_not_replaced(tmp_path: Path) -> None:
    packaged(tmp_path)
    with pytest.raises(InputError, match="of another model"):
        package.check_owner(tmp_path / "out", "b" * 64, force=False)
    package.check_owner(tmp_path / "out", "b" * 64, force=True)
    package.check_owner(tmp_path / "out", "a" * 64, force=False)


def test_a_build_killed_while_placing_files_keeps_its_owner(tmp_path: Path) -> None:
    out = packaged(tmp_path).folder
    staging = out / WORK / "next"
    staging.mkdir(parents=True)
    (out / MANIFEST).rename(staging / MANIFEST)
    with pytest.raises(InputError, match="of another model"):
        package.check_owner(out, "b" * 64, force=False)
    package.check_owner(out, "a" * 64, force=False)


def test_a_foreign_folder_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        package.check_folder(tmp_path, force=False)
    package.check_folder(tmp_path, force=True)
    package.check_folder(tmp_path / "new", force=False)
    with pytest.raises(InputError, match="is a file"):
        package.check_folder(tmp_path / "thesis.tex", force=True)


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "a/../../b", ""])
def test_a_manifest_with_files_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = packaged(tmp_path).folder
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"model.int8.onnx"', json.dumps(name)))
    with pytest.raises(InputError, match="does not lie in the artifact"):
        Artifact.open(folder)


def test_a_folder_name_that_no_disk_takes_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="File name too long"):
        package.check_folder(tmp_path / ("y" * 300), force=False)


def test_a_folder_in_the_place_of_a_file_is_found_before_the_old_artifact_is_touched(tmp_path: Path) -> None:
    folder = packaged(tmp_path).folder
    before = (folder / MANIFEST).read_bytes()
    (folder / "scales.json").mkdir()
    with pytest.raises(InputError, match=r"scales\.json is a folder"):
        package.run({"scales.json": tmp_path / "m"}, manifest(), folder=folder)
    assert (folder / MANIFEST).read_bytes() == before
    assert (folder / "model.int8.onnx").is_file()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("profiles", ["x"], "profiles: profile 'x' is not NAME=MIN,OPT,MAX"),
        ("targets", {"rtx": {"plan_bytes": "x"}}, "targets: plan_bytes of rtx is 'x', expected a number"),
        ("targets", {"rtx": {"build_seconds": []}}, r"targets: build_seconds of rtx is \[\], expected a number"),
        ("verification", {"outputs": None}, "verification: outputs: Input should be a valid tuple"),
        ("verification", {"outputs": [None]}, "verification: outputs.0: Input should be a valid dictionary"),
        ("verification", {"outputs": [{"name": "y", "far": "x"}]}, "outputs.0.far: Input should be a valid integer"),
        ("verification", {"outputs": [{"name": "y", "max_abs": 1.0}]}, "max_abs and value_range are there together"),
        ("verification", {"almost_zero_layers": "x"}, "almost_zero_layers: Input should be a valid dictionary"),
        ("verification", {"top1_fp32": 0.5}, "top1_fp32 and top1_int8 are there together or not at all"),
    ],
)
def test_figures_that_no_build_writes(tmp_path: Path, path: str, value: object, message: str) -> None:
    """They are refused where the manifest is read, and no table is made of them."""
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(json.loads(manifest().model_dump_json()) | {path: value}))
    with pytest.raises(InputError, match=f"{file} is not a valid manifest: .*{message}") as error:
        Artifact.open(tmp_path)
    assert "build again" in str(error.value.remedy)
