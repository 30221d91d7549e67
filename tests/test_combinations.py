"""Options of `quantize build` that do nothing in a combination are refused before any work, by one table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from pipeline import combinations, stages
from pipeline.artifact import Artifact
from pipeline.cli.build import command
from pipeline.combinations import DEPENDENT, check_engine_options, check_options
from pipeline.config import BuildConfig
from pipeline.core.errors import InputError
from pipeline.engine import from_artifact
from pipeline.engine.records import BuildOptions
from tests.compare.networks import classifier, images

PROFILE = "x=1x3x8x8,4x3x8x8,8x3x8x8"
NEVER_IDLE = {
    "MODEL", "--config", "--data", "--out", "--name", "--input", "--profile", "--target", "--opset", "--calibrator",
    "--percentile", "--ema-alpha", "--ema-decay", "--quantile", "--cutoff", "--calibration", "--samples",
    "--verify-samples", "--batch-size", "--preprocess", "--labels", "--include", "--exclude", "--rule-off",
    "--equalise", "--precision", "--fp16-io", "--max-drop", "--min-sqnr", "--min-agreement", "--choose", "--from",
    "--fastest", "--force", "--fresh", "--json", "--quiet", "--verbose",
}  # fmt: skip
"""Each of these has an effect in every combination of options that is not refused by a message of its own: parameters
of another calibrator, --input with an .onnx file, --preprocess with arrays, --fastest without --from, --choose with
--fresh. What has none for a model that came quantised, or is of another opset, is a warning."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    classifier(folder / "m.onnx")
    np.save(folder / "data.npy", images(24))
    (folder / "cal.npz").write_bytes(b"")
    return folder


def run(inputs: Path, out: Path, *more: str | Path, target: str = "onnx", model: str = "m.onnx") -> tuple[int, str]:
    arguments = [inputs / model, "--data", inputs / "data.npy", "--out", out, "--target", target, "--profile", PROFILE]
    result = CliRunner().invoke(command, [str(item) for item in (*arguments, *more)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_the_table_and_the_list_have_every_option() -> None:
    typed = {item.opts[0] if item.name != "model" else "MODEL" for item in command.params}
    typed = {"--config" if flag == "-c" else {"-q": "--quiet", "-v": "--verbose"}.get(flag, flag) for flag in typed}
    dependent = {option.flag for option in DEPENDENT if option.flag}
    assert not dependent & NEVER_IDLE
    assert typed == dependent | NEVER_IDLE
    keys = {option.key for option in DEPENDENT}
    assert {f"engine.{name}" for name in BuildOptions.model_fields} <= keys


ONNX_ALONE = [
    ("--fp16",), ("--half-inputs",), ("--implicit", "c.cache"), ("--workspace", "1G"), ("--optimization-level", "3"),
    ("--tactic-source", "CUBLAS"), ("--version-compatible",), ("--hardware-compatibility", "ampere_plus"),
    ("--compute-capability", "8.6"), ("--timing-iterations", "4"), ("--timing-cache",),
    ("--timing-cache-folder", "here"),
]  # fmt: skip


@pytest.mark.parametrize("flags", ONNX_ALONE, ids=lambda flags: flags[0])
def test_engine_options_without_an_engine(flags: tuple[str, ...], inputs: Path, tmp_path: Path) -> None:
    code, said = run(inputs, tmp_path / "out", *flags)
    name = flags[0]
    assert code == 2
    assert f"{name} has no effect here: it is for" in said
    assert "; this builds for onnx" in said
    assert f"or leave {name} out" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--search-samples", "32"), "it is for a search for mixed precision give --max-drop, --min-sqnr or"),
        (("--layer-times", "a.json", "b.json"), "it is for a search for mixed precision"),
        (("--calibration", "cal.npz", "--on-nonfinite", "skip"), "the pass over the data, which --calibration takes"),
        (("--calibration", "cal.npz", "--device", "cuda"), "leave --calibration out to make the pass, or leave --dev"),
    ],
)
def test_options_of_what_is_not_done(flags: tuple[str, ...], said: str, inputs: Path, tmp_path: Path) -> None:
    flags = tuple(str(inputs / "cal.npz") if flag == "cal.npz" else flag for flag in flags)
    code, found = run(inputs, tmp_path / "out", *flags)
    assert code == 2
    assert said in found
    assert not (tmp_path / "out").exists()


def config(**values: Any) -> BuildConfig:
    return BuildConfig.model_validate({"model": "m.onnx", "data": "d.npy", "out": "out", **values})


