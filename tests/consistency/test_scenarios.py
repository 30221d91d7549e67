from __future__ import annotations

import numpy as np
import pytest

from pipeline.consistency.compare import compare
from pipeline.consistency.comparison import Tolerance
from pipeline.consistency.ranks import RanksReport
from pipeline.consistency.report import ranks_text
from pipeline.consistency.scenarios import fp16_mean, fp16_scenario, of_comparison
from tests.consistency.contexts import AMAX, context


def test_a_line_from_a_comparison() -> None:
    line = of_comparison("two", compare([context("a"), context("b", {**AMAX, "head": 120.0})]))
    assert (line.tensors, line.within, line.rate, line.identical, line.worst) == (4, 3, 0.75, False, "head")
    assert line.largest == pytest.approx(120 / 113.25 - 1, rel=1e-5)
    same = of_comparison("same", compare([context("a"), context("b")]))
    assert (same.rate, same.identical, same.largest, same.source) == (1.0, True, 0.0, "none: equal bit for bit")


def test_fp16_addition_depends_on_the_order() -> None:
    values = np.array([[2048.0], [1.0], [1.0], [1.0]])
    assert float(fp16_mean(values, [0, 1, 2, 3])[0]) != float(fp16_mean(values, [1, 2, 3, 0])[0])


def test_fp16_drifts_where_float64_does_not() -> None:
    generator = np.random.default_rng(3)
    amax = {f"t{i}": generator.uniform(1.0, 30.0, 8).tolist() for i in range(50)}
    line = fp16_scenario(amax, tolerance=Tolerance(atol=0.0, rtol=1e-5))
    assert line is not None
    assert line.name == "8 ranks, mean of their ranges in FP16"
    assert line.within < 25
    assert 2**-13 < line.largest < 2**-8
    assert "results for 8 orders of the ranks" in line.source
    assert not line.source.split("; ")[1].startswith("1 ")


def test_ranges_that_fp16_cannot_hold() -> None:
    line = fp16_scenario({"x": [1.0, 2.0], "big": [7e4, 7e4]}, tolerance=Tolerance())
    assert line is not None
    assert (line.tensors, line.within) == (2, 1)
    assert line.source.endswith("1 tensors out of FP16's range")
    assert fp16_scenario({"big": [7e4, 7e4]}, tolerance=Tolerance()) is None


def test_report_of_ranks() -> None:
    same = compare([context("rank 0"), context("rank 1")])
    report = RanksReport(
        ranks=("rank 0 (process 1 on a): X", "rank 1 (process 2 on b): Y"),
        backend="gloo",
        shard="blocks",
        batches=16,
        samples=128,
        seconds=(2.0, 3.0),
        first_seconds=(0.5, 0.5),
        cpu_seconds=(1.0, 1.0),
        merge_seconds=0.25,
        statistics="s" * 64,
        digest="d" * 64,
        scenarios=(of_comparison("2 ranks, the same batch", same),),
        same_batch=same,
        merged=context("merged"),
    )
    text = ranks_text(report)
    assert "2 ranks over gloo, shards blocks: 16 batches, 128 samples in 3.0 s, merged in 0.2 s" in text
    assert "2 ranks, the same batch  4        100 %       yes        0" in text
    assert "  2 ranks, the same batch: none: equal bit for bit" in text
    assert report.passed
    apart = compare([context("rank 0"), context("rank 1", {**AMAX, "head": 120.0})])
    assert not report.model_copy(update={"same_batch": apart}).passed
