"""Building with the real TensorRT-RTX builder, which needs no GPU: records, options, and every trap."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import helper

from pipeline import build as stage
from pipeline.config import Profile
from pipeline.consistency.graph import visible_tensors
from pipeline.core.errors import InputError, ToolError
from pipeline.core.files import sha256_file
from pipeline.engine import builder, child
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import load_api
from pipeline.engine.device import describe_device
from pipeline.engine.marking import HOW, How, returned
from pipeline.engine.onnx_wire import Graph, Model, Tensor, read_model
from pipeline.engine.records import BuildOptions, DeviceInfo, EngineRecord, Message
from tests.engine import graphs

pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")

PROFILE = Profile.parse("x=1x8x16x16,4x8x16x16,8x8x16x16")
WIDE = Profile.parse("x=1x8x16x16,16x8x16x16,32x8x16x16")


def build(model: Path, folder: Path, *profiles: Profile, **options: object) -> EngineRecord:
    return build_engine(
        model,
        target="rtx",
        profiles=profiles,
        plan_path=folder / "model.plan",
        options=BuildOptions.model_validate(options),
        timeout_s=120,
    )


def refused(model: Path, folder: Path, *profiles: Profile, kind: type = InputError, **options: object) -> str:
    """The error's text, after checking that nothing was left behind."""
    before = set(folder.iterdir())
    with pytest.raises(kind) as caught:
        build(model, folder, *profiles, **options)
    assert set(folder.iterdir()) == before
    return str(caught.value)


def test_a_q_dq_graph_builds_with_two_profiles_and_the_record_is_complete(tmp_path: Path) -> None:
    record = build(graphs.qdq_conv(tmp_path / "m.onnx"), tmp_path, PROFILE, WIDE)
    plan = tmp_path / "model.plan"
    assert record.plan_sha256 == sha256_file(plan)
    assert record.plan_bytes == plan.stat().st_size > 100_000
    assert record.tensorrt == load_api("rtx").version
    assert record.build_seconds > 0
    assert record.peak_memory_bytes > 50 << 20
    assert record.profiles == (PROFILE, WIDE)
    assert record.device == describe_device()
    assert record.timing_cache == "not supported"
    assert any(message.source == "logger" for message in record.messages)
    assert not record.warnings
    assert str(tmp_path) not in record.model_dump_json()
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "model.plan"}
    assert EngineRecord.model_validate_json(record.model_dump_json()) == record


@pytest.mark.skipif(describe_device() is not None, reason="this machine has a GPU")
def test_without_a_gpu_the_record_says_so(tmp_path: Path) -> None:
    record = build(graphs.conv(tmp_path / "m.onnx"), tmp_path, PROFILE)
    assert record.built_on == "built without a GPU"
    assert record.layers is None
    assert record.peak_gpu_memory_bytes is None


def test_a_static_model_needs_no_profile(tmp_path: Path) -> None:
    record = build(graphs.qdq_conv(tmp_path / "m.onnx", shape=(2, 8, 16, 16)), tmp_path)
    assert record.profiles == ()


def test_options_reach_the_builder(tmp_path: Path) -> None:
    model = graphs.qdq_conv(tmp_path / "m.onnx")
    record = build(
        model,
        tmp_path,
        PROFILE,
        compute_capabilities=("7.5",),
        optimization_level=1,
        workspace_bytes=1 << 28,
        tactic_sources=("JIT_CONVOLUTIONS",),
        mark_outputs=("c", "y"),
        max_aux_streams=0,
        avg_timing_iterations=2,
        verbose=True,
    )
    assert any(message.severity == "verbose" for message in record.messages)
    default = build(model, tmp_path, PROFILE)
    assert default.plan_bytes != record.plan_bytes


@pytest.mark.parametrize("how", HOW)
def test_the_output_of_a_dequantizelinear_can_be_returned(tmp_path: Path, how: How) -> None:
    model = graphs.qdq_conv(tmp_path / "m.onnx")
    name = next(iter(visible_tensors(model).values()))
    plain = build(model, tmp_path, PROFILE)
    assert build(model, tmp_path, PROFILE, mark_outputs=(name,), mark_how=how).plan_sha256 != plain.plan_sha256


def test_a_network_takes_the_mark_for_unfused_debug_tensors(tmp_path: Path) -> None:
    """That RTX accepts it is what can be seen here: the plan has the same size, and cannot run without a card."""
    assert build(graphs.qdq_conv(tmp_path / "m.onnx"), tmp_path, PROFILE, watch_unfused=True).options.watch_unfused


