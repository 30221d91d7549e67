"""scripts/gpu_cache_check.py away from a card: which tensors its FP32 engine returns."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from scripts import gpu_cache_check


class Network:
    """Two layers, the second of which gives the graph's output."""

    num_inputs, num_outputs, num_layers = 1, 1, 2

    def __init__(self) -> None:
        self.marked: list[str] = []

    def get_input(self, number: int) -> Any:
        return SimpleNamespace(name="x")

    def get_output(self, number: int) -> Any:
        return SimpleNamespace(name="y")

    def get_layer(self, number: int) -> Any:
        name = ("hidden", "y")[number]
        return SimpleNamespace(num_outputs=1, get_output=lambda index: SimpleNamespace(name=name))

    def mark_output(self, tensor: Any) -> None:
        self.marked.append(tensor.name)


def test_tensors_are_marked_as_everywhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pipeline.engine.marking, once each; names that the network lacks are left out."""
    trt, network = MagicMock(), Network()
    builder = trt.Builder.return_value
    builder.create_network.return_value = network
    builder.build_serialized_network.return_value = b"plan"
    trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH = 0
    builder.create_builder_config.return_value.get_timing_cache.return_value.serialize.return_value = b""
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr(gpu_cache_check, "Runner", lambda plan: plan)
    monkeypatch.setattr(gpu_cache_check, "load_api", lambda target: SimpleNamespace(trt=trt))
    asked: list[list[str]] = []
    own = gpu_cache_check.mark_outputs

    def marking(net: Any, api: Any, names: list[str], how: Any, **more: Any) -> tuple[str, ...]:
        asked.append(names)
        return own(net, api, names, how, **more)

    monkeypatch.setattr(gpu_cache_check, "mark_outputs", marking)
    (tmp_path / "m.onnx").write_bytes(b"model")
    engines = gpu_cache_check.Engines(tmp_path / "m.onnx", np.zeros((8, 3, 4, 4), np.uint8))
    assert engines.build(outputs={"x", "hidden", "y", "dropped"}) == b"plan"
    assert asked == [["dropped", "hidden", "x", "y"]]
    assert network.marked == ["hidden"]
