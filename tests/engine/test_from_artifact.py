"""Compiling on the machine that serves: the engine is checked before it is added, and what fails leaves no trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.artifact import Artifact
from pipeline.cli.build import command
from pipeline.config import Profile
from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.engine import from_artifact, probe
from pipeline.engine.__main__ import main as engine_main
from pipeline.engine.from_artifact import ArtifactBuild, build_from_artifact
from pipeline.engine.recorded import check_outputs, fit_samples
from pipeline.engine.records import BuildOptions, EngineRecord
from pipeline.engine.runner import Runner
from tests.engine.artifacts import PROFILE, FakeBuilder, make_artifact
from tests.engine.records import record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    fake = FakeBuilder()
    monkeypatch.setattr(from_artifact, "build_engine", fake)
    return fake


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_engine_is_built_checked_and_listed(card: SimpleNamespace, builder: FakeBuilder, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a").folder
    done = build_from_artifact(folder, options=BuildOptions(fp16=True))
    assert done.check is not None
    assert done.check.relative_l2 == {"y": 0.0}
    assert done.check.agreement == {"y": 1.0}
    assert done.check.samples == 2
    ((model, target, profiles, options),) = builder.calls
    assert (model.name, target, options.fp16) == ("model.int8.onnx", "tensorrt", True)
    assert profiles == (Profile.parse(PROFILE),)
    artifact = Artifact.open(folder)
    assert artifact.differences() == []
    entry = artifact.manifest.targets["tensorrt"]
    assert entry["version"] == "8.6.0"
    assert entry["check"]["relative_l2"] == {"y": 0.0}
    with Runner.from_artifact(folder) as runner:
        assert np.all(runner({"x": np.ones((1, 3), np.float32)})["y"] == 2)


def test_an_earlier_engine_is_replaced_only_by_one_that_passes(
    card: SimpleNamespace, builder: FakeBuilder, tmp_path: Path
) -> None:
    folder = make_artifact(tmp_path / "a", engine=True).folder
    (folder / "engines/tensorrt/layers.json").write_text("{}")
    Artifact.open(folder).updated(files=("engines/tensorrt/layers.json",))
    build_from_artifact(folder)
    artifact = Artifact.open(folder)
    assert artifact.differences() == []
    assert "engines/tensorrt/layers.json" not in artifact.manifest.files
    before = tree(folder)
    builder.operation = "fail"
    with pytest.raises(ToolError, match="cannot run the engine"):
        build_from_artifact(folder)
    assert tree(folder) == before


def test_an_engine_that_computes_something_else_is_not_added(
    card: SimpleNamespace, builder: FakeBuilder, tmp_path: Path
) -> None:
    folder = make_artifact(tmp_path / "a", factor=3.0).folder
    before = tree(folder)
    with pytest.raises(CheckFailed, match=r"output 'y' of the engine differs from the recorded one by 0\.333"):
        build_from_artifact(folder)
    assert tree(folder) == before
    assert not list(folder.rglob("*.partial"))
    assert build_from_artifact(folder, tolerance=0.5).check is not None


def test_a_target_without_an_engine_is_refused(builder: FakeBuilder, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a").folder
    with pytest.raises(InputError, match="no engine to build for the target onnx") as caught:
        build_from_artifact(folder, target="onnx")
    assert caught.value.remedy == "known targets with an engine: rtx, tensorrt"
    assert builder.calls == []


def test_a_model_with_q_dq_nodes_of_its_own_has_no_float_plan(
    builder: FakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.from_artifact.require_fp16", lambda target: None)
    folder = make_artifact(tmp_path / "a", given=True).folder
    with pytest.raises(InputError, match="--fastest needs a float model, and this one came with Q/DQ nodes of its own"):
        build_from_artifact(folder, fastest=True)
    assert builder.calls == []


@pytest.mark.parametrize("name", ["model.int8.onnx", "samples.npz"])
def test_files_that_changed_are_not_built_from(builder: FakeBuilder, tmp_path: Path, name: str) -> None:
    folder = make_artifact(tmp_path / "a").folder
    (folder / name).write_bytes(b"something else")
    with pytest.raises(CheckFailed, match=f"{name} is not the file that the manifest lists"):
        build_from_artifact(folder)
    assert builder.calls == []


def test_weights_in_a_file_of_their_own_are_checked_too(builder: FakeBuilder, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a").folder
    (folder / "model.int8.onnx.data").write_bytes(b"weights")
    Artifact.open(folder).updated(files=("model.int8.onnx.data",))
    (folder / "model.int8.onnx.data").write_bytes(b"Weights")
    with pytest.raises(CheckFailed, match=r"model\.int8\.onnx\.data is not the file"):
        build_from_artifact(folder)


def test_an_rtx_engine_that_cannot_run_here_is_added_unchecked_and_says_so(
    builder: FakeBuilder, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx")
    builder.fields = {"tensorrt": "0.1.0"}
    folder = make_artifact(tmp_path / "a").folder
    done = build_from_artifact(folder, target="rtx")
    assert done.check is None
    assert "no engine can run here" in done.unchecked or "built with version 0.1.0" in done.unchecked
    assert "check" not in Artifact.open(folder).manifest.targets["rtx"]


def test_a_missing_engine_and_a_changed_one_are_refused_by_the_runner(card: SimpleNamespace, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a").folder
    with pytest.raises(InputError, match=r"no engine for target tensorrt; it has: none(.|\n)*--from"):
        Runner.from_artifact(folder)
    folder = make_artifact(tmp_path / "b", engine=True).folder
    (folder / "engines/tensorrt/model.plan").write_bytes(b"another")
    with pytest.raises(CheckFailed, match=r"model\.plan is not the file that the manifest lists"):
        Runner.from_artifact(folder)


def test_samples_are_fitted_to_what_the_profiles_allow() -> None:
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    same, kept = fit_samples(feeds, [Profile.parse("x=1x3,4x3,8x3")])
    assert (same["x"].shape, kept) == ((2, 3), 2)
    more, kept = fit_samples(feeds, [Profile.parse("x=5x3,6x3,8x3")])
    assert (more["x"].shape, kept) == ((5, 3), 2)
    assert np.array_equal(more["x"][:2], feeds["x"])
    fewer, kept = fit_samples(feeds, [Profile.parse("x=1x3,1x3,1x3")])
    assert (fewer["x"].shape, kept) == ((1, 3), 1)
    with pytest.raises(CheckFailed, match="no profile allows the recorded samples"):
        fit_samples(feeds, [Profile.parse("x=1x4,1x4,1x4")])


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({}, "the engine has no output 'y'"),
        ({"y": np.ones((2, 4))}, r"has shape \(2, 4\), recorded is \(2, 3\)"),
        ({"y": np.full((2, 3), np.nan)}, "has NaN or infinity"),
        ({"y": np.full((2, 3), 2.0)}, "differs from the recorded one by 1 "),
    ],
)
def test_what_makes_a_check_fail(outputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        check_outputs(outputs, {"y": np.ones((2, 3))}, 2, 0.1)


def test_a_check_that_fails_has_the_figures_of_every_output() -> None:
    good, bad = np.ones((2, 3)), np.full((2, 3), 1.5)
    expected = dict.fromkeys(("a", "b", "c", "d"), good)
    with pytest.raises(CheckFailed) as caught:
        check_outputs({"a": bad, "b": good, "c": bad[:1]}, expected, 2, 0.1)
    assert caught.value.message.count("; ") == 3  # one of the texts has its own
    for text in ("output 'a' of the engine differs", "output 'c' has shape (1, 3)", "no output 'd'"):
        assert text in caught.value.message
    assert caught.value.figures["check"]["relative_l2"] == {"a": pytest.approx(0.5), "b": 0.0}
    assert caught.value.figures["tolerance"] == 0.1


def test_json_of_a_failed_build_has_what_was_built_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(folder: Path, *, target: str, **rest: object) -> ArtifactBuild:
        if target == "tensorrt":
            raise CheckFailed("too far away", figures={"check": {"relative_l2": {"y": 0.5}}})
        return ArtifactBuild(target=target, engine=record(target="rtx"), check=None)

    monkeypatch.setattr(from_artifact, "build_from_artifact", fake)
    monkeypatch.setattr(probe, "probe", lambda target: SimpleNamespace(works=True))
    both = ["--from", str(tmp_path), "--target", "rtx", "--target", "tensorrt", "--json"]
    found = CliRunner().invoke(command, both)
    assert found.exit_code == 1
    shown = json.loads(found.stdout)
    assert (shown["error"], shown["target"]) == ("too far away", "tensorrt")
    assert shown["check"]["relative_l2"] == {"y": 0.5}
    assert [built["target"] for built in shown["built"]] == ["rtx"]
    failure = ToolError("TensorRT died")
    monkeypatch.setattr(from_artifact, "build_from_artifact", lambda folder, *, target, **rest: raising(failure))
    shown = json.loads(CliRunner().invoke(command, both).stdout)
    assert (shown["error"], shown["target"], shown["built"]) == ("TensorRT died", "rtx", [])


def raising(error: Exception) -> ArtifactBuild:
    raise error


def test_no_engine_is_built_where_another_target_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first target's engine would be replaced, and the artifact be half of each."""
    monkeypatch.setattr(from_artifact, "build_from_artifact", lambda *_, **__: pytest.fail("built"))
    states = {"rtx": SimpleNamespace(works=True), "tensorrt": SimpleNamespace(works=False, reason="not installed")}
    monkeypatch.setattr(probe, "probe", lambda target: states[target])
    both = ["--from", str(tmp_path), "--target", "rtx", "--target", "tensorrt", "--json"]
    found = CliRunner().invoke(command, both)
    assert found.exit_code == 2
    shown = json.loads(found.stdout)
    assert shown["error"] == "target tensorrt does not work here: not installed; no engine was built"
    assert "quantize doctor" in shown["remedy"]


