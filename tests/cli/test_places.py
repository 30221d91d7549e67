"""Results do not go onto what a command reads, into an artifact, or onto a device."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.artifact import Artifact
from pipeline.cli import main
from pipeline.cli.places import check_out_file, check_out_folder
from pipeline.core.errors import InputError
from pipeline.core.files import copy_file, link_or_copy, write_text
from tests.errors.artifacts import make_artifact
from tests.errors.networks import network
from tests.test_export_onnx import conv


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("places") / "net", network()).folder


def refused(*words: str | Path) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    "words",
    [
        ("errors", "{net}", "--out", "{net}"),
        ("errors", "{net}", "--out", "{net}/reports"),
        ("errors", "{net}", "--out", "{net}/a/b"),
        ("bench", "{net}", "--out", "{net}"),
        ("compare", "{net}/model.fp32.onnx", "--data", "d.npy", "--out", "{net}"),
        ("consistency", "{net}", "{net}", "--out", "{net}"),
        ("consistency", "{net}", "{net}", "--save", "{net}/manifest.json"),
        ("histogram", "{net}", "x", "-o", "{net}/manifest.json"),
        ("calibrate", "{net}", "--data", "d.npy", "-o", "{net}/calibration.npz"),
        ("calibrate", "--merge", "a.npz", "b.npz", "-o", "{net}/calibration.npz"),
    ],
)
def test_into_an_artifact(made: Path, words: tuple[str, ...]) -> None:
    before = Artifact.open(made).differences()
    output = refused(*(word.format(net=made) for word in words))
    assert f"the artifact {made} knows its files" in output
    assert "choose a place outside" in output
    assert Artifact.open(made).differences() == before


def test_beside_an_artifact_and_into_the_folder_of_another_program(made: Path, tmp_path: Path) -> None:
    check_out_folder(made.parent / "elsewhere")
    (tmp_path / "manifest.json").write_text('{"name": "a page"}')
    check_out_folder(tmp_path)
    check_out_file(tmp_path / "x" / "h.png", inputs=["a.module:function", "\0", tmp_path])
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json"}


@pytest.mark.parametrize("name", ["m.onnx", "d.npy", "link"])
def test_onto_what_is_read(tmp_path: Path, name: str) -> None:
    model, data = conv(tmp_path / "m.onnx"), tmp_path / "d.npy"
    np.save(data, np.zeros((4, 3, 8, 8), np.float32))
    (tmp_path / "link").symlink_to(data)
    before = [hashlib.sha256(path.read_bytes()).digest() for path in (model, data)]
    output = refused("calibrate", model, "--data", data, "-o", tmp_path / name)
    assert f"cannot write {tmp_path / name}: it is read here, and would be replaced" in output
    assert [hashlib.sha256(path.read_bytes()).digest() for path in (model, data)] == before


def test_onto_the_statistics_that_are_drawn(tmp_path: Path, made: Path) -> None:
    file = Path(copy_of(made / "calibration.npz", tmp_path / "c.npz"))
    assert "it is read here" in refused("histogram", file, "x", "-o", file)
    assert "it is read here" in refused("consistency", file, file, "--save", file)


def copy_of(source: Path, target: Path) -> Path:
    copy_file(source, target)
    return target


def test_onto_a_device_or_a_pipe(tmp_path: Path) -> None:
    """Root may replace /dev/null by a file: a pipe stands for it here."""
    pipe, source = tmp_path / "pipe", tmp_path / "source"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    source.write_text("x")
    for path in (pipe, tmp_path / "link"):
        for write in (lambda p: write_text(p, "y"), lambda p: copy_file(source, p), lambda p: link_or_copy(source, p)):
            with pytest.raises(InputError, match="it is a device or a pipe, and no file"):
                write(path)
        with pytest.raises(InputError, match="it is a device or a pipe, and no file"):
            check_out_file(path)
    assert pipe.is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "source", "link"}
