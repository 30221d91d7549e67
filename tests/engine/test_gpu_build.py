"""Building with the real TensorRT on a card: records, options, refusals, recovery."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import Profile
from pipeline.core.errors import InputError, ToolError
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import load_api
from pipeline.engine.device import describe_device, driver_version
from pipeline.engine.inspect import parse_layers
from pipeline.engine.probe import default_targets, probe
from pipeline.engine.runner import Runner
from pipeline.engine.timing_cache import cache_file, pack, unpack
from tests.engine.gpu import DATA, GPU, IMAGES, TIMEOUT_S, engine, options, scratch

pytestmark = GPU
BOTH = (2, 3)
"""Convolutions of the fixture's engine: its two, and the fully connected layer where that runs as one (8.6)."""


def build(model: Path, tmp_path: Path, *profiles: str, **fields: object):
    return build_engine(
        model,
        target="tensorrt",
        profiles=[Profile.parse(text) for text in profiles],
        plan_path=tmp_path / "model.plan",
        options=options(**fields),
        timeout_s=TIMEOUT_S,
    )


def test_the_probe_finds_tensorrt_and_the_card() -> None:
    status = probe("tensorrt")
    assert status.works, status.reason
    assert describe_device().name in status.reason
    assert "tensorrt" in default_targets()
    assert driver_version()


@pytest.mark.alone
def test_the_record_says_what_was_built_where(tmp_path: Path) -> None:
    record = build(DATA / "conv_qdq.onnx", tmp_path, IMAGES)
    plan = tmp_path / "model.plan"
    device = describe_device()
    assert record.device == device
    assert record.tensorrt == load_api("tensorrt").version
    assert record.plan_bytes == plan.stat().st_size
    assert record.build_seconds > 0
    assert record.peak_memory_bytes > 100 << 20
    assert record.peak_gpu_memory_bytes is None or record.peak_gpu_memory_bytes > 0
    assert record.messages
    assert record.timing_cache in ("new", "reused")


def test_layers_are_written_and_the_convolutions_are_int8() -> None:
    plan, record = engine("conv_qdq")
    layers = parse_layers((plan.parent / "layers.json").read_text())
    assert record.layers is not None
    assert record.layers.layers == len(layers)
    assert record.layers.convolutions_int8 in BOTH, [(layer.name, layer.kind, layer.inputs) for layer in layers]
    assert record.layers.convolutions_float == 0


def test_int8_weights_in_front_of_a_dequantize_build_too() -> None:
    _, record = engine("conv_qdq_stored")
    assert record.layers is not None
    assert record.layers.convolutions_int8 in BOTH


def timings(folder: Path, iterations: int | None = None) -> Path:
    return cache_file(folder / "timing", load_api("tensorrt"), describe_device(), iterations)


def test_the_timing_cache_is_kept_and_used_again(tmp_path: Path) -> None:
    engine("conv_qdq")
    assert timings(scratch()).stat().st_size > 0
    again = build(DATA / "conv_qdq.onnx", tmp_path, IMAGES)
    assert again.timing_cache == "reused"


def test_measurements_of_another_number_of_iterations_are_not_used(tmp_path: Path) -> None:
    engine("conv_qdq")
    before = timings(scratch()).read_bytes()
    folder = tmp_path / "timing"
    folder.mkdir()
    timings(tmp_path).write_bytes(before)
    record = build(DATA / "conv_qdq.onnx", tmp_path, IMAGES, timing_cache_folder=folder, avg_timing_iterations=2)
    assert record.timing_cache == "new"
    assert timings(tmp_path).read_bytes() == before
    assert timings(tmp_path, 2).stat().st_size > 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content, name: b"no timing cache", "does not begin as the files of quantize do"),
        (lambda content, name: content[:-40], "another SHA-256"),
        (lambda content, name: content[:-40] + bytes([content[-40] ^ 1]) + content[-39:], "another SHA-256"),
        (lambda content, name: pack(b"no timing cache", name), "TensorRT"),
    ],
    ids=["other file", "cut short", "one bit", "sealed nonsense"],
)
def test_a_damaged_timing_cache_is_started_afresh_with_a_warning(
    tmp_path: Path, damage: Callable[[bytes, str], bytes], reason: str
) -> None:
    engine("conv_fp32")
    path = timings(tmp_path)
    path.parent.mkdir()
    path.write_bytes(damage(timings(scratch()).read_bytes(), path.name))
    record = build(DATA / "conv_fp32.onnx", tmp_path, IMAGES, timing_cache_folder=path.parent)
    assert record.timing_cache == "new"
    assert [text for text in record.warnings if f"timing cache {path}: " in text and reason in text], record.warnings
    assert len(unpack(path.read_bytes(), path.name)) > 100


