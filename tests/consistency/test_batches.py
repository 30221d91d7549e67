from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import calibrators
from calibrators.accumulate import add_batch
from calibrators.statistics import TensorStatistics
from pipeline.consistency.batches import spread, statistics_by_batch
from pipeline.consistency.report import batches_text, write_batches
from pipeline.core.errors import InputError
from pipeline.data import Batch
from pipeline.placement import ActivationPoint, PlacementPlan
from tests.consistency.graphs import float_model

PLAN = PlacementPlan(
    activations=tuple(
        ActivationPoint(tensor=name, consumers=(("n", 0),), rule="test") for name in ("calm", "wild", "rare")
    )
)
RANGES = {"calm": [1.0, 1.02, 0.99, 1.01], "wild": [1.0, 8.0, 0.5, 2.0], "rare": [0.0, 0.0, 4.0, 0.0]}


def by_batch() -> dict[int, dict[str, TensorStatistics]]:
    found: dict[int, dict[str, TensorStatistics]] = {}
    for index in range(4):
        found[index] = {}
        for name, ranges in RANGES.items():
            statistics = TensorStatistics()
            add_batch(statistics, np.array([-ranges[index], 0.3 * ranges[index], 0.0], np.float32), index)
            found[index][name] = statistics
    return found


def test_spread_of_each_tensor() -> None:
    report = spread(PLAN, by_batch(), calibrators.get("minmax"), rtol=0.1)
    assert [row.tensor for row in report.rows] == ["wild", "calm", "rare"]
    wild, calm, rare = report.rows
    assert (wild.merged, wild.smallest, wild.median, wild.largest) == pytest.approx(
        (8 / 127, 0.5 / 127, 1.5 / 127, 8 / 127)
    )
    assert (wild.within, wild.seen, wild.ratio) == (1, 4, pytest.approx(16.0))
    assert (calm.within, calm.seen) == (4, 4)
    assert (rare.within, rare.seen, rare.ratio) == (1, 1, 1.0)
    assert report.worrying == (wild,)
    assert report.rate == pytest.approx(6 / 9)
    assert report.scales[2] == (None, None, pytest.approx(4 / 127), None)


def test_a_single_batch_has_no_spread() -> None:
    with pytest.raises(InputError, match="needs at least two batches, got 1"):
        spread(PLAN, {0: by_batch()[0]}, calibrators.get("minmax"))


def test_reports(tmp_path: Path) -> None:
    report = spread(PLAN, by_batch(), calibrators.get("minmax"))
    text = batches_text(report, most=2)
    assert "and 1 more" in text
    assert "66.66 % of the batch scales are within 10 % of the merged scale" in text
    assert "1 tensors to worry about: wild" in text
    paths = write_batches(tmp_path, report)
    assert [path.name for path in paths] == ["batches.txt", "batches.json", "batches.png"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_statistics_of_each_batch(tmp_path: Path) -> None:
    onnx.save(float_model(), tmp_path / "m.onnx")
    feeds = [np.random.default_rng(i).standard_normal((2, 4)).astype(np.float32) for i in range(3)]
    batches = [Batch(index, (2 * index, 2 * index + 1), {"x": x}) for index, x in enumerate(feeds)]
    found = statistics_by_batch(tmp_path / "m.onnx", ["x", "y"], batches)
    assert sorted(found) == [0, 1, 2]
    for index, x in enumerate(feeds):
        assert found[index]["x"].amax == pytest.approx(np.abs(x).max())
        assert found[index]["y"].amax == pytest.approx(x.max())
        assert found[index]["y"].batch_index.tolist() == [index]