def test_what_is_used_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "load_api", lambda target: SimpleNamespace(check_options=lambda options: None))
    searching = config(mixed={"min_sqnr": "20dB", "samples": 8, "layer_times": ["a", "b"]}, device="cuda")
    check_options(searching, BuildOptions(), ("onnx",))
    check_options(config(mixed={"choose": 1, "samples": 8}), BuildOptions(), ("onnx",))
    both = ("tensorrt", "onnx")
    check_options(config(), BuildOptions(avg_timing_iterations=4, timing_cache_folder=Path("t")), both)
    check_engine_options(BuildOptions(workspace_bytes=1, compute_capabilities=("8.6",)), ("rtx",))
    # Words and switches at their default ask for nothing.
    quiet = config(calibration="c.npz", device="cpu", on_nonfinite="error")
    check_options(quiet, BuildOptions(fp16=False, hardware_compatibility="none"), ("onnx",))


def test_options_that_need_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "load_api", lambda target: SimpleNamespace(check_options=lambda options: None))
    for options, said in (
        (BuildOptions(timing_cache=False, timing_cache_folder=Path("t")), "a timing cache, which --no-timing-cache"),
        (BuildOptions(mark_how="doubled"), "engine.mark_how has no effect here: it is for tensors that the engine"),
    ):
        with pytest.raises(InputError) as caught:
            check_engine_options(options, ("tensorrt",))
        assert said in str(caught.value)
    for options in (BuildOptions(avg_timing_iterations=4), BuildOptions(timing_cache=True)):
        with pytest.raises(InputError, match="it is for target tensorrt; this builds for rtx, onnx"):
            check_engine_options(options, ("rtx", "onnx"))


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, BuildConfig | None]]:
    """`quantize build -c` of a text with flags for a target: exit code, what is said, and the configuration built."""
    built: list[BuildConfig] = []

    def stop(config: BuildConfig, **_: Any) -> None:
        built.append(config)
        check_options(config, BuildOptions.model_validate(config.engine), config.targets)  # as the build does
        raise InputError("enough")

    monkeypatch.setattr(stages, "build", stop)
    monkeypatch.setattr(stages.Build, "targets", lambda self: self.config.targets)
    monkeypatch.setattr(combinations, "load_api", lambda target: SimpleNamespace(check_options=lambda options: None))

    def run(text: str, *flags: str, target: str = "onnx") -> tuple[int, str, BuildConfig | None]:
        built.clear()
        (tmp_path / "build.yaml").write_text(f"model: m.onnx\ndata: d\nout: {tmp_path / 'o'}\n{text}\n")
        result = CliRunner().invoke(
            command, ["-c", str(tmp_path / "build.yaml"), "--target", target, *flags, "-q"]
        )
        assert isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, " ".join(result.stderr.split()), built[0] if built else None

    return run


Configured = Callable[..., tuple[int, str, "BuildConfig | None"]]


def test_what_a_file_has_for_another_machine_is_a_warning(configured: Configured) -> None:
    text = "mixed: {samples: 8}\nengine: {max_aux_streams: 1, mark_outputs: [a], mark_how: doubled, fp16: true}"
    _, said, config = configured(text)
    for key, words in (
        ("mixed.samples", "it is for a search for mixed precision"),
        ("engine.max_aux_streams", "it is for building an engine; this builds for onnx"),
        ("engine.mark_outputs", "it is for building an engine; this builds for onnx"),
        ("engine.mark_how", "it is for tensors that the engine returns beside its outputs"),
        ("engine.fp16", "it is for target tensorrt; this builds for onnx"),
    ):
        assert said.count(f"build.yaml: {key} has no effect here: {words}") == 1
    assert said.endswith("error: enough")
    assert config is not None
    assert (config.engine, config.mixed.samples) == ({}, 32)
    _, said, config = configured("engine: {max_aux_streams: 1, fp16: true}", target="tensorrt")
    assert said == "error: enough"
    assert config is not None
    assert config.engine == {"max_aux_streams": 1, "fp16": True}


def test_a_flag_that_does_nothing_is_refused_beside_a_file(configured: Configured) -> None:
    for flags in (("--workspace", "1G"), ("--search-samples", "32"), ("--timing-cache",), ("--fp16",)):
        code, said, config = configured("engine: {fp16: true}", *flags)
        assert (code, config) == (2, None)
        assert f"error: {flags[0]} has no effect here: it is for" in said


