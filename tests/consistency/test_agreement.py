from __future__ import annotations

import pytest

from pipeline.consistency.agreement import disagreements, sample_difference

MODEL = {"model": "a" * 64, "data": "d" * 64}
USUAL = [(0, "p"), (1, "q"), (2, "r")]


def test_agreement() -> None:
    assert disagreements([MODEL, dict(MODEL), dict(MODEL)]) == {}


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_minority_is_named(wrong: int) -> None:
    facts = [MODEL | {"model": "b" * 64} if rank == wrong else MODEL for rank in range(3)]
    others = ", ".join(str(rank) for rank in range(3) if rank != wrong)
    assert disagreements(facts) == {
        "model": f"another model in rank {wrong} (aaaaaaaaaaaa in ranks {others}, bbbbbbbbbbbb in rank {wrong})"
    }


def test_several_facts_and_a_missing_one() -> None:
    found = disagreements([MODEL | {"onnxruntime": "1.2"}, {"model": "a" * 64, "data": "e" * 64}])
    assert list(found) == ["data", "onnxruntime"]
    assert found["onnxruntime"] == "another onnxruntime in rank 1 (1.2 in rank 0, nothing in rank 1)"


def test_many_ranks_are_shortened() -> None:
    text = disagreements([MODEL] * 20 + [MODEL | {"data": "x"}] * 5)["data"]
    assert text == (
        "another data in ranks 20, 21, 22, 23, 24 "
        "(dddddddddddd in ranks 0, 1, 2, 3, 4, 5, 6, 7, ..., x in ranks 20, 21, 22, 23, 24)"
    )


@pytest.mark.parametrize(
    ("other", "names", "expected"),
    [
        ([(0, "p"), (1, "x"), (2, "r")], None, "sample 1 of rank 1 is another one (1 of 3 samples differ)"),
        ([(0, "p"), (1, "x"), (2, "y")], ["a.jpg", "b.jpg", "c.jpg"],
         "sample 1 (b.jpg) of rank 1 is another one (2 of 3 samples differ)"),
        ([(0, "q"), (1, "p"), (2, "r")], None, "rank 1 has the same samples in another order"),
        ([(0, "p"), (1, "q")], None, "rank 1 has 2 samples, most ranks have 3"),
        (USUAL, None, None),
    ],
)  # fmt: skip
def test_which_samples_differ(other: list[tuple[int, str]], names: list[str] | None, expected: str | None) -> None:
    assert sample_difference([USUAL, other, USUAL], names) == expected
