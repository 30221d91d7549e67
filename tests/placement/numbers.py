"""A graph quantised on one batch, and its numbers against PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx

import calibrators
from calibrators.statistics import load_statistics
from pipeline import calibrate, quantize
from pipeline.config import PlacementConfig
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.placement import make_plan
from tests.placement.reference import Reference


def assert_numbers(
    model: Path, folder: Path, feeds: dict[str, np.ndarray], off: tuple[str, ...] = (), *, exact: bool = False
) -> None:
    """Quantise ``model`` under the rules but ``off``: every INT8 node computes what fake quantisation in PyTorch does,
    and the output is that of the float graph, bit by bit with ``exact``, else within 5 % (and not the same)."""
    config = PlacementConfig(rules_off=off)
    plan = make_plan(model, config)
    statistics = {}
    if plan.tensors:
        calibrated = calibrate.run(model, plan.tensors, [Batch(0, (0, 1), feeds)], folder=folder / "c", threads=2)
        statistics, _ = load_statistics(calibrated.statistics_path)
    result = quantize.run(model, plan, statistics, calibrators.get("minmax"), folder=folder / "q", config=config)
    (before,), (after,) = (make_session(path, optimise=False).run(None, feeds) for path in (model, result.model_path))
    if exact:
        assert np.array_equal(before, after, equal_nan=True)
        return
    assert 0 < np.linalg.norm(before - after) / np.linalg.norm(before) < 0.05
    reference = Reference(onnx.load(model), plan, json.loads((result.folder / "scales.json").read_text()))
    read = {value for node in plan.quantized_nodes for value in reference.inputs(node)}
    read |= {value for node in plan.quantized_nodes for value in reference.nodes[node].output}
    names = sorted(read - set(feeds))
    session = make_session(result.model_path, capture=names, optimise=False)
    values = dict(zip(names, session.run(names, feeds), strict=True)) | feeds
    for node in plan.quantized_nodes:
        (expected,) = reference.run(node, values)
        found = values[reference.nodes[node].output[0]]
        assert np.linalg.norm(found - expected) <= 2e-5 * np.linalg.norm(expected), node
