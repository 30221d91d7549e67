"""Prepared, planned, calibrated and quantised networks of the zoo, each made once per test run."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from calibrators import TensorStatistics
from pipeline.config import PlacementConfig
from pipeline.placement import PlacementPlan, make_plan
from tests.once import once
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
    """``quantised(name)``: minmax on random inputs, FP32 remainder; one for all workers, which change no file of it."""

    @functools.cache
    def get(name: str) -> Quantised:
        folder = once(tmp_path_factory, f"quantised-{name}", functools.partial(_quantise, name))
        found: Quantised = pickle.loads((folder / "quantised.pickle").read_bytes())
        return found

    return get


def _quantise(name: str, folder: Path) -> None:
    import calibrators
    from calibrators.statistics import load_statistics
    from pipeline import calibrate, export, prepare, quantize
    from pipeline.data.batching import Batch

    model = build(name, folder)
    exported = export.run(str(model.path), inputs=(), profiles=(), opset=17, folder=folder / "export").model_path
    fp32 = prepare.run(exported, folder=folder / "prepare").model_path
    config = PlacementConfig()
    plan = make_plan(fp32, config)
    batches = [Batch(index, (2 * index, 2 * index + 1), model.feeds(seed=index)) for index in range(BATCHES)]
    calibrated = calibrate.run(fp32, plan.tensors, batches, folder=folder / "calibrate", threads=2)
    statistics, _ = load_statistics(calibrated.statistics_path)
    result = quantize.run(fp32, plan, statistics, calibrators.get("minmax"), folder=folder / "quantize", config=config)
    found = Quantised(model, fp32, result.model_path, plan, statistics)
    (folder / "quantised.pickle").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="session")
def rtx_int8_nodes(
    quantised: Callable[[str], Quantised], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], frozenset[str]]:
    """``rtx_int8_nodes(name)``: nodes of the network's INT8 graph that its TensorRT-RTX engine computes in INT8."""

    @functools.cache
    def get(name: str) -> frozenset[str]:
        found = quantised(name)
        folder = once(tmp_path_factory, f"rtx-{name}", lambda folder: rtx_engine(found.int8, found.model, folder))
        return int8_nodes(folder)

    return get


def rtx_engine(graph: Path, model: ZooModel, folder: Path) -> None:
    """Build ``graph`` into ``folder``, with the profile of ``model``."""
    from pipeline.config import Profile
    from pipeline.engine.builder import build_engine

    profiles = [Profile.parse(model.profile())]
    build_engine(graph, target="rtx", profiles=profiles, plan_path=folder / "model.plan")


def int8_nodes(folder: Path) -> frozenset[str]:
    """Nodes that the engine in ``folder`` computes in INT8."""
    reader = _plan_reader()
    return frozenset(reader.int8_nodes(reader.read_plan((folder / "model.plan").read_bytes())))


@functools.cache
def _plan_reader() -> ModuleType:
    """scripts/rtx_int8_layers.py as a module."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "rtx_int8_layers.py"
    spec = importlib.util.spec_from_file_location("rtx_int8_layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rtx_int8_layers"] = module
    spec.loader.exec_module(module)
    return module
