"""The figures as verified against the target and the search's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.accuracy import Figures, Target
from pipeline.data.parting import Parts
from pipeline.errors.figures import OutputFigures
from pipeline.mixed.building import MixedBuild
from pipeline.mixed.verified import missed_as_verified, verified_figures
from pipeline.verify import VerifyResult

SQNR = Target(kind="min_sqnr", value=25.0)


def figures(sqnr_db: float = 30.0, agreement: float | None = None, samples: int = 100) -> Figures:
    return Figures(sqnr_db=sqnr_db, agreement=agreement, samples=samples)


def result(sqnr_db: float) -> VerifyResult:
    outputs = (
        OutputFigures(name="codes", agreement=0.5),  # whole numbers
        OutputFigures(name="a", sqnr_db=sqnr_db + 3),
        OutputFigures(name="b", sqnr_db=sqnr_db, agreement=0.9),
    )
    return VerifyResult(samples=100, held_aside=True, layers=1, outputs=outputs, top1_fp32=0.8, top1_int8=0.7)


def test_figures_of_a_verification_are_those_of_a_search() -> None:
    found = verified_figures(result(24.95))
    assert found == Figures(sqnr_db=24.95, agreement=0.9, top1=0.7, top1_fp32=0.8, samples=100)


@pytest.mark.parametrize(
    ("target", "verified", "searched", "why"),
    [
        (SQNR, figures(24.95), figures(25.05), "kernels round differently"),
        (SQNR, figures(24.0), figures(25.05), "more than the rounding of other kernels usually makes"),
        (Target(kind="min_agreement", value=0.99), figures(agreement=0.98), figures(agreement=0.99), "round diff"),
        (Target(kind="min_agreement", value=0.99), figures(agreement=0.97), figures(agreement=0.99), "more than the"),
    ],
)
def test_a_target_that_only_the_search_meets(target: Target, verified: Figures, searched: Figures, why: str) -> None:
    said = missed_as_verified(target, verified, searched)
    assert said is not None
    assert why in said
    assert f"{target.describe(verified)} as verified" in said
    assert f"{target.describe(searched)} by the search" in said
    assert f"the target is {target}" in said


def test_nothing_is_said_where_both_meet_the_target_or_neither() -> None:
    assert missed_as_verified(SQNR, figures(25.0), figures(25.05)) is None
    assert missed_as_verified(SQNR, figures(24.0), figures(24.5)) is None


def misses(verified_db: float, *, judged: float, unseen: float | None, parted: bool = True) -> list[str]:
    """What a build says, by the SQNR on the samples judged by, on those never seen, and as verified."""
    point: Any = SimpleNamespace(
        meets=True, figures=figures(judged), unseen=None if unseen is None else figures(unseen)
    )
    search: Any = SimpleNamespace(target=SQNR, point=lambda number: point)
    build: Any = SimpleNamespace(
        build=SimpleNamespace(config=SimpleNamespace(mixed=SimpleNamespace(choose=None))),
        parts=Parts(frozenset({1}), frozenset({2} if parted else ())),
    )
    return list(MixedBuild._misses(build, search, result(verified_db)))


def test_what_a_build_says_of_its_target() -> None:
    assert misses(25.2, judged=25.3, unseen=25.3) == []
    assert "24.95 dB as verified" in misses(24.95, judged=25.3, unseen=25.05)[0]
    assert "24.95 dB as verified" in misses(24.95, judged=25.05, unseen=None, parted=False)[0]
    assert "24.50 dB on the 100 held-aside samples that the search never saw" in misses(24.6, judged=26, unseen=24.5)[0]
    # A point that was asked for by its number is measured on those samples by the verification alone.
    assert "24.60 dB on the 100 held-aside samples that the search never saw" in misses(24.6, judged=26, unseen=None)[0]