def test_a_tensor_that_does_not_exist_can_be_left_out(tmp_path: Path) -> None:
    model = graphs.qdq_conv(tmp_path / "m.onnx")
    record = build(model, tmp_path, PROFILE, mark_outputs=("c", "nothing"), mark_strictly=False)
    assert [m.text for m in record.messages if "'nothing'" in m.text and m.severity == "warning"]


def test_only_a_dequantizelinear_can_be_repeated(tmp_path: Path) -> None:
    text = refused(
        graphs.qdq_conv(tmp_path / "m.onnx"), tmp_path, PROFILE, mark_outputs=("c",), mark_how="dequantised again"
    )
    assert "tensor 'c' comes from no DequantizeLinear" in text


def test_doubled_values_come_back_exactly() -> None:
    values = np.array([0.1, -3.0, 1e-40, 65504.0], np.float32)
    for kind in (np.float32, np.float16):
        once = values.astype(kind) / kind(2)
        assert np.array_equal(returned({"a::doubled": once * kind(2)}, "a"), once)
    assert np.array_equal(returned({"a": values}, "a"), values)
    assert returned({"b": values}, "a") is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp16": True}, "has no FP16 flag"),
        ({"half_inputs": True}, "takes inputs and gives outputs in the types that the graph has"),
        ({"calibration_cache": "some.cache"}, "has no implicit INT8"),
        ({"version_compatible": True}, "cannot build version-compatible engines"),
        ({"hardware_compatibility": "ampere_plus"}, "ignores the hardware compatibility level"),
        ({"compute_capabilities": ("9.0",)}, "builds no engine for compute capability 9.0; known: .*8.9"),
        ({"tactic_sources": ("CUDNN",)}, "has no tactic source 'CUDNN'; known: .*JIT_CONVOLUTIONS"),
        ({"mark_outputs": ("nothing",)}, "tensor 'nothing' to return does not exist"),
    ],
)
def test_options_it_cannot_honour_are_refused(tmp_path: Path, options: dict[str, object], words: str) -> None:
    text = refused(graphs.qdq_conv(tmp_path / "m.onnx"), tmp_path, PROFILE, **options)
    assert re.search(words, text), text


def test_a_malformed_compute_capability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'86' is not of the form 8\.6"):
        BuildOptions(compute_capabilities=("86",))


def test_all_unsupported_operators_are_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unique", ["x"], ["u"], name="first"),
        helper.make_node("Mine", ["u"], ["m"], name="own", domain="my"),
        helper.make_node("Relu", ["m"], ["r"], name="fine"),
        helper.make_node("Unique", ["r"], ["y"], name="last"),
    ]
    text = refused(graphs.save(tmp_path / "m.onnx", nodes, {}, shape=(8,)), tmp_path)
    assert "cannot import 3 nodes" in text
    for name in ("'first' (Unique)", "'own' (Mine)", "'last' (Unique)"):
        assert name in text
    assert "fine" not in text
    assert "Plugin not found" in text  # TensorRT's own words


def test_an_importer_that_gives_up_early_still_names_all_of_its_kind(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"], name="one"),
        helper.make_node("Cast", ["n"], ["f"], name="cast", to=1),
        helper.make_node("NonZero", ["f"], ["m"], name="two"),
        helper.make_node("Cast", ["m"], ["y"], name="back", to=1),
    ]
    text = refused(graphs.save(tmp_path / "m.onnx", nodes, {}, shape=(4, 8)), tmp_path)
    assert "'one' (NonZero)" in text
    assert "'two' (NonZero)" in text
    assert "cast" not in text.replace("cannot", "")


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ({"scale_from": graphs.run_time_scale()}, "'s' is computed at run time"),
        ({"zero_type": np.uint8}, "'z' is uint8"),
        ({"weight_scale": np.full(5, 0.1, np.float32)}, "output channels = 16, number of scales = 5"),
    ],
)
def test_quantisation_that_tensorrt_would_read_otherwise_is_refused(
    tmp_path: Path, spoiled: dict[str, object], words: str
) -> None:
    text = refused(graphs.qdq_conv(tmp_path / "m.onnx", **spoiled), tmp_path, PROFILE)
    assert re.search(words, text), text


