"""`quantize consistency` on files. Ranks are in test_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from pipeline.artifact import INT8_MODEL
from pipeline.cli.consistency import command
from tests.consistency.graphs import convolutions, float_model, write_artifact


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_equal_sources(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "art")
    result = run(folder, folder / INT8_MODEL)
    assert result.exit_code == 0, result.output
    assert "3 tensors agree in 2 contexts, bit for bit (atol 1e-05, rtol 0): consistency 100 %" in result.output
    assert not (tmp_path / "consistency").exists()


def test_a_mismatch_is_shown_saved_and_fails(tmp_path: Path) -> None:
    first, second = write_artifact(tmp_path / "a"), write_artifact(tmp_path / "b", x_scale=0.04)
    result = run(first, second)
    assert result.exit_code == 1
    assert "consistency 66.66 %" in result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("x ")]
    assert line.split() == ["x", "0.0309999995", "0.0399999991", "0.009", "29.03", "%", str(second)]
    assert "consistency.txt, consistency.json, consistency.png in consistency show every tensor" in result.output
    saved = json.loads((tmp_path / "consistency" / "consistency.json").read_text())
    assert saved["who"] == [str(second)]
    assert saved["rate"] == pytest.approx(2 / 3)
    assert [row["tensor"] for row in saved["rows"] if row["problem"]] == ["x"]
    assert (tmp_path / "consistency" / "consistency.png").read_bytes().startswith(b"\x89PNG")


def test_tolerances_and_json(tmp_path: Path) -> None:
    first, second = write_artifact(tmp_path / "a"), write_artifact(tmp_path / "b", x_scale=0.0311)
    assert run(first, second, "--rtol", 0.01, "-q").exit_code == 0
    result = run(first, second, "--rtol", 0.001, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["consistent"] is False
    assert shown["rows"]
    assert "tensors differ" in shown["error"]
    assert "show every tensor" in shown["remedy"]
    assert Path(shown["files"][0]).parent == tmp_path / "out"


def test_saved_on_one_machine_compared_on_another(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    result = run(folder, "--save", tmp_path / "here.json")
    assert result.exit_code == 0
    assert "here.json written: 3 tensors, digest " in result.output
    assert run(tmp_path / "here.json", folder).exit_code == 0
    assert run(tmp_path / "here.json", write_artifact(tmp_path / "b", x_scale=1.0)).exit_code == 1
    digest = json.loads(run(folder, "--save", tmp_path / "again.json", "--json").stdout)["digest"]
    assert digest == json.loads((tmp_path / "here.json").read_text())["digest"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a comparison needs at least two contexts, got 0"),
        (["none", "none"], "none does not exist"),
        (["a", "--across-batches", "--on-device"], "--across-batches and --on-device are two checks"),
        (["a", "b", "--on-device"], "--on-device takes one model or artifact, got 2"),
        (["a", "--across-batches"], "no calibration data is given"),
        (["a", "--across-batches", "--device", "cuda"], "--device cuda is for the check over ranks"),
        (["a", "b", "--device", "cuda"], "--device cuda is for the check over ranks"),
    ],
)
def test_wrong_use(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_across_batches(tmp_path: Path) -> None:
    onnx.save(convolutions(), tmp_path / "m.onnx")
    data = np.random.default_rng(1).standard_normal((20, 32, 4, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", data * np.linspace(1, 3, 20)[:, None, None, None].astype(np.float32))
    result = run(
        tmp_path / "m.onnx", "--across-batches", "--data", tmp_path / "x.npy", "--samples", 12, "--batch-size", 4,
        "--calibrator", "minmax", "--json", "-q", "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["calibrator"] == "minmax"
    assert shown["batches"] == [0, 1, 2]
    assert {row["tensor"] for row in shown["rows"]} >= {"x"}
    for row in shown["rows"]:
        assert row["largest"] == pytest.approx(row["merged"])
        assert row["smallest"] < row["largest"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["batches.json", "batches.png", "batches.txt"]


def test_the_graph_is_made_as_a_build_makes_it(tmp_path: Path) -> None:
    """--equalise brings ranges closer; --input and --opset reach the export, and only what was typed is warned of."""
    model = convolutions()
    model.opset_import[0].version = 14
    spread = model.graph.initializer[0]
    weights = numpy_helper.to_array(spread) * np.geomspace(1, 50, 32, dtype=np.float32)[:, None, None, None]
    spread.CopyFrom(numpy_helper.from_array(weights, spread.name))
    onnx.save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).standard_normal((20, 32, 4, 4)).astype(np.float32))
    arguments = (tmp_path / "m.onnx", "--across-batches", "--data", tmp_path / "x.npy", "--calibrator", "minmax", "-q")
    plain, equalised = (run(*arguments, "--json", *more) for more in ((), ("--equalise", "--opset", 18)))
    assert (plain.exit_code, equalised.exit_code) == (0, 0), plain.output + equalised.output
    assert "no effect" not in plain.stderr
    assert "--opset 18 has no effect: the model has opset 14" in equalised.stderr
    assert "--equalise" not in equalised.stderr
    before, after = (
        {row["tensor"]: row["merged"] for row in json.loads(done.stdout)["rows"]} for done in (plain, equalised)
    )
    assert after["r"] < before["r"] / 2
    other = run(*arguments, "--input", "image:1x32x4x4:float32")
    assert other.exit_code == 2
    assert "image" in other.stderr


def test_options_of_a_model_are_none_of_an_artifact(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "art")
    for option in (("--input", "x:1x4:float32"), ("--profile", "x=1x4,1x4,1x4"), ("--opset", 18), ("--equalise",)):
        result = run(folder, "--across-batches", "--data", "x.npy", *option)
        assert result.exit_code == 2
        assert f"{option[0]} has no effect here: it is for a model that is prepared here" in result.stderr
        result = run(folder, folder, *option)
        assert f"{option[0]} has no effect here: it is for calibrating here" in result.stderr


def test_a_model_without_tensors_to_calibrate(tmp_path: Path) -> None:
    onnx.save(float_model(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.zeros((8, 4), np.float32))
    result = run(tmp_path / "m.onnx", "--across-batches", "--data", tmp_path / "x.npy", "-q")
    assert result.exit_code == 2
    assert "has no tensor to calibrate: no node of it is quantised" in result.output
