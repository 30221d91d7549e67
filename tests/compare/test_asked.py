"""Options of `quantize compare` that do nothing, and artifacts that --build would not make: said before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline import stages
from pipeline.artifact import Artifact
from pipeline.cli.build import command as build_command
from pipeline.cli.compare import command
from pipeline.compare import experiment
from pipeline.compare.asked import COMPARED
from pipeline.compare.config import CompareConfig
from pipeline.config import BuildConfig
from pipeline.core.errors import InputError
from tests.compare.networks import classifier, images

PROFILE = "x=1x3x8x8,4x3x8x8,8x3x8x8"
NEVER_IDLE = {
    "model", "config", "data", "out", "labels", "metric", "calibrators", "target", "shift_sigma", "shift_images",
    "seed", "workers", "address", "inputs", "profiles", "opset", "samples", "verify_samples", "batch_size",
    "preprocess", "include", "exclude", "rules_off", "precision", "fp16_io", "build_artifact", "fresh", "as_json",
    "quiet", "verbose", "calibration", "engine", "placement", "mixed",
}  # fmt: skip
"""Each has an effect in every combination, or one without is refused by a message of its own. Of the last three, parts
are in the table."""

Said = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    classifier(folder / "m.onnx")
    np.save(folder / "data.npy", images(48))
    return folder


@pytest.fixture
def compare(inputs: Path, tmp_path: Path) -> Said:
    """`quantize compare` of the small network, with a file where ``text`` is given."""

    def run(*flags: Any, text: str = "") -> tuple[int, str]:
        arguments = [inputs / "m.onnx", "--data", inputs / "data.npy", "--out", tmp_path / "out", "--profile", PROFILE]
        arguments += ["--calibrators", "minmax", "--samples", 24, "--workers", 1, *flags]
        if text:
            (tmp_path / "c.yaml").write_text(text)
            arguments += ["-c", tmp_path / "c.yaml"]
        result = CliRunner().invoke(command, [str(item) for item in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, " ".join(result.output.split())

    return run


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> list[CompareConfig]:
    """No experiment is made: the configurations that one was asked for with."""
    asked: list[CompareConfig] = []

    def stop(config: CompareConfig, **_: Any) -> None:
        asked.append(config)
        raise InputError("enough")

    monkeypatch.setattr(experiment, "run_experiment", stop)
    return asked


def test_the_table_and_the_list_have_every_option() -> None:
    keys = {option.key for option in COMPARED}
    fields = {*CompareConfig.model_fields, *(item.name for item in command.params)}
    assert fields == NEVER_IDLE | {key for key in keys if "." not in key}
    flags = {item.name: max(item.opts, key=len) for item in command.params}
    for option in COMPARED:
        if option.key in flags:
            assert option.flag == flags[option.key]
    assert {name for name in CompareConfig.model_fields if name in BuildConfig.model_fields} == {
        *BuildConfig.model_fields
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--shift-absolute",), "--shift-absolute has no effect here: it is for noise on activations"),
        (("--shift-draws", "2"), "give --shift-sigma 0.05 as well, or leave --shift-draws out"),
        (("--shift-draws", "3", "--shift-sigma", "0"), "--shift-draws has no effect here: it is for noise on"),
        (("--calibration-subsets", "5"), "--calibration-subsets has no effect here: it is for calibrating on fewer"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, tuple) else "",
)
def test_a_flag_that_does_nothing_is_refused(
    flags: tuple[str, ...], said: str, compare: Said, unmeasured: list[CompareConfig], tmp_path: Path
) -> None:
    code, found = compare(*flags)
    assert code == 2
    assert said in found
    assert not unmeasured
    assert not (tmp_path / "out").exists()


def test_a_flag_for_the_pass_is_refused_where_a_file_takes_its_place(
    compare: Said, unmeasured: list[CompareConfig], tmp_path: Path
) -> None:
    for flags in (("--calibration-size", "8"), ("--on-nonfinite", "skip"), ("--device", "cuda")):
        code, said = compare(*flags, text=f"calibration: {tmp_path / 'c.npz'}")
        assert code == 2
        assert f"{flags[0]} has no effect here: it is for the pass over the data, which --calibration takes" in said
    assert not unmeasured


def test_what_a_file_has_for_another_command_is_a_warning(compare: Said, unmeasured: list[CompareConfig]) -> None:
    text = (
        "name: n\ntargets: [onnx]\ncalibrator: entropy\nequalise: true\nshift_draws: 3\ncalibration_subsets: 2\n"
        "mixed: {min_sqnr: 20dB, samples: 8}\nengine: {max_aux_streams: 1, fp16: true}\n"
    )
    code, said = compare(text=text)
    assert code == 2
    assert said.endswith("enough")
    for key, words in (
        ("name", "the artifact that --build makes"),
        ("targets", "the artifact that --build makes"),
        ("equalise", "the artifact that --build makes"),
        ("calibrator", "a build, and --build takes the calibrator that is recommended"),
        ("shift_draws", "noise on activations"),
        ("calibration_subsets", "calibrating on fewer samples too"),
        ("mixed.min_sqnr", "the artifact that --build makes"),
        ("mixed.samples", "a search for mixed precision"),
        ("engine.max_aux_streams", "building an engine; this builds for onnx"),
        ("engine.fp16", "target tensorrt; this builds for onnx"),
    ):
        assert said.count(f"c.yaml: {key} has no effect here: it is for {words}") == 1
    (config,) = unmeasured
    assert (config.name, config.targets, config.equalise, config.engine) == ("", (), False, {})
    assert (config.shift_draws, config.calibration_subsets, config.mixed.wanted) == (2, 5, False)
    assert config.calibrator.name == "mse"


def test_what_has_an_effect_is_taken(compare: Said, unmeasured: list[CompareConfig]) -> None:
    text = "name: n\ntargets: [onnx]\nmixed: {min_sqnr: 20dB, samples: 8}"
    _, said = compare(
        "--build", "--shift-sigma", "0,0.1", "--shift-absolute", "--shift-draws", "2", "--calibration-size", "8",
        "--calibration-subsets", "3", "--on-nonfinite", "skip", text=text,
    )  # fmt: skip
    assert said == "error: enough"
    (config,) = unmeasured
    assert (config.name, config.mixed.samples, config.on_nonfinite) == ("n", 8, "skip")


# -- --build ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("equalise: true", "the experiment's statistics are of the graph as it is, and --build would build another"),
        ("mixed: {choose: 3}", "--choose 3"),
    ],
)
def test_what_the_build_would_be_refused_for_is_refused_before_the_experiment(
    text: str, said: str, compare: Said, unmeasured: list[CompareConfig]
) -> None:
    code, found = compare("--build", text=f"targets: [onnx]\n{text}")
    assert code == 2
    assert said in found
    assert not unmeasured


def test_engine_options_are_for_the_artifacts_targets_too(
    compare: Said, unmeasured: list[CompareConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for targets in (("onnx",), ("rtx", "onnx")):
        monkeypatch.setattr(stages.Build, "targets", lambda self, targets=targets: targets)
        monkeypatch.setattr("pipeline.combinations._refuse_for_targets", lambda options, targets: None)
        _, said = compare("--build", text="engine: {max_aux_streams: 1}")
        assert ("c.yaml: engine.max_aux_streams has no effect here" in said) == (targets == ("onnx",))
        assert unmeasured.pop().engine == ({} if targets == ("onnx",) else {"max_aux_streams": 1})


def test_scales_from_a_cache_are_refused(
    compare: Said, unmeasured: list[CompareConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.Build, "targets", lambda self: ("tensorrt",))
    monkeypatch.setattr("pipeline.combinations._refuse_for_targets", lambda options, targets: None)
    (tmp_path / "c.cache").write_text("TRT")
    code, said = compare("--build", text=f"engine: {{calibration_cache: {tmp_path / 'c.cache'}}}")
    assert code == 2
    assert "engine.calibration_cache: the artifact's graph has Q/DQ nodes, with which TensorRT would ignore it" in said
    assert not unmeasured


def test_a_folder_that_holds_something_else_is_refused(
    compare: Said, unmeasured: list[CompareConfig], tmp_path: Path
) -> None:
    (tmp_path / "out" / "artifact").mkdir(parents=True)
    (tmp_path / "out" / "artifact" / "mine.txt").write_text("")
    code, said = compare("--build", text="targets: [onnx]")
    assert code == 2
    assert "artifact is not empty and holds no artifact (it has mine.txt)" in said
    assert not unmeasured


def test_what_only_the_model_shows_is_refused_before_the_calibration(
    compare: Said, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dimension that the model has fixed; an artifact of another model."""
    monkeypatch.setattr(stages.Build, "calibrate", lambda *_: pytest.fail("calibrated"))
    onnx_alone = "targets: [onnx]"
    code, said = compare("--build", "--profile", "x=1x3x9x8,4x3x9x8,8x3x9x8", text=onnx_alone)
    assert code == 2
    assert "profile 1" in said
    classifier(tmp_path / "other.onnx", seed=3)
    arguments = [tmp_path / "other.onnx", "--data", inputs / "data.npy", "--target", "onnx", "--profile", PROFILE]
    monkeypatch.undo()
    done = CliRunner().invoke(build_command, [str(i) for i in (*arguments, "--out", tmp_path / "out" / "artifact")])
    assert done.exit_code == 0, done.output
    monkeypatch.setattr(stages.Build, "calibrate", lambda *_: pytest.fail("calibrated"))
    code, said = compare("--build", text=onnx_alone)
    assert code == 2
    assert "holds the artifact 'artifact' of another model" in said


