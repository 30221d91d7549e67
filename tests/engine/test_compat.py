"""The compatibility module for the four versions, on modules made from their class and enum lists."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import InputError
from pipeline.engine import compat
from pipeline.engine.compat import Api, load_api, rtx_runs_on
from pipeline.engine.records import BuildOptions

VERSIONS = {"8.6": "8.6.0", "10.16": "10.16.1.11", "11.4": "11.4.0.106", "rtx-1.7": "1.7.1.116"}
IMPLICIT = BuildOptions(calibration_cache=Path("x"))


class Config:
    """Keeps what is set on it."""

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.features: list[str] = []
        self.capabilities: list[str] = []

    def set_flag(self, flag: Any) -> None:
        self.flags.append(flag.name)

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        self.features.append(feature.name)

    def set_compute_capability(self, capability: Any, number: int) -> None:
        self.capabilities.append(capability.name)

    def set_tactic_sources(self, bits: int) -> None:
        self.sources = bits


def api(name: str) -> Api:
    """A module with a version's classes and enums, without behaviour."""
    lists = json.loads((Path(__file__).parent / "data" / f"api-{name}.json").read_text())
    members: dict[str, Any] = {
        kind: type(kind, (), dict.fromkeys(names)) for kind, names in lists["classes"].items() if "." not in kind
    }
    for kind, names in lists["enums"].items():
        members[kind] = enum.Enum(kind, {name: number for number, name in enumerate(names)})
        members[kind].__int__ = lambda self: self.value
    return Api(trt=SimpleNamespace(**members), rtx=name.startswith("rtx"), version=VERSIONS[name])


def bit(kind: Any, name: str) -> int:
    return 1 << int(kind[name])


@pytest.mark.parametrize(
    ("version", "options", "flag"),
    [
        ("8.6", BuildOptions(), "EXPLICIT_BATCH"),
        ("8.6", BuildOptions(fp16=True), "EXPLICIT_BATCH"),
        ("10.16", BuildOptions(), "STRONGLY_TYPED"),
        ("10.16", BuildOptions(fp16=True), "EXPLICIT_BATCH"),
        ("10.16", BuildOptions(half_inputs=True), "EXPLICIT_BATCH"),
        ("10.16", IMPLICIT, "EXPLICIT_BATCH"),
        ("11.4", BuildOptions(), "STRONGLY_TYPED"),
        ("rtx-1.7", BuildOptions(), "STRONGLY_TYPED"),
    ],
)
def test_network_flags(version: str, options: BuildOptions, flag: str) -> None:
    one = api(version)
    flags = one.network_flags(weakly_typed=one.weakly_typed(options))
    assert flags == bit(one.trt.NetworkDefinitionCreationFlag, flag)


@pytest.mark.parametrize(
    ("version", "options", "quantised", "half", "flags"),
    [
        ("8.6", BuildOptions(), True, False, ["INT8"]),
        ("8.6", BuildOptions(), False, False, []),
        ("8.6", BuildOptions(fp16=True), True, False, ["INT8", "FP16"]),
        ("8.6", BuildOptions(), True, True, ["INT8", "FP16"]),
        ("8.6", IMPLICIT, False, False, ["INT8"]),
        ("10.16", BuildOptions(), True, True, []),
        ("10.16", BuildOptions(fp16=True), True, False, ["INT8", "FP16"]),
        ("10.16", IMPLICIT, False, False, ["INT8"]),
        ("11.4", BuildOptions(), True, True, []),
        ("rtx-1.7", BuildOptions(), True, True, []),
    ],
)
def test_precision_flags(version: str, options: BuildOptions, quantised: bool, half: bool, flags: list[str]) -> None:
    config = Config()
    api(version).set_precision_flags(config, options, quantised=quantised, half=half)
    assert config.flags == flags


@pytest.mark.parametrize(
    ("version", "fields", "words"),
    [
        ("11.4", {"fp16": True}, "TensorRT 11.4.0.106 has no FP16 flag"),
        ("11.4", {"calibration_cache": "x"}, "no implicit INT8"),
        ("11.4", {"half_inputs": True}, "in the types that the graph has"),
        ("8.6", {"hardware_compatibility": "same_compute_capability"}, "no hardware compatibility level"),
        ("8.6", {"compute_capabilities": ("8.6",)}, "builds for the card in this machine"),
        ("10.16", {"compute_capabilities": ("8.6",)}, "builds for the card in this machine"),
        ("11.4", {"tactic_sources": ("CUBLAS",)}, "no tactic source 'CUBLAS'; known: EDGE_MASK_CONVOLUTIONS, JIT"),
        ("rtx-1.7", {"compute_capabilities": ("9.0",)}, "no engine for compute capability 9.0; known: 12.0, 12.1, 7.5"),
    ],
)
def test_refusals(version: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        api(version).check_options(BuildOptions.model_validate(fields))


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        ("8.6", {"fp16": True, "hardware_compatibility": "ampere_plus", "version_compatible": True}),
        ("8.6", {"calibration_cache": "x", "tactic_sources": ("CUDNN",)}),
        ("10.16", {"hardware_compatibility": "same_compute_capability", "half_inputs": True}),
        ("11.4", {"version_compatible": True, "tactic_sources": ("JIT_CONVOLUTIONS",)}),
        ("rtx-1.7", {"compute_capabilities": ("7.5", "8.9")}),
    ],
)
def test_what_each_version_can_do_is_set(version: str, fields: dict[str, Any]) -> None:
    one, config, options = api(version), Config(), BuildOptions.model_validate(fields)
    one.check_options(options)
    one.set_target(config, options)
    assert ("VERSION_COMPATIBLE" in config.flags) == options.version_compatible
    assert config.capabilities == ["SM" + text.replace(".", "") for text in options.compute_capabilities]
    if options.compute_capabilities:
        assert config.num_compute_capabilities == len(options.compute_capabilities)  # type: ignore[attr-defined]
    if options.hardware_compatibility != "none":
        assert config.hardware_compatibility_level.name == options.hardware_compatibility.upper()  # type: ignore[attr-defined]
    if options.tactic_sources:
        one.set_tactic_sources(config, options.tactic_sources)
        assert config.sources == sum(bit(one.trt.TacticSource, name) for name in options.tactic_sources)


