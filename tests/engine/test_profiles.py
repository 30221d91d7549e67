"""Which profile serves which shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Profile
from pipeline.core.errors import InputError
from pipeline.engine.profiles import choose_profile, covers, distance_from_opt, nearest_allowed

ONE = Profile.parse("x=1x3x8x8,1x3x8x8,1x3x8x8")
FEW = Profile.parse("x=1x3x8x8,8x3x8x8,16x3x8x8")
MANY = Profile.parse("x=8x3x8x8,64x3x8x8,128x3x8x8")


@pytest.mark.parametrize(("batch", "expected"), [(1, 0), (2, 1), (8, 1), (16, 1), (17, 2), (128, 2)])
def test_the_nearest_optimum_serves(batch: int, expected: int) -> None:
    assert choose_profile([ONE, FEW, MANY], {"x": (batch, 3, 8, 8)}) == expected


def test_equals_go_to_the_smaller_and_then_the_first() -> None:
    wide = Profile.parse("x=1x3x8x8,8x3x8x8,1024x3x8x8")
    assert choose_profile([wide, FEW], {"x": (8, 3, 8, 8)}) == 1
    assert choose_profile([FEW, FEW], {"x": (8, 3, 8, 8)}) == 0


def test_a_shape_outside_names_the_nearest_profile_and_shape() -> None:
    with pytest.raises(InputError) as caught:
        choose_profile([ONE, FEW, MANY], {"x": (200, 3, 8, 8)})
    assert "(3 profiles)" in caught.value.message
    assert (
        "input 'x' has shape 200x3x8x8, profile 2 allows 8x3x8x8 to 128x3x8x8, nearest 128x3x8x8"
        in caught.value.message
    )


def test_another_rank_is_named() -> None:
    with pytest.raises(InputError, match="input 'x' has 2 dimensions 3x8, the engine wants 4"):
        choose_profile([ONE], {"x": (3, 8)})


def test_no_profile_at_all() -> None:
    with pytest.raises(InputError, match="no optimisation profile"):
        choose_profile([], {"x": (1,)})


def test_several_inputs_must_all_fit() -> None:
    both = Profile.parse("a=1x4,2x4,4x4;b=1,2,4")
    assert covers(both, {"a": (4, 4), "b": (1,)})
    assert not covers(both, {"a": (4, 4), "b": (5,)})
    assert not covers(both, {"a": (4, 4)})
    assert distance_from_opt(both, {"a": (4, 4), "b": (1,)}) == 2.0


@given(st.integers(1, 300), st.integers(1, 64))
def test_the_nearest_shape_is_always_allowed(batch: int, side: int) -> None:
    profiles = [FEW, MANY]
    number, shapes = nearest_allowed(profiles, {"x": (batch, 3, side, side)})
    assert covers(profiles[number], shapes)