def test_weights_along_the_wrong_axis_are_a_warning(tmp_path: Path) -> None:
    model = graphs.qdq_conv(tmp_path / "m.onnx", axis=1, weight_scale=np.full(8, 0.01, np.float32))
    (warning,) = build(model, tmp_path, PROFILE).warnings
    assert "'conv': its weights are quantised along axis 1, TensorRT needs axis 0; it runs in float" in warning


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    model = graphs.conv(tmp_path / "m.onnx")
    whole = model.read_bytes()
    assert "does not exist" in refused(tmp_path / "none.onnx", tmp_path, PROFILE)
    for content, words in (
        (b"", "is empty"),
        (b"garbage" * 9, "not a readable"),
        (whole[: len(whole) // 2], "ends early"),
    ):
        model.write_bytes(content)
        assert words in refused(model, tmp_path, PROFILE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is dynamic .* and no profile is given"),
        ("x=1x4x16x16,1x4x16x16,1x4x16x16", "dimension 1 of input 'x' is static \\(8\\)"),
        ("x=1x8x16,1x8x16,1x8x16", "has rank 4"),
        ("z=1x8x16x16,1x8x16x16,1x8x16x16", "names the input 'z'"),
    ],
)
def test_profiles_that_do_not_fit_are_refused(tmp_path: Path, text: str, words: str) -> None:
    profiles = [Profile.parse(text)] if text else []
    message = refused(graphs.conv(tmp_path / "m.onnx"), tmp_path, *profiles)
    assert re.search(words, message), message


class Recording:
    """Stands in for the child's end of the pipe."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def send(self, event: str, **fields: object) -> None:
        self.events.append({"event": event, **fields})


def test_errors_of_the_error_recorder_are_in_tensorrts_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder takes errors away from the logger, and crashes RTX when it is given to the builder too early."""
    monkeypatch.setattr(child, "check_profiles", lambda profiles, inputs: None)
    work = child.Build(load_api("rtx"), graphs.conv(tmp_path / "m.onnx"), (), BuildOptions(), Recording())  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="no optimization profile has been defined"):
        work.run(tmp_path / "model.plan")
    assert any(message.source == "error recorder" for message in work.messages)


@pytest.mark.parametrize("name", ["UNSUPPORTED_NODE", lambda: "UNSUPPORTED_NODE"], ids=["property", "method of 8.6"])
def test_the_parsers_error_code_is_read_in_every_version(tmp_path: Path, name: object) -> None:
    error = SimpleNamespace(
        code=lambda: SimpleNamespace(name=name),
        node=lambda: 0,
        desc=lambda: "Assertion failed",
        func=lambda: "convMultiInput",
    )
    parser = SimpleNamespace(num_errors=1, get_error=lambda number: error, supports_operator=lambda operator: True)
    path = graphs.conv(tmp_path / "m.onnx")
    work = child.Build(load_api("rtx"), path, (), BuildOptions(), Recording())  # type: ignore[arg-type]
    found = work._parse_error(parser, read_model(path))
    assert "cannot import 1 node of" in found.message
    assert "node 'conv' (Conv): Assertion failed [UNSUPPORTED_NODE in convMultiInput]" in found.message
    assert "replace these operators" in found.remedy


def test_a_profile_that_tensorrt_itself_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "check_profiles", lambda profiles, inputs: None)
    shapes = PROFILE.inputs["x"].model_copy(update={"min": (9, 8, 16, 16)})
    profile = Profile.model_construct(inputs={"x": shapes})
    work = child.Build(load_api("rtx"), graphs.conv(tmp_path / "m.onnx"), (profile,), BuildOptions(), Recording())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="refuses profile 0"):
        work.run(tmp_path / "model.plan")


def test_kernels_left_out_for_lack_of_workspace_are_a_warning_with_the_limit(tmp_path: Path) -> None:
    options = BuildOptions(workspace_bytes=64 << 20)
    work = child.Build(load_api("rtx"), graphs.conv(tmp_path / "m.onnx"), (PROFILE,), options, Recording())  # type: ignore[arg-type]
    words = "Tactic Device request: 512MB Available: 64MB. Device memory is insufficient to use tactic."
    work.receive(Message(severity="warning", source="logger", text=words))
    work.run(tmp_path / "model.plan")
    (warning,) = [message.text for message in work.messages if message.source == "check"]
    assert "the workspace limit of 64 MiB made TensorRT leave kernels out" in warning
    assert words in warning