def test_figures_of_a_check() -> None:
    wanted = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    found = wanted + np.array([[0.0, 0.0, 0.1], [-1.5, 0.0, 0.0]])
    check = check_outputs({"y": found}, {"y": wanted}, 2, 1.0)
    assert check.relative_l2["y"] == pytest.approx(float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)))
    assert check.agreement == {"y": 0.5}
    zero = check_outputs({"y": np.zeros(3)}, {"y": np.zeros(3)}, 3, 0.1)
    assert zero.relative_l2 == {"y": 0.0}


def test_serving_imports_nothing_heavy() -> None:
    """Building from an artifact and running need numpy, pydantic and TensorRT/PyCUDA only."""
    modules = ("from_artifact", "runner", "dispatch", "capture", "suite", "inspect", "lint", "coverage", "child")
    heavy = (
        "torch",
        "onnx",
        "onnxruntime",
        "onnx_ir",
        "onnxscript",
        "numba",
        "pandas",
        "seaborn",
        "matplotlib",
        "rich",
    )
    absent = (*heavy, "click", "yaml", "PIL", "tensorrt", "tensorrt_rtx", "pycuda")
    code = "; ".join(
        (
            "import sys, pipeline.build",
            *(f"import pipeline.engine.{name}" for name in modules),
            f"print([name for name in {absent!r} if name in sys.modules])",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_without_click_the_module_builds(
    card: SimpleNamespace,
    builder: FakeBuilder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_artifact(tmp_path / "a").folder
    monkeypatch.setattr(sys, "argv", ["engine", str(folder), "--fp16", "--profile", PROFILE])
    assert engine_main() == 0
    assert json.loads(capsys.readouterr().out)["check"]["samples"] == 2
    assert [options.fp16 for *_, options in builder.calls] == [True]
    monkeypatch.setattr(sys, "argv", ["engine", str(folder), "--profile", "nonsense"])
    assert engine_main() == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_module_needs_no_command_line_package(tmp_path: Path) -> None:
    code = "import sys, runpy; sys.modules['click'] = None; runpy.run_module('pipeline.engine', run_name='__main__')"
    absent = str(tmp_path / "absent")
    done = subprocess.run([sys.executable, "-c", code, absent], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert absent in done.stderr
    assert "Traceback" not in done.stderr


def test_the_manifest_entry_has_no_messages(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "a", engine=True)
    entry = artifact.manifest.targets["tensorrt"]
    assert "messages" not in entry
    assert entry["built_on"] == "Fake card (compute capability 9.0, driver 1.2.3)"
    record = EngineRecord.model_validate_json((artifact.folder / "engines/tensorrt/build.json").read_bytes())
    assert json.loads(record.model_dump_json())["tensorrt"] == entry["version"]
