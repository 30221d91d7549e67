from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import InputError
from pipeline.data import open_source, select, split, split_source
from pipeline.records import TensorSpec
from tests.data.specs import ROW


def test_imagenet500_by_default() -> None:
    found = split(500, None, None, labelled=True)
    assert (len(found.calibration), len(found.verification)) == (128, 372)
    assert found.held_aside
    assert found.notes == ()


def test_defaults_without_labels() -> None:
    found = split(500, None, None, labelled=False)
    assert (len(found.calibration), len(found.verification)) == (128, 64)


def test_three_quarters_of_a_small_set() -> None:
    assert len(split(170, None, None, labelled=False).calibration) == 127
    assert len(split(171, None, None, labelled=False).calibration) == 128
    assert len(split(4, None, None, labelled=False).calibration) == 3


def test_calibration_is_spread_over_a_set_sorted_by_class() -> None:
    found = split(1000, 10, 10, labelled=False)
    assert sorted(found.calibration) == list(range(0, 1000, 100))
    assert {number // 100 for number in found.verification} == set(range(10))


def test_unknown_length_takes_the_first_and_what_follows() -> None:
    found = split(None, 10, 4, labelled=False)
    assert found.calibration == frozenset(range(10))
    assert found.verification == frozenset(range(10, 14))
    assert len(split(None, None, None, labelled=False).calibration) == 128


def test_one_sample_serves_both_and_says_so() -> None:
    found = split(1, None, None, labelled=False)
    assert found.calibration == found.verification == {0}
    assert not found.held_aside
    assert "no sample is left to hold aside" in found.notes[0]


def test_asking_for_every_sample_leaves_nothing_aside() -> None:
    found = split(20, 20, None, labelled=False)
    assert len(found.calibration) == 20
    assert not found.held_aside
    assert found.verification <= found.calibration


def test_asking_for_more_than_there_are_is_noted() -> None:
    assert "30 samples to calibrate on were asked for, the data has 20" in split(20, 30, None, labelled=False).notes[0]
    assert "15 samples to verify on were asked for, 10 are left" in split(20, 10, 15, labelled=False).notes[0]


def test_no_samples() -> None:
    with pytest.raises(InputError, match="the data has no samples"):
        split(0, None, None, labelled=False)


def test_static_batch() -> None:
    found = split(103, None, None, labelled=True, multiple=4)
    assert len(found.calibration) % 4 == len(found.verification) % 4 == 0
    assert found.notes == ("3 samples are left out: the model's static batch is 4",)
    with pytest.raises(InputError, match="samples is 10, and the model has a static batch of 4") as caught:
        split(100, 10, None, labelled=False, multiple=4)
    assert "such as 8" in str(caught.value.remedy)
    with pytest.raises(InputError, match="the data has 3 samples, and the model has a static batch of 4"):
        split(3, None, None, labelled=False, multiple=4)


@given(
    length=st.integers(1, 400),
    samples=st.none() | st.integers(1, 500),
    verify=st.none() | st.integers(1, 500),
    labelled=st.booleans(),
)
def test_parts_never_overlap_and_stay_inside(
    length: int, samples: int | None, verify: int | None, labelled: bool
) -> None:
    found = split(length, samples, verify, labelled)
    assert found.calibration
    assert found.verification
    assert max(found.calibration | found.verification) < length
    assert found.held_aside == (not found.calibration & found.verification)
    if samples is not None:
        assert len(found.calibration) == min(samples, length)


@given(length=st.integers(1, 200), labelled=st.booleans(), multiple=st.integers(1, 9))
def test_parts_fill_static_batches(length: int, labelled: bool, multiple: int) -> None:
    if length < multiple:
        return
    found = split(length, None, None, labelled, multiple=multiple)
    assert found.calibration
    assert found.verification
    assert len(found.calibration) % multiple == len(found.verification) % multiple == 0


def test_split_source_uses_the_static_batch(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 3), np.float32))
    fixed = TensorSpec(name="x", dtype="float32", shape=(4, 3))
    source = open_source(str(tmp_path / "x.npy"), [fixed], None)
    found = split_source(source, [fixed], samples=None, verify=None, labelled=False)
    assert (len(found.calibration), len(found.verification)) == (4, 4)


def test_split_source_counts_a_short_callable(tmp_path) -> None:
    (tmp_path / "data.py").write_text(
        "import numpy as np\ndef rows():\n  for i in range(5): yield np.full((4, 3), i, 'f')\n"
    )
    source = open_source(f"{tmp_path}/data.py:rows", [ROW], None)
    found = split_source(source, [ROW], samples=None, verify=None, labelled=False)
    assert found == split(20, None, None, labelled=False)
    assert source.count(None) == 20
    assert source.count(7) == 7


def test_split_source_and_select_end_with_an_endless_callable(tmp_path) -> None:
    (tmp_path / "data.py").write_text(
        "import itertools, numpy as np\ndef rows():\n  for i in itertools.count(): yield np.full(3, i, 'f')\n"
    )
    source = open_source(f"{tmp_path}/data.py:rows", [ROW], None)
    found = split_source(source, [ROW], samples=6, verify=2, labelled=False)
    assert found.calibration == frozenset(range(6))
    assert [number for number, _ in select(source, found.verification)] == [6, 7]


def test_select_says_when_the_data_ended(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 3), np.float32))
    source = open_source(str(tmp_path / "x.npy"), [ROW], None)
    assert list(select(source, frozenset())) == []
    with pytest.raises(InputError, match="the data ended after sample 3, and sample 12 is needed"):
        list(select(source, frozenset({3, 12})))