def test_a_flag_makes_what_the_file_says_idle(configured: Configured) -> None:
    folder = "engine: {timing_cache_folder: t}"
    _, said, config = configured(folder, "--no-timing-cache", target="tensorrt")
    assert "build.yaml: engine.timing_cache_folder has no effect here: it is for a timing cache, which" in said
    assert config is not None
    assert config.engine == {"timing_cache": False}
    _, said, config = configured("device: cuda\non_nonfinite: skip", "--calibration", "c.npz")
    assert said.count("has no effect here: it is for the pass over the data, which --calibration takes") == 2
    assert config is not None
    assert (config.device, config.on_nonfinite, config.calibration) == ("cpu", "error", Path("c.npz"))
    code, said, config = configured("engine: {timing_cache: false}", "--timing-cache-folder", "t", target="tensorrt")
    assert (code, config) == (2, None)
    assert "leave --no-timing-cache out, or set engine.timing_cache: true, or leave --timing-cache-folder out" in said


@pytest.mark.parametrize("target", ["onnx", "rtx"])
def test_no_timing_cache_is_what_is_the_case_without_one(configured: Configured, target: str) -> None:
    for text, flags in (("", ("--no-timing-cache",)), ("engine: {timing_cache: false}", ())):
        _, said, config = configured(text, *flags, target=target)
        assert said == "error: enough"
        assert config is not None
        assert config.engine == {"timing_cache": False}
    check_engine_options(BuildOptions(timing_cache=False), (target,))


def test_defaults_that_are_written_out_ask_for_nothing(configured: Configured) -> None:
    """All of them, of every type."""
    engine = {key: value for key, value in BuildOptions().model_dump(mode="json").items() if value is not None}
    text = yaml.safe_dump({"mixed": {"samples": 32}, "device": "cpu", "on_nonfinite": "error", "engine": engine})
    assert {"timing_cache", "mark_strictly", "mark_how"} <= set(engine)
    _, said, config = configured(text)
    assert said == "error: enough"
    assert config is not None
    check_options(config, BuildOptions.model_validate(config.engine), ("onnx",))


def test_options_and_targets_are_asked_for_once(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            asked.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(combinations, "idle_among", counted("idle", combinations.idle_among))
    monkeypatch.setattr(combinations, "_refuse_for_targets", counted("can do", combinations._refuse_for_targets))
    monkeypatch.setattr(stages.Build, "targets", counted("targets", stages.Build.targets))
    code, said = run(inputs, tmp_path / "out", "--data", "nowhere")
    assert code == 2
    assert "--data nowhere does not exist" in said
    assert asked == ["targets", "idle", "can do"]
    asked.clear()
    with pytest.raises(InputError, match="no effect here"):
        stages.build(config(mixed={"samples": 8}, targets=("onnx",)))
    assert asked == ["targets", "idle", "can do"], "from Python too"


def test_an_engine_option_on_the_command_line_leaves_the_file_its_others(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "build.yaml").write_text("engine: {max_aux_streams: 1}\n")
    from pipeline.cli.build import _merge

    flags = {"engine": {"workspace_bytes": 5}, "model": "m", "data": "d", "out": "o"}
    assert _merge({"engine": {"max_aux_streams": 1}}, flags, "here")["engine"] == {
        "max_aux_streams": 1,
        "workspace_bytes": 5,
    }


# -- refusals that options alone decide come before any work ---------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "target", "said"),
    [
        (("--fp16",), "rtx", "has no FP16 flag: an engine computes in the types that the graph has"),
        (("--half-inputs",), "rtx", "takes inputs and gives outputs in the types that the graph has"),
        (("--version-compatible",), "rtx", "cannot build version-compatible engines"),
        (("--hardware-compatibility", "ampere_plus"), "rtx", "ignores the hardware compatibility level"),
        (("--tactic-source", "CUBLAST"), "rtx", "has no tactic source 'CUBLAST'"),
        (("--compute-capability", "1.0"), "rtx", "builds no engine for compute capability 1.0"),
        (("--rule-off", "residul"), "onnx", "rules_off names the placement rule 'residul'"),
        (("--preprocess", "imagenet"), "onnx", "preprocessing is declared, and --data"),
        (("--data", "nowhere"), "onnx", "--data nowhere does not exist"),
        (("--calibration", "nowhere.npz"), "onnx", "calibration nowhere.npz does not exist"),
        (("--labels", "nowhere.csv"), "onnx", "labels nowhere.csv do not exist"),
        (("--min-sqnr", "9", "--layer-times", "a.json", "b.json"), "onnx", "layer times a.json do not exist"),
        (("--calibrator", "minmax", "--percentile", "99"), "onnx", "percentile"),
    ],
)
def test_no_stage_runs_before_a_refusal(
    flags: tuple[str, ...], target: str, said: str, inputs: Path, tmp_path: Path
) -> None:
    if target == "rtx":
        pytest.importorskip("tensorrt_rtx")
    code, found = run(inputs, tmp_path / "out", *flags, target=target)
    assert code == 2
    assert said in found
    assert "export" not in found
    assert not (tmp_path / "out").exists()