def test_profiles_are_shared_where_it_needs_asking() -> None:
    for version, expected in (("8.6", ["PROFILE_SHARING_0806"]), ("10.16", []), ("11.4", []), ("rtx-1.7", [])):
        config = Config()
        api(version).share_profiles(config)
        assert config.features == expected


@pytest.mark.parametrize(
    ("version", "weak", "strong", "calibrators", "newest", "without_gpu"),
    [
        ("8.6", True, False, True, 17, False),
        ("10.16", True, True, True, 25, False),
        ("11.4", False, True, False, 25, False),
        ("rtx-1.7", False, True, False, 25, True),
    ],
)
def test_abilities(version: str, weak: bool, strong: bool, calibrators: bool, newest: int, without_gpu: bool) -> None:
    one = api(version)
    assert (one.weak_typing, one.strong_typing, one.calibrators) == (weak, strong, calibrators)
    assert one.newest_opset == newest
    assert one.builds_without_gpu == without_gpu
    assert one.timing_caches != without_gpu


def test_half_inputs_and_outputs_change_float_tensors_only() -> None:
    one = api("8.6")
    kinds = one.trt.DataType
    tensors = [SimpleNamespace(dtype=kinds.FLOAT), SimpleNamespace(dtype=kinds.INT32)]
    outputs = [SimpleNamespace(dtype=kinds.FLOAT)]
    network = SimpleNamespace(
        num_inputs=2, get_input=lambda number: tensors[number], num_outputs=1, get_output=lambda number: outputs[number]
    )
    one.set_io_types(network, BuildOptions())
    assert [tensor.dtype for tensor in (*tensors, *outputs)] == [kinds.FLOAT, kinds.INT32, kinds.FLOAT]
    one.set_io_types(network, BuildOptions(half_inputs=True))
    assert [tensor.dtype for tensor in (*tensors, *outputs)] == [kinds.HALF, kinds.INT32, kinds.FLOAT]
    one.set_io_types(network, BuildOptions(half_outputs=True))
    assert outputs[0].dtype == kinds.HALF


def test_contexts_and_their_memory() -> None:
    calls: list[Any] = []
    old, new = api("8.6"), api("11.4")
    engine = SimpleNamespace(
        create_execution_context_without_device_memory=lambda: "old",
        create_execution_context=lambda strategy: strategy.name,
        device_memory_size=10,
    )
    assert old.create_context(engine) == "old"
    assert new.create_context(engine) == "USER_MANAGED"
    assert Api.device_memory_bytes(engine) == 10
    assert Api.device_memory_bytes(SimpleNamespace(device_memory_size=10, device_memory_size_v2=20)) == 20
    Api.set_device_memory(SimpleNamespace(set_device_memory=lambda *a: calls.append(a)), 5, 6)
    assert calls == [(5, 6)]
    context = SimpleNamespace()
    Api.set_device_memory(context, 7, 8)
    assert context.device_memory == 7


def test_a_parser_error_names_its_node_where_the_version_can() -> None:
    assert Api.error_node(SimpleNamespace()) == ("", "")
    assert Api.error_node(SimpleNamespace(node_name=lambda: "n", node_operator=lambda: "Op")) == ("n", "Op")


def test_engine_validity_is_asked_where_it_exists() -> None:
    runtime = SimpleNamespace(
        engine_header_size=2, get_engine_validity=lambda header: (SimpleNamespace(name="INVALID"), len(header))
    )
    assert api("rtx-1.7").engine_validity(runtime, b"abcd") == ("INVALID", 2)
    assert api("8.6").engine_validity(SimpleNamespace(), b"abcd") is None


def test_where_rtx_engines_run() -> None:
    assert rtx_runs_on("8.9")
    assert rtx_runs_on("13.0")
    assert not rtx_runs_on("9.0")
    assert not rtx_runs_on("7.5")
    assert rtx_runs_on("7.5", ("7.5",))
    assert not rtx_runs_on("8.9", ("7.5",))


def test_a_missing_or_old_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(InputError, match=r"needs the package 'tensorrt'(.|\n)*quantize-trt\[gpu\]"):
        load_api("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="8.5.3.1"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"TensorRT 8\.5\.3\.1 is too old, 8\.6 is the oldest"):
        load_api("tensorrt")
    assert compat.MODULES["rtx"] == "tensorrt_rtx"
