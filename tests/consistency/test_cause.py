from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.consistency.compare import compare
from pipeline.consistency.comparison import Tolerance
from pipeline.consistency.context import QuantContext
from tests.consistency.contexts import AMAX, context, seen, weights

OTHER = {name: value * 1.2 for name, value in AMAX.items()}
SAME_EVIDENCE = dict.fromkeys(AMAX, seen())


def cause(*contexts: QuantContext) -> str:
    comparison = compare(contexts, Tolerance(atol=0.0))
    assert not comparison.consistent
    return comparison.cause


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"model": "a" * 64}, {"model": "b" * 64}, "another model: a aaaaaaaaaaaa, b bbbbbbbbbbbb"),
        (
            {"calibrator": "ema", "params": {"alpha": 0.9}},
            {"calibrator": "ema", "params": {"alpha": 0.95}},
            "another calibrator: a ema (alpha 0.9), b ema (alpha 0.95)",
        ),
        ({"calibrator": "ema"}, {"calibrator": "minmax"}, "another calibrator: a ema, b minmax"),
        ({"data": "a" * 64}, {"data": "b" * 64}, "other calibration data: a aaaaaaaaaaaa, b bbbbbbbbbbbb"),
        (
            {"calibrator": "ema", "evidence": SAME_EVIDENCE},
            {"calibrator": "ema", "evidence": SAME_EVIDENCE},
            "another order of the batches: the same values were seen, and ema depends on their order",
        ),
        (
            {"calibrator": "entropy", "evidence": SAME_EVIDENCE},
            {"calibrator": "entropy", "evidence": dict.fromkeys(AMAX, seen(high=2.0))},
            "other calibration data: the values seen by b have other extremes or another count",
        ),
        (
            {"evidence": SAME_EVIDENCE},
            {"evidence": SAME_EVIDENCE},
            "another calibrator: b saw the same values and chose other ranges",
        ),
        ({}, {}, "other calibration data, calibrator or model: b does not say what it was made from"),
    ],
)
def test_recorded_facts(first: dict[str, Any], second: dict[str, Any], expected: str) -> None:
    assert cause(context("a", **first), context("b", OTHER, **second)) == expected


def test_fp16_ranges() -> None:
    halved = {name: float(np.float16(value * 1.0003)) for name, value in AMAX.items()}
    assert cause(context("exact", {k: v * 1.0003 for k, v in AMAX.items()}), context("half", halved)) == (
        "FP16 reduction: every differing scale of half is an FP16 number"
    )


def test_rounding() -> None:
    moved = {name: value * (1 + 3e-6) for name, value in AMAX.items()}
    assert cause(context("cpu"), context("gpu", moved)).startswith("float arithmetic: the largest difference is 3e-06")


def test_weights_do_not_come_from_calibration() -> None:
    assert cause(weights("a", (1.0, 2.0)), weights("b", (1.0, 2.5))) == (
        "another model: 1 weights have other scales in b, which no calibration changes"
    )


def test_missing_tensors() -> None:
    assert cause(context("a"), context("b", {"add": 0.01})) == (
        "another model or another placement: 3 tensors are not quantised everywhere"
    )


def test_another_scheme() -> None:
    first = context("a")
    other = context("b").model_copy(
        update={"tensors": tuple(t.model_copy(update={"dtype": "uint8"}) for t in first.tensors)}
    )
    assert cause(first, other) == ("another tool or another quantisation scheme made b: not only the scales differ")
