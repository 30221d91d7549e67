"""A file of an artifact that was changed since the build is refused by every command that reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.artifact import CALIBRATION, FP32_MODEL, INT8_MODEL, PLACEMENT, SAMPLES, SCALES, Artifact
from pipeline.cli import main
from tests.errors.artifacts import images, make_artifact
from tests.errors.networks import network

DATA = "data.npy"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact, and data beside it."""
    folder = tmp_path_factory.mktemp("made")
    artifact = make_artifact(folder / "net", network({"relu": 1.2}))
    (artifact.folder / SCALES).write_text(json.dumps({"tensors": {}, "weights": {}}))
    artifact.updated(files=(SCALES,))
    images(folder / DATA)
    return folder


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((("errors", "net"), name) for name in (FP32_MODEL, INT8_MODEL, PLACEMENT, CALIBRATION, SAMPLES)),
        *((("errors", "net", "--out", "report"), name) for name in (FP32_MODEL, INT8_MODEL)),
        *((("diff", *pair), name) for pair in (("net", "same"), ("same", "net")) for name in (FP32_MODEL, INT8_MODEL)),
        (("diff", "net", "same"), "reports/errors.csv"),
        (("inspect", "net", "--scales"), SCALES),
        *((("explain", "net"), name) for name in (PLACEMENT, SCALES)),
        (("histogram", "net", "relu", "-o", "picture.png"), CALIBRATION),
        *((("drift", "net", "--data", DATA), name) for name in (FP32_MODEL, PLACEMENT, CALIBRATION)),
        (("consistency", "net", "same"), SCALES),
        *((("consistency", "net", "--across-batches", "--data", DATA), name) for name in (FP32_MODEL, PLACEMENT)),
    ],
    ids=lambda item: item if isinstance(item, str) else " ".join(item),
)
def test_a_changed_file_is_not_read(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    shutil.copytree(made / "net", tmp_path / "same")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net" / name
    path.write_bytes(path.read_bytes() + b" ")
    found = CliRunner().invoke(main, [*command, "--json"])
    assert found.exit_code == 1, found.output
    said = json.loads(found.stdout)
    assert f"net/{name} is not the file that the manifest lists" in said["error"]
    assert said["remedy"] == "restore it, or build again; `quantize verify net` checks every file"
    assert not (tmp_path / "report").exists()


def test_weights_beside_a_model_are_part_of_it(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "net", tmp_path / "net")
    beside = tmp_path / "net" / f"{FP32_MODEL}.data"
    beside.write_bytes(b"weights")
    artifact = Artifact.open(tmp_path / "net").updated(files=(beside.name,))
    assert artifact.path(FP32_MODEL) == tmp_path / "net" / FP32_MODEL
    beside.write_bytes(b"others")
    found = CliRunner().invoke(main, ["errors", str(tmp_path / "net")])
    assert found.exit_code == 1
    assert f"{beside.name} is not the file that the manifest lists" in found.stderr
    beside.unlink()
    found = CliRunner().invoke(main, ["errors", str(tmp_path / "net")])
    assert found.exit_code == 2
    assert f"net has no {beside.name}" in " ".join(found.stderr.split())
