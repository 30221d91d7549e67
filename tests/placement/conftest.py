"""Prepared, planned, calibrated and quantised networks of the zoo, each made once per test run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from calibrators import TensorStatistics
from pipeline.config import PlacementConfig
from pipeline.placement import PlacementPlan, make_plan
from tests.zoo import ZooModel, build

BATCHES = 3


@dataclass(frozen=True)
class Quantised:
    """A network of the zoo after the quantise stage."""

    model: ZooModel
    fp32: Path
    int8: Path
    plan: PlacementPlan
    statistics: dict[str, TensorStatistics]


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Quantised]:
    """``quantised(name)``: minmax on random inputs, FP32 remainder."""
    import calibrators
    from calibrators.statistics import load_statistics
    from pipeline import calibrate, export, prepare, quantize
    from pipeline.data.batching import Batch

    made: dict[str, Quantised] = {}

    def get(name: str) -> Quantised:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = build(name, folder)
            exported = export.run(
                str(model.path), inputs=(), profiles=(), opset=17, folder=folder / "export"
            ).model_path
            fp32 = prepare.run(exported, folder=folder / "prepare").model_path
            config = PlacementConfig()
            plan = make_plan(fp32, config)
            batches = [Batch(index, (2 * index, 2 * index + 1), model.feeds(seed=index)) for index in range(BATCHES)]
            calibrated = calibrate.run(fp32, plan.tensors, batches, folder=folder / "calibrate", threads=2)
            statistics, _ = load_statistics(calibrated.statistics_path)
            minmax = calibrators.get("minmax")
            result = quantize.run(fp32, plan, statistics, minmax, folder=folder / "quantize", config=config)
            made[name] = Quantised(model, fp32, result.model_path, plan, statistics)
        return made[name]

    return get
