"""What --calibrators means."""

from __future__ import annotations

import pytest

from calibrators import names
from pipeline.compare.variants import expand
from pipeline.core.errors import InputError


def labels(*items: str) -> list[str]:
    return [variant.label for variant in expand(items)]


def test_all_has_every_calibrator_and_the_usual_parameters() -> None:
    variants = expand(["all"])
    assert {variant.calibrator for variant in variants} == set(names())
    assert [variant.label for variant in variants][:6] == [
        "minmax",
        "ema 0.9",
        "ema 0.99",
        "percentile 99.9",
        "percentile 99.99",
        "percentile 99.999",
    ]
    assert len(variants) == len({variant.label for variant in variants}) >= 10


def test_every_variant_makes_its_calibrator() -> None:
    for variant in expand(["all"]):
        made = variant.make()
        assert made.name == variant.calibrator
        assert dict(made.params) == variant.params


def test_parameters_by_position_and_by_name() -> None:
    assert labels("percentile(99.5)") == labels("percentile(percentile=99.5)") == ["percentile 99.5"]
    assert labels("ema-percentile(decay=0.9, percentile=99.9)") == ["ema-percentile percentile=99.9 decay=0.9"]
    assert labels("minmax,percentile(99.5),ema(alpha=0.5)") == ["minmax", "percentile 99.5", "ema 0.5"]


def test_the_same_parameters_count_once_however_they_are_written() -> None:
    assert labels("percentile", "percentile(99.99)") == ["percentile 99.9", "percentile 99.99", "percentile 99.999"]
    assert labels("ema-percentile(decay=0.95)", "ema-percentile(decay=0.95,percentile=99.99)") == [
        "ema-percentile decay=0.95"
    ]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["entorpy"], "unknown calibrator 'entorpy'; did you mean 'entropy'"),
        (["percentile(quantile=3)"], "calibrator 'percentile' has no parameter 'quantile'"),
        (["percentile(most)"], "calibrator 'percentile': percentile = 'most' is not a number"),
        (["percentile(150)"], "percentile must be above 0 and at most 100, got 150"),
        (["min max"], "'min max' is not NAME or NAME\\(parameter=value\\)"),
        (["minmax(3)"], "calibrator 'minmax' has no parameters, got '3'"),
        ([], "no calibrator to compare is given"),
        ([" , "], "no calibrator to compare is given"),
    ],
)
def test_what_is_wrong_is_said(items: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        expand(items)