def test_what_was_for_the_pass_does_not_stop_the_build(compare: Said, tmp_path: Path) -> None:
    """The experiment has made the pass, so the build would refuse it as idle."""
    code, said = compare("--build", "--on-nonfinite", "skip", "--opset", 18, text="targets: [onnx]\nname: mine")
    assert code == 0, said
    assert "--opset 18 has no effect: the model has opset 17" in said
    artifact = Artifact.open(tmp_path / "out" / "artifact")
    assert (artifact.manifest.name, artifact.manifest.calibration.calibrator) == ("mine", "minmax")


# -- refusals that the exported model decides come before the calibration ----------------------------------------------


def test_labels_and_shifts_of_another_kind_of_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx import helper, save

    from tests.compare.networks import graph

    monkeypatch.setattr(stages.Build, "calibrate", lambda *_: pytest.fail("calibrated"))
    weights = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    save(graph(nodes, {"x": ["N", 3, 16]}, {"y": ["N", 3, 64]}, {"w": weights}), tmp_path / "m.onnx")
    np.save(tmp_path / "data.npy", np.random.default_rng(1).standard_normal((60, 3, 16)).astype(np.float32))
    (tmp_path / "labels.csv").write_text("index,class_index\n" + "".join(f"{row},1\n" for row in range(60)))
    values = {"model": str(tmp_path / "m.onnx"), "data": str(tmp_path / "data.npy"), "out": tmp_path / "out"}
    for changes, said in (
        ({"labels": tmp_path / "labels.csv"}, "labels are given, but no output has one row of class scores"),
        ({"shift_images": ("blur",)}, "image shifts need a float input of rank 4"),
        ({"shift_sigma": (0.1,)}, "noise on activations is asked for, and the model has no activation layer"),
    ):
        with pytest.raises(InputError, match=said):
            experiment.run_experiment(CompareConfig.model_validate({**values, **changes}))