def test_every_target_of_from_is_checked_before_the_first_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_artifact, "build_from_artifact", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(combinations, "load_api", lambda target: SimpleNamespace(check_options=lambda options: None))
    for flags, said in (
        (["--target", "rtx", "--target", "onnx"], "there is no engine to build for the target onnx"),
        (["--target", "rtx", "--timing-iterations", "4"], "--timing-iterations has no effect here"),
        (["--force"], "--from takes --target, --profile and engine options only, not --force"),
        (["--fresh"], "only, not --fresh"),
        (["--rule-off", "residual"], "only, not --rule-off"),
        (["model.onnx"], "only, not MODEL"),
    ):
        found = CliRunner().invoke(command, ["--from", str(tmp_path), *flags])
        assert found.exit_code == 2
        assert said in " ".join(found.output.split())


def test_implicit_scales_are_refused_before_the_calibration(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it is known that the graph has Q/DQ nodes; the engine's child says the same, minutes later."""
    monkeypatch.setattr(combinations, "load_api", lambda target: SimpleNamespace(check_options=lambda options: None))
    monkeypatch.setattr(stages.Build, "targets", lambda self: ("tensorrt",))
    monkeypatch.setattr(stages.Build, "calibrate", lambda *_: pytest.fail("calibrated"))
    (tmp_path / "c.cache").write_text("TRT")
    code, said = run(inputs, tmp_path / "out", "--implicit", tmp_path / "c.cache", target="tensorrt")
    assert code == 2
    assert "the graph that is built has Q/DQ nodes, with which TensorRT would ignore" in said
    code, said = run(inputs, tmp_path / "out", "--implicit", tmp_path / "none.cache", target="tensorrt")
    assert code == 2
    assert "none.cache does not exist" in said


# -- what depends on the model is a warning ----------------------------------------------------------------------------


def quantised(path: Path) -> Path:
    """Nx3x8x8 to Nx4x8x8: a convolution of an input and weights that came with Q/DQ pairs."""
    scale, zero = numpy_helper.from_array(np.float32(0.05), "s"), numpy_helper.from_array(np.int8(0), "z")
    weight = np.random.default_rng(0).integers(-127, 127, (4, 3, 1, 1)).astype(np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="d"),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], name="dw"),
        helper.make_node("Conv", ["d", "v"], ["y"], name="conv", kernel_shape=[1, 1]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, 8, 8])
    graph = helper.make_graph(nodes, "g", [x], [y], [scale, zero, numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def single(path: Path) -> Path:
    """Nx3x8x8 to Nx16x8x8: a convolution of the input, whose channels nothing in front of it can take."""
    weight = np.random.default_rng(0).standard_normal((16, 3, 1, 1)).astype(np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 16, 8, 8])
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv", kernel_shape=[1, 1])]
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_options_that_the_model_makes_idle(inputs: Path, tmp_path: Path) -> None:
    quantised(inputs / "qdq.onnx")
    single(inputs / "level.onnx")
    flags = ("--calibrator", "minmax", "--rule-off", "concat", "--opset", "14", "--on-nonfinite", "skip", "-q")
    code, said = run(inputs, tmp_path / "out", *flags, model="qdq.onnx")
    assert code == 0, said
    quantised_text = (
        "--calibrator, --on-nonfinite, --rule-off have no effect: the model came with Q/DQ nodes, whose placement and "
        "scales are left as they are"
    )
    opset_text = "--opset 14 has no effect: the model has opset 17"
    assert quantised_text in said
    assert opset_text in said
    warnings = Artifact.open(tmp_path / "out").manifest.warnings
    assert quantised_text in warnings
    assert any(text.startswith(opset_text) for text in warnings)
    code, said = run(inputs, tmp_path / "level", "--equalise", "-q", model="level.onnx")
    assert code == 0, said
    assert "--equalise has no effect: no activation of this model" in said
    code, said = run(inputs, tmp_path / "float", "--calibrator", "minmax", "--opset", "17", "-q")
    assert code == 0
    assert "no effect" not in said
