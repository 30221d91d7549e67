from __future__ import annotations

import numpy as np
import pytest

from pipeline.consistency.compare import assert_consistent, compare
from pipeline.consistency.comparison import Tolerance
from pipeline.consistency.context import QuantContext, TensorContext
from pipeline.core.errors import CheckFailed, InputError
from tests.consistency.contexts import AMAX, context, weights


def test_equal_contexts_agree() -> None:
    comparison = compare([context("a"), context("b"), context("c")])
    assert comparison.consistent
    assert comparison.rate == 1.0
    assert len(set(comparison.digests)) == 1
    assert_consistent([context("a"), context("b")])


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("wrong", [0, 1])
def test_the_one_that_differs_is_named(size: int, wrong: int) -> None:
    contexts = [context(f"rank {i}", {**AMAX, "head": 120.0} if i == wrong else None) for i in range(size)]
    comparison = compare(contexts)
    (row,) = comparison.mismatches
    assert row.tensor == "head"
    assert row.problem == "scale"
    expected = wrong if size > 2 else 1  # of two, neither is the majority: the first is the reference
    assert row.differs == (expected,)
    assert comparison.who == (f"rank {expected}",)
    assert comparison.rate == 0.75
    if size > 2:
        assert row.difference == pytest.approx((120 - 113.25) / 127, rel=1e-5)
        assert row.relative == pytest.approx(120 / 113.25 - 1, rel=1e-5)


def test_majority_is_the_reference_wherever_it_stands() -> None:
    contexts = [context("a", {"x": 2.0}), *(context(f"b{i}", {"x": 1.0}) for i in range(3))]
    (row,) = compare(contexts).rows
    assert row.differs == (0,)
    assert row.reference == context("b", {"x": 1.0}).tensors[0].scales[0]


def test_absolute_tolerance() -> None:
    first, second = context("a", {"x": 127.0}), context("b", {"x": 127.0 * (1 + 0.9e-5)})
    assert compare([first, second]).consistent
    assert not compare([first, second], Tolerance(atol=0.5e-5)).consistent


def test_absolute_tolerance_cannot_hide_a_small_scale() -> None:
    """A scale of 1e-6 against one of 2e-6: the difference is below atol, and half of it is wrong."""
    first, second = context("a", {"x": 127e-6}), context("b", {"x": 254e-6})
    assert not compare([first, second], Tolerance(atol=1e-5)).consistent


def test_relative_tolerance() -> None:
    first, second = context("a", {"x": 1.0}), context("b", {"x": 1.04})
    assert compare([first, second], Tolerance(atol=0.0, rtol=0.05)).consistent
    assert not compare([first, second], Tolerance(atol=0.0, rtol=0.03)).consistent


def test_zero_tolerance_wants_equal_bits() -> None:
    scale = np.float32(0.5)
    first = QuantContext(label="a", tensors=(TensorContext(name="x", scales=(float(scale),)),))
    second = QuantContext(
        label="b", tensors=(TensorContext(name="x", scales=(float(np.nextafter(scale, np.float32(1))),)),)
    )
    assert not compare([first, second], Tolerance(atol=0.0)).consistent
    assert compare([first, first], Tolerance(atol=0.0)).consistent


def test_per_channel_names_the_worst_slice() -> None:
    first, second = weights("a", (1.0, 2.0, 3.0)), weights("b", (1.0, 2.2, 3.003))
    (row,) = compare([first, second]).mismatches
    assert row.channel == 1
    assert row.values == (2.0, pytest.approx(2.2))
    assert row.relative == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize(
    ("other", "problem", "detail"),
    [
        ({"dtype": "uint8"}, "dtype", "int8 in 2 of 3 contexts; uint8 in 1 of 3"),
        ({"zero_points": (3,)}, "zero point", "zero point 0 in 2 of 3 contexts; zero point 3 in 1 of 3"),
        ({"axis": 1}, "axis", "axis 0 in 2 of 3 contexts; axis 1 in 1 of 3"),
        ({"scales": (1.0,)}, "channels", "2 scales in 2 of 3 contexts; 1 scales in 1 of 3"),
    ],
)
def test_structure(other: dict[str, object], problem: str, detail: str) -> None:
    base = {"name": "w", "kind": "weight", "scales": (1.0, 2.0), "axis": 0}
    contexts = [
        QuantContext(label=f"c{i}", tensors=(TensorContext.model_validate(base if i != 1 else {**base, **other}),))
        for i in range(3)
    ]
    comparison = compare(contexts)
    (row,) = comparison.mismatches
    assert (row.problem, row.differs) == (problem, (1,))
    assert detail in row.detail
    assert comparison.worst is row


def test_absent_from_a_complete_context_is_a_difference() -> None:
    comparison = compare([context("a"), context("b", {k: v for k, v in AMAX.items() if k != "add"})])
    (row,) = comparison.mismatches
    assert (row.tensor, row.problem, row.differs, row.values[1]) == ("add", "missing", (1,), None)


def test_absent_from_an_incomplete_context_is_not() -> None:
    shown = {k: v for k, v in AMAX.items() if k != "add"}
    engine = context("engine", shown).model_copy(update={"complete": ()})
    comparison = compare([engine, context("a")])
    assert comparison.consistent
    assert len(comparison.rows) == 3
    assert comparison.hidden == 1


def test_nothing_to_compare() -> None:
    with pytest.raises(InputError, match="needs at least two contexts, got 1"):
        compare([context("a")])
    with pytest.raises(InputError, match=r"no tensor is in two of the contexts.*a: x; b: y"):
        compare([context("a", {"x": 1.0}), context("b", {"y": 1.0})])


def test_the_assertion_tells_everything() -> None:
    amax = {f"t{i}": 1.0 for i in range(9)}
    other = {name: 1.1 + i / 100 for i, name in enumerate(amax)}
    with pytest.raises(CheckFailed) as caught:
        assert_consistent([context("mine", amax), context("theirs", other)])
    text = str(caught.value)
    assert "9 of 9 tensors differ (atol 1e-05, rtol 0) in theirs" in text
    assert "t8: mine 0.00787401572, theirs 0.0092913378 (difference 0.00142, 18 %)" in text
    assert "and 4 more" in text
    assert "likely cause: " in text
    assert caught.value.exit_code == 1