@pytest.mark.parametrize(
    ("weights", "card_bytes", "limit"),
    [(1 << 20, 16 << 30, 4 << 30), (1 << 26, 32 << 30, 8 << 30), (1 << 28, 8 << 30, 4 << 30)],
)
def test_the_workspace_follows_model_and_card(weights: int, card_bytes: int, limit: int) -> None:
    card = DeviceInfo(name="c", compute_capability="9.0", driver="1", memory_bytes=card_bytes)
    model = Model(graph=Graph(initializers={"w": Tensor(shape=(weights,), external=True)}))
    assert child.workspace_limit(model, card) == limit
    assert child.workspace_limit(model, None) is None


def test_a_crash_is_reported_with_the_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builder.run_child
    monkeypatch.setattr(
        builder, "run_child", lambda module, arguments, **rest: original("tests.engine.children", ["crash"], **rest)
    )
    text = refused(graphs.conv(tmp_path / "m.onnx"), tmp_path, PROFILE, kind=ToolError)
    assert "ended with signal SIGSEGV" in text
    assert "its last message was: about to fall" in text
    assert "printed by a library" in text


def test_a_build_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builder.run_child
    monkeypatch.setattr(
        builder, "run_child", lambda module, arguments, **rest: original("tests.engine.children", ["sleep"], **rest)
    )
    model = graphs.conv(tmp_path / "m.onnx")
    with pytest.raises(ToolError, match="stopped after 1 s"):
        build_engine(model, target="rtx", profiles=[PROFILE], plan_path=tmp_path / "p", timeout_s=1)
    assert set(tmp_path.iterdir()) == {model}


def test_an_interrupt_ends_the_child_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object, event: dict[str, object]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(builder._Conversation, "__call__", interrupt)
    model = graphs.conv(tmp_path / "m.onnx")
    with pytest.raises(KeyboardInterrupt):
        build(model, tmp_path, PROFILE)
    assert set(tmp_path.iterdir()) == {model}


def test_the_current_folder_cannot_get_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pipeline", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    model = graphs.conv(tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    assert build(Path(model.name), Path(), PROFILE).plan_bytes > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot write"):
        build(graphs.conv(tmp_path.parent / "m.onnx"), tmp_path, PROFILE)


def test_the_stage_writes_plan_and_record(tmp_path: Path) -> None:
    model = graphs.qdq_conv(tmp_path / "m.onnx")
    folder = tmp_path / "out"
    result = stage.run(model, target="rtx", profiles=[PROFILE], folder=folder)
    assert result.target == "rtx"
    assert result.plan == folder / "model.plan"
    assert {path.name for path in folder.iterdir()} == {"model.plan", "build.json"}
    assert EngineRecord.model_validate_json((folder / "build.json").read_bytes()) == result.engine
    again = stage.BuildResult.model_validate_json(result.model_dump_json()).at(folder)
    assert again.plan == result.plan


def test_target_onnx_writes_no_plan_and_names_the_version(tmp_path: Path) -> None:
    import onnxruntime

    model = graphs.qdq_conv(tmp_path / "m.onnx")
    result = stage.run(model, target="onnx", profiles=[PROFILE], folder=tmp_path / "out")
    assert result.plan is None
    assert result.onnxruntime == onnxruntime.__version__
    written = json.loads((tmp_path / "out" / "build.json").read_text())
    assert written == {"target": "onnx", "onnxruntime": onnxruntime.__version__}
    assert not (tmp_path / "out" / "model.plan").exists()


def test_target_onnx_refuses_a_graph_that_onnxruntime_cannot_load(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mine", ["x"], ["y"], name="own", domain="my")]
    with pytest.raises(ToolError, match="onnxruntime cannot load"):
        stage.run(graphs.save(tmp_path / "m.onnx", nodes, {}), target="onnx", profiles=[], folder=tmp_path / "out")


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown target 'tpu'"):
        stage.run(graphs.conv(tmp_path / "m.onnx"), target="tpu", profiles=[], folder=tmp_path)


def test_progress_is_one_task_with_tensorrts_steps(tmp_path: Path) -> None:
    opened: list[str] = []
    steps: list[int] = []

    class Progress:
        @contextmanager
        def task(self, description: str, *, total: int | None, unit: str) -> Iterator[object]:
            opened.append(description)
            yield SimpleNamespace(advance=lambda count=1: steps.append(count))

        def note(self, message: str) -> None:
            """Not needed."""

        warn = note

    model = graphs.conv(tmp_path / "m.onnx")
    stage.run(model, target="rtx", profiles=[PROFILE], folder=tmp_path / "out", progress=Progress())
    assert opened == ["building the rtx engine"]
    assert len(steps) > 3