def test_several_profiles_and_a_static_model() -> None:
    _, record = engine("conv_qdq", "x=1x16x16x16,1x16x16x16,1x16x16x16", "x=2x16x16x16,8x16x16x16,16x16x16x16")
    assert len(record.profiles) == 2
    _, static = engine("conv_static")
    assert static.profiles == ()


def test_implicit_int8_uses_the_calibration_cache() -> None:
    _, record = engine("conv_fp32", calibration_cache=DATA / "conv_fp32.cache", fp16=True)
    assert record.layers is not None
    assert record.layers.convolutions_int8 + record.layers.convolutions_float in BOTH


def test_implicit_int8_refuses_a_graph_that_has_its_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="would ignore the calibration cache"):
        build(DATA / "conv_qdq.onnx", tmp_path, IMAGES, calibration_cache=DATA / "conv_fp32.cache")


def test_options_reach_the_builder(tmp_path: Path) -> None:
    record = build(
        DATA / "conv_fp32.onnx",
        tmp_path,
        IMAGES,
        fp16=True,
        tactic_sources=("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"),
        hardware_compatibility="ampere_plus",
        max_aux_streams=0,
        avg_timing_iterations=2,
        timing_cache=False,
    )
    assert record.timing_cache == "off"
    assert record.options.hardware_compatibility == "ampere_plus"


def test_unsupported_operators_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot import 2 nodes") as caught:
        build(DATA / "unsupported.onnx", tmp_path)
    assert "first_unique" in str(caught.value)
    assert "second_unique" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_profile_and_an_impossible_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no profile is given"):
        build(DATA / "conv_fp32.onnx", tmp_path)
    with pytest.raises(InputError, match="static"):
        build(DATA / "conv_fp32.onnx", tmp_path, "x=1x8x16x16,1x8x16x16,1x8x16x16")


def test_an_unknown_tensor_cannot_be_returned(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'nonsense' to return does not exist"):
        build(DATA / "conv_fp32.onnx", tmp_path, IMAGES, mark_outputs=("nonsense",))


def test_a_build_that_takes_too_long_is_stopped_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="stopped after 1 s"):
        build_engine(
            DATA / "conv_qdq.onnx",
            target="tensorrt",
            profiles=[Profile.parse(IMAGES)],
            plan_path=tmp_path / "model.plan",
            options=options(timing_cache=False),
            timeout_s=1,
        )
    assert list(tmp_path.iterdir()) == []


def test_the_inspector_speaks_the_dialect_that_is_parsed() -> None:
    plan, _ = engine("conv_qdq")
    content = (plan.parent / "layers.json").read_text()
    assert "Layers" in json.loads(content, strict=False)
    assert all(layer.kind for layer in parse_layers(content))


def test_in_a_context_with_shapes_the_inspector_tells_formats() -> None:
    plan, record = engine("conv_qdq")
    with Runner(plan, record=record) as runner:
        layers = parse_layers(runner.layer_information({"x": (4, 16, 16, 16)}))
    convolutions = [layer for layer in layers if layer.convolution]
    assert len(convolutions) in BOTH
    assert {layer.inputs[0].dtype for layer in convolutions} == {"int8"}
    assert all(tensor.dtype != "unknown" for layer in layers for tensor in layer.outputs)
