"""What the quantise stage writes says the same scales everywhere: graph, calibration cache, the ranges themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest

import calibrators
from pipeline import calibrate, prepare, quantize
from pipeline.artifact import CALIBRATION_CACHE, INT8_MODEL
from pipeline.config import PlacementConfig
from pipeline.consistency.compare import assert_consistent, compare
from pipeline.consistency.context import QuantContext
from pipeline.consistency.graph import visible_tensors
from pipeline.consistency.loading import load_context
from pipeline.core.errors import CheckFailed
from pipeline.data import Batch
from pipeline.placement import make_plan
from tests.consistency.graphs import convolutions


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_graph_cache_and_ranges_agree_to_the_bit(tmp_path: Path, precision: Literal["fp32", "fp16"]) -> None:
    onnx.save(convolutions(), tmp_path / "m.onnx")
    data = np.random.default_rng(0).standard_normal((3, 4, 32, 4, 4)).astype(np.float32)
    batches = [Batch(index, tuple(range(4 * index, 4 * index + 4)), {"x": x}) for index, x in enumerate(data)]
    config = PlacementConfig(precision=precision)
    prepared = prepare.run(tmp_path / "m.onnx", folder=tmp_path / "prepared").model_path
    plan = make_plan(prepared, config)
    (tmp_path / "calibrated").mkdir()
    calibrate.run(prepared, plan.tensors, batches, folder=tmp_path / "calibrated")
    statistics, _ = calibrators.load_statistics(tmp_path / "calibrated" / "calibration.npz")
    calibrator = calibrators.get("percentile", {"percentile": 99.9})
    quantize.run(prepared, plan, statistics, calibrator, folder=tmp_path / "int8", config=config)
    ranges, _ = quantize.activation_ranges(plan.activations, statistics, calibrator)
    assert ranges
    contexts = [
        load_context(tmp_path / "int8" / INT8_MODEL),
        load_context(tmp_path / "int8" / CALIBRATION_CACHE),
        QuantContext.of_amax(ranges, label="ranges"),
    ]
    assert_consistent(contexts, atol=0.0)
    assert len(compare(contexts).rows) == len(ranges)
    assert {tensor.kind for tensor in contexts[0].tensors} == {"activation", "weight"}
    assert sorted(visible_tensors(tmp_path / "int8" / INT8_MODEL)) == sorted(ranges)
    name = next(iter(ranges))
    wrong = QuantContext.of_amax({**ranges, name: ranges[name] * 1.01}, label="wrong")
    with pytest.raises(CheckFailed, match=f"1 of {len(ranges)} tensors differ .* in wrong"):
        assert_consistent([*contexts, wrong], atol=0.0)
