"""Which samples a search measures on, judges by and leaves alone."""

from __future__ import annotations

import pytest

from pipeline.data.parting import parted, spread


@pytest.mark.parametrize(("count", "multiple"), [(16, 1), (64, 1), (372, 1), (64, 8), (24, 8), (17, 1)])
def test_the_two_halves_are_apart_and_interleaved(count: int, multiple: int) -> None:
    numbers = range(100, 100 + 3 * count, 3)
    parts = parted(numbers, multiple, held_aside=True)
    assert parts.note == ""
    assert parts.check | parts.unseen == set(numbers)
    assert not parts.check & parts.unseen
    assert 0 <= len(parts.check) - len(parts.unseen) <= multiple
    assert len(parts.check) % multiple == len(parts.unseen) % multiple == 0
    ordered = sorted(numbers)
    assert sorted(parts.check)[:multiple] == ordered[:multiple]
    assert sorted(parts.unseen)[:multiple] == ordered[multiple : 2 * multiple]


def test_too_few_are_left_together_and_it_is_said() -> None:
    few = parted(range(15), 1, held_aside=True)
    assert (few.check, few.unseen) == (frozenset(range(15)), frozenset())
    assert few.note.startswith("only 15 samples are held aside: the figures are of the samples by which")
    assert parted(range(24), 16, held_aside=True).unseen == frozenset()
    none = parted(range(64), 1, held_aside=False)
    assert none.unseen == frozenset()
    assert none.note.startswith("no samples are held aside: the figures")


def test_spread() -> None:
    assert spread(range(0, 256, 2), 4, 1) == {0, 64, 128, 192}
    assert spread(range(8), 32, 1) == frozenset(range(8))
    assert len(spread(range(128), 32, 24)) == 24
    assert len(spread(range(48), 32, 48)) == 48
