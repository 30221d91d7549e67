"""A graph in which the plan quantises nothing: said, not hidden."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

import calibrators
from pipeline import quantize
from pipeline.config import PlacementConfig
from pipeline.placement import make_plan


def test_a_graph_in_which_nothing_is_quantised_is_said_to_be_one(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 8, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], name="act")], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    config = PlacementConfig()
    plan = make_plan(tmp_path / "m.onnx", config)
    found = quantize.run(
        tmp_path / "m.onnx", plan, {}, calibrators.get("minmax"), folder=tmp_path / "out", config=config
    )
    assert found.quantized_nodes == 0
    assert found.warnings == ("no node is quantised, so nothing gains from INT8; `quantize explain` says why for each",)
