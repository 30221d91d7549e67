"""An option that does nothing in the mode that was asked for is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import package
from pipeline.artifact import Artifact
from pipeline.cli import main
from tests.engine.artifacts import manifest

ENTRY = {"amax": 12.7, "scale": 0.1, "min": -1.0, "max": 12.7, "calibrator": "minmax"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect", "a", "--batch", "4"), "--batch has no effect here: it is for the layers of an engine"),
        (("inspect", "a", "--engine", "rtx", "--scales"), "--scales has no effect here: it is for the artifact's own"),
        (("verify", "a", "--target", "tensorrt"), "--target has no effect here: it is for the check of an engine"),
        (("errors", "a", "--engine-capture", "marked-outputs"), "--engine-capture has no effect here"),
        (("errors", "a", "--samples", "4"), "--samples has no effect here: it is for the samples of --data"),
        (("errors", "a", "--batch-size", "8"), "--batch-size has no effect here"),
        (("consistency", ".", "--across-batches", "--data", "d", "--profile", "x=1"), "--profile has no effect here"),
        (("consistency", "a", "--target", "rtx"), "--target has no effect here"),
        (("consistency", "a", "--across-batches", "--probe", "p"), "--probe has no effect here"),
        (("consistency", "a", "--across-batches", "--atol", "1"), "--atol has no effect here"),
        (("consistency", "a", "--across-batches", "--save", "s"), "--save has no effect here"),
        (("consistency", "a", "--across-batches", "--shards", "blocks"), "--shards has no effect here"),
        (("consistency", "a", "--on-device", "--out", "o"), "--out has no effect here"),
        (("consistency", "a", "--on-device", "--data", "d"), "--data has no effect here: it is for calibrating here"),
        (("consistency", "a", "b", "--percentile", "99"), "--percentile has no effect here"),
        (("consistency", "a", "b", "--rank-timeout", "9"), "--rank-timeout has no effect here"),
        (("calibrate", "--merge", "a", "b", "--data", "d"), "--data has no effect here: it is for a pass over data"),
        (("calibrate", "--merge", "a", "b", "--fresh"), "--fresh has no effect here"),
        (("calibrate", "m", "--data", "d", "--backend", "gloo"), "--backend has no effect here: it is for a pass over"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, tuple) else "",
)
def test_what_does_nothing_is_refused_before_anything_is_read(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    found = CliRunner().invoke(main, [*arguments, "--json"])
    assert found.exit_code == 2, found.exception
    document = json.loads(found.stdout)
    assert said in document["error"]
    assert "or leave --" in document["remedy"]


def test_under_torchrun_other_options_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for flags in (["--checkpoint-every", "2"], ["--fresh"]):
        found = CliRunner().invoke(main, ["calibrate", "m", "--data", "d", *flags])
        assert found.exit_code == 2
        assert f"{flags[0]} has no effect here: it is for a pass of one process" in found.stderr


def made(folder: Path, text: str) -> Artifact:
    (folder / "scales.json").write_text(text)
    entry = manifest(("x=1x3,1x3,4x3",), shape=("N", 3))
    return package.run({"scales.json": folder / "scales.json"}, entry, folder=folder / "net")


def test_scales_are_in_the_document_too(tmp_path: Path) -> None:
    folder = str(made(tmp_path, json.dumps({"tensors": {"x": ENTRY}})).folder)
    shown = json.loads(CliRunner().invoke(main, ["inspect", folder, "--scales", "--json"]).stdout)
    assert shown["scales"] == {"x": ENTRY}
    assert "scales" not in json.loads(CliRunner().invoke(main, ["inspect", folder, "--json"]).stdout)
    assert "minmax" in CliRunner().invoke(main, ["inspect", folder, "--scales"]).stdout


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 100_000], ids=["cut", "list", "empty", "deep"])
def test_scales_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    folder = str(made(tmp_path, text).folder)
    found = CliRunner().invoke(main, ["inspect", folder, "--scales"])
    assert found.exit_code == 2
    assert "scales.json has no scales that can be read" in " ".join(found.stderr.split())
