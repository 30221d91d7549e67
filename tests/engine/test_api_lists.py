"""Every use of TensorRT in the engine code against the class and enum lists of 8.6, 10.16, 11.4 and RTX 1.7.

The lists come from the real modules (scripts/dump_tensorrt_api.py). What only some versions have may be used in
``compat.py`` alone, or where the code asks with ``hasattr`` first; OPTIONAL says which versions have it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "pipeline" / "engine"
VERSIONS = ("8.6", "10.16", "11.4", "rtx-1.7")
LISTS = {v: json.loads((Path(__file__).parent / "data" / f"api-{v}.json").read_text()) for v in VERSIONS}
CLASSES = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "config": "IBuilderConfig",
    "parser": "OnnxParser",
    "handle": "IOptimizationProfile",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "_context": "IExecutionContext",
    "runtime": "Runtime",
    "inspector": "EngineInspector",
    "layer": "ILayer",
    "quantise": "ILayer",
    "activation": "IActivationLayer",
    "tensor": "ITensor",
    "current": "ITimingCache",
    "error": "ParserError",
}
"""Names of variables and attributes that hold TensorRT objects in the files of FILES, and their class."""
FILES = {
    "child.py": set(CLASSES),
    "clips.py": {"network", "quantise", "activation"},
    "compat.py": set(CLASSES),
    "debug_tensors.py": set(),
    "timing_cache.py": {"config", "current"},
    "loading.py": {"runtime"},
    "marking.py": {"network", "tensor", "layer"},
    "network.py": {"network", "tensor", "layer"},
    "runner.py": {"engine", "inspector"},
    "slot.py": {"context", "_context", "engine"},
    "tensors.py": {"engine"},
    "messages.py": set(),
    "calibration.py": set(),
    "probe.py": {"builder"},
}
OURS = {"error.message", "error.remedy"}
"""Same names, our own objects."""
OLD, STRONG = {"8.6", "10.16"}, {"10.16", "11.4", "rtx-1.7"}
OPTIONAL = {
    "BuilderFlag.FP16": OLD,
    "BuilderFlag.INT8": OLD,
    "IInt8EntropyCalibrator2": OLD,
    "NetworkDefinitionCreationFlag.EXPLICIT_BATCH": OLD,
    "NetworkDefinitionCreationFlag.STRONGLY_TYPED": STRONG,
    "IBuilderConfig.int8_calibrator": OLD,
    "IBuilderConfig.set_calibration_profile": OLD,
    "IBuilderConfig.progress_monitor": STRONG,
    "IProgressMonitor": STRONG,
    "IBuilderConfig.num_compute_capabilities": {"rtx-1.7"},
    "IBuilderConfig.set_compute_capability": {"rtx-1.7"},
    "ComputeCapability": {"rtx-1.7"},
    "PreviewFeature.PROFILE_SHARING_0806": OLD,
    "ParserError.node_name": STRONG,
    "ParserError.node_operator": STRONG,
    "ICudaEngine.device_memory_size": OLD,
    "ICudaEngine.device_memory_size_v2": STRONG,
    "ICudaEngine.create_execution_context_without_device_memory": OLD,
    "ExecutionContextAllocationStrategy": STRONG,
    "IExecutionContext.set_device_memory": STRONG,
    "IDebugListener": STRONG,
    "INetworkDefinition.mark_unfused_tensors_as_debug_tensors": STRONG,
    "IExecutionContext.set_debug_listener": STRONG,
    "IExecutionContext.unfused_tensors_debug_state": STRONG,
    "Runtime.get_engine_validity": {"rtx-1.7"},
    "Runtime.engine_header_size": {"rtx-1.7"},
}


def has(version: str, name: str) -> bool:
    """Whether a version has ``Kind`` or ``Kind.member``."""
    api = LISTS[version]
    kind, _, member = name.partition(".")
    if not member:
        return kind in api["module"]
    return member in api["classes"].get(kind, []) or member in api["enums"].get(kind, [])


def chain(node: ast.AST) -> list[str]:
    """``self.api.trt.BuilderFlag.INT8`` as a list of names; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    return [node.id, *reversed(names)]


def uses(path: Path) -> Iterator[str]:
    """``Kind`` and ``Kind.member`` for every use of TensorRT in a file."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function) if node is not function}
    for scope in [function for function in functions if id(function) not in inner]:
        yield from uses_in(scope, FILES[path.name])


def uses_in(scope: ast.AST, known: set[str]) -> Iterator[str]:
    aliases: dict[str, list[str]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = chain(node.value)
            if "trt" in found and found[-1] != "trt":
                aliases[node.targets[0].id] = found[found.index("trt") + 1 :]
    for node in ast.walk(scope):
        names = chain(node) if isinstance(node, ast.Attribute) else []
        if names and names[0] in aliases:
            names = ["trt", *aliases[names[0]], *names[1:]]
        if "trt" in names:
            rest = [name for name in names[names.index("trt") + 1 :] if not name.startswith("__")]
            if rest:
                yield ".".join(rest[:2])
        elif len(names) >= 2 and names[-2] in known and f"{names[-2]}.{names[-1]}" not in OURS:
            yield f"{CLASSES[names[-2]]}.{names[-1]}"


def all_uses() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in FILES:
        for use in uses(ENGINE / name):
            found.setdefault(use, set()).add(name)
    return found


def test_the_scan_sees_the_code() -> None:
    found = all_uses()
    assert len(found) > 60
    for expected in (
        "Builder.build_serialized_network",
        "IExecutionContext.execute_async_v3",
        "Runtime",
        "BuilderFlag.INT8",
    ):
        assert expected in found


def test_files_that_use_tensorrt_are_all_scanned() -> None:
    for path in ENGINE.glob("*.py"):
        if path.name not in FILES:
            text = path.read_text()
            assert ".trt." not in text, path.name
            assert "execute_async" not in text, path.name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_use_exists_in_every_version_or_is_known_to_be_optional(version: str) -> None:
    missing = {use: files for use, files in all_uses().items() if not has(version, use)}
    for use, files in missing.items():
        kind = use.partition(".")[0]
        optional = OPTIONAL.get(use, OPTIONAL.get(kind))
        assert optional is not None, f"{version} has no {use}, used in {files}"
        assert version not in optional, f"{use} is said to exist in {version}"


@pytest.mark.parametrize("use", OPTIONAL)
def test_what_is_optional_is_in_the_versions_named_and_used(use: str) -> None:
    assert {version for version in VERSIONS if has(version, use)} == OPTIONAL[use]
    assert any(found == use or found.startswith(use + ".") for found in all_uses()), f"{use} is not used"


@pytest.mark.parametrize("use", OPTIONAL)
def test_what_is_optional_is_used_in_compat_or_behind_a_question(use: str) -> None:
    allowed = {"compat.py", "calibration.py", "child.py", "debug_tensors.py"}
    for found, files in all_uses().items():
        if found == use or found.startswith(use + "."):
            assert files <= allowed, f"{use} in {files}"
