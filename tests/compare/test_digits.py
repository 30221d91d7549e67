"""The example of `scripts/experiments/digits.py`, with fewer calibrators and shifts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.compare.config import CompareConfig
from pipeline.compare.experiment import run_experiment


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "experiments" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "digits_example", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_digits_from_training_to_a_recommendation(digits: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    model, data, labels = digits.prepare(tmp_path / "input")
    config = CompareConfig(
        model=str(model),
        data=str(data),
        labels=labels,
        out=tmp_path / "out",
        samples=128,
        calibrators=("minmax", "percentile(90)", "entropy"),
        shift_sigma=(0.0, 0.4),
        shift_draws=1,
        shift_images=("noise",),
    )
    outcome = run_experiment(config)
    clean = {row["calibrator"]: row for row in outcome.table if row["shift"] == "none"}
    assert outcome.samples == 669
    assert clean["fp32"]["top1"] > 0.94
    assert clean["minmax"]["drop_from_clean"] < 0.01
    assert clean["entropy"]["drop_from_clean"] < 0.01
    noisy = [row for row in outcome.table if row["calibrator"] == "minmax" and row["shift"] == "activations"]
    assert noisy[0]["drop_from_clean"] > 0.005
    # A range that cuts a tenth of all values costs top-1, by a difference that 669 digits show.
    verdicts = {item.calibrator: item for item in outcome.recommendation.comparisons}
    assert clean["percentile 90"]["sqnr_db"] < clean["minmax"]["sqnr_db"] - 10
    assert verdicts["percentile 90"].difference > 0
    assert outcome.recommendation.calibrator in ("minmax", "entropy")
    assert (tmp_path / "out" / "compare.html").is_file()
