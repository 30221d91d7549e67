"""Profiles against the shapes of real requests."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pipeline import package
from pipeline.artifact import Artifact
from pipeline.cli import main
from pipeline.config import Profile, check_profiles
from pipeline.core.errors import InputError
from pipeline.engine.coverage import Request, coverage, read_requests, suggest
from pipeline.engine.profiles import covers
from tests.engine.artifacts import manifest


def shape(*dims: int) -> Request:
    return (("x", dims),)


def test_shares_distances_and_what_nobody_serves() -> None:
    profiles = [Profile.parse("x=1x8,1x8,4x8"), Profile.parse("x=8x8,16x8,32x8")]
    found = coverage(profiles, {shape(1, 8): 6, shape(2, 8): 2, shape(32, 8): 1, shape(64, 8): 1})
    assert found.requests == 10
    assert found.covered == pytest.approx(0.9)
    assert [use.requests for use in found.uses] == [8, 1]
    assert [use.mean_distance for use in found.uses] == [pytest.approx(0.25), pytest.approx(1.0)]
    assert found.mean_distance == pytest.approx(3 / 9)
    assert found.uncovered == (("x=64x8", 1),)


def test_nothing_covered_is_no_division_by_zero() -> None:
    found = coverage([Profile.parse("x=1x8,1x8,1x8")], {shape(9, 9): 3})
    assert (found.covered, found.mean_distance, found.uses[0].mean_distance) == (0, 0, 0)


def test_suggested_profiles_stand_where_the_requests_are() -> None:
    requests = {shape(1, 8): 100, shape(2, 8): 10, shape(64, 8): 50, shape(60, 8): 5, shape(128, 8): 1}
    profiles = suggest(requests, 2)
    assert [str(profile) for profile in profiles] == ["x=1x8,1x8,2x8", "x=60x8,64x8,128x8"]
    assert coverage(profiles, requests).covered == 1
    one = coverage(suggest(requests, 1), requests)
    assert one.mean_distance > coverage(profiles, requests).mean_distance


def test_more_profiles_than_shapes_are_not_made_up() -> None:
    assert len(suggest({shape(1, 8): 1}, 5)) == 1


def test_requests_of_different_rank_have_no_profile() -> None:
    with pytest.raises(InputError, match="different numbers of dimensions"):
        suggest({shape(1, 8): 1, shape(8): 1}, 1)
    with pytest.raises(InputError, match="at least one profile is needed, got 0"):
        suggest({shape(1, 8): 1}, 0)


@given(
    st.dictionaries(st.tuples(st.integers(1, 256), st.integers(1, 64)), st.integers(1, 99), min_size=1, max_size=30),
    st.integers(1, 4),
)
def test_suggestions_allow_every_request_whatever_the_order(counts: dict[tuple[int, int], int], number: int) -> None:
    requests = {shape(*dims): count for dims, count in counts.items()}
    profiles = suggest(requests, number)
    assert all(any(covers(profile, dict(request)) for profile in profiles) for request in requests)
    assert suggest(dict(reversed(requests.items())), number) == profiles


def test_requests_are_read_and_added_up(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("x,mask,count\n8x3,8,5\n8x3,8,2\n1x3,1,\n")
    assert read_requests(path, ["x", "mask"]) == Counter(
        {(("x", (8, 3)), ("mask", (8,))): 7, (("x", (1, 3)), ("mask", (1,))): 1}
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x,y\n1x3,2\n", "the model has no input 'y'; "),
        ("count\n1\n", "no column for input 'x'; its header must be x"),
        ("x\n1x0\n", "line 2: '1x0' is not a shape of 'x'"),
        ("x\nhello\n", "line 2: 'hello' is not a shape"),
        ("x,count\n1x3,many\n", "line 2: count 'many' is not a number"),
        ("x,count\n1x3,²\n", "line 2: count '²' is not a number of requests"),
        ("x,count\n1x3,-1\n", "line 2: count '-1' is not a number of requests"),
        (f"x,count\n1x3,{'9' * 5000}\n", r"line 2: count '9{20}\.\.\.' is not a number of requests"),
        (f"x\n1x{'9' * 5000}\n", "is not a shape of 'x'"),
        ("x\n1x3x8x8,500\n", "line 2: 2 cells below 1 columns: '500' has no header"),
        ("x,count,x\n1x3,1,2x3\n", "its header has 'x' twice"),
        ("x,count\n1x3,0\n", "has no requests"),
        ("x\n", "has no requests"),
        ("", "no column for input 'x'"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        read_requests(path, ["x"])


def test_what_spreadsheets_add_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(b"\xef\xbb\xbfx,count\r\n1x3,2,,\r\n")
    assert read_requests(path, ["x"]) == Counter({shape(1, 3): 2})


def test_a_shape_that_was_never_asked_for_is_no_request(artifact: Path) -> None:
    found = json.loads(asked(artifact, "x,count\n4x3x8x8,5\n8x3x64x64,0\n3x8x8,0\n", "--json").stdout)
    assert [use["profile"] for use in found["suggested"]["uses"]] == ["x=4x3x8x8,4x3x8x8,4x3x8x8"]
    assert (found["now"]["requests"], found["impossible"]) == (5, [])
    shown = asked(artifact, "x,count\n4x3x8x8,0\n3x8x8,1\n")
    assert shown.exit_code == 2
    assert "the model takes none of these requests" in shown.stderr


def test_files_that_are_missing_or_binary(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_requests(tmp_path / "none.csv", ["x"])
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_requests(tmp_path, ["x"])
    (tmp_path / "b.csv").write_bytes(b"x\n\xff\xfe\n")
    with pytest.raises(InputError, match="is not a CSV file"):
        read_requests(tmp_path / "b.csv", ["x"])


# -- requests that the model itself never takes ------------------------------------------------------------------------


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    profiles = ("x=1x3x8x8,4x3x8x8,8x3x64x64",)
    (tmp_path / "scales.json").write_text("{}")
    made = manifest(profiles, shape=("N", 3, "H", "W"))
    return package.run({"scales.json": tmp_path / "scales.json"}, made, folder=tmp_path / "net").folder


def asked(artifact: Path, text: str, *more: str) -> Result:
    (artifact.parent / "r.csv").write_text(text)
    arguments = ["coverage", str(artifact), str(artifact.parent / "r.csv"), *more]
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})


def test_requests_of_another_rank_are_counted_and_get_no_profile(artifact: Path) -> None:
    text = "x,count\n4x3x8x8,5\n3x8x8,20\n1x4x8x8,1\n1x3x128x8,4\n"
    shown = asked(artifact, text)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert (
        "the model never takes x=3x8x8 (20 requests): input 'x' has rank 4 in the model (Nx3xHxW), not 3" in lines
    )
    assert (
        "the model never takes x=1x4x8x8 (1 requests): dimension 1 of input 'x' is 3 in the model (Nx3xHxW), not 4"
        in lines
    )
    assert "no profile allows x=1x3x128x8 (4 requests)" in lines
    assert '--profile "x=1x3x8x8,4x3x8x8,4x3x128x8"' in lines
    found = json.loads(asked(artifact, text, "--json").stdout)
    assert [item["shapes"] for item in found["impossible"]] == ["x=3x8x8", "x=1x4x8x8"]
    assert found["now"]["covered"] == pytest.approx(5 / 30)
    assert found["suggested"]["covered"] == pytest.approx(9 / 30)
    for use in found["suggested"]["uses"]:
        check_profiles((Profile.parse(use["profile"]),), Artifact.open(artifact).manifest.inputs)


def test_requests_none_of_which_the_model_takes(artifact: Path) -> None:
    shown = asked(artifact, "x\n3x8x8\n")
    assert shown.exit_code == 2
    assert "the model takes none of these requests, such as x=3x8x8: input 'x' has rank 4" in shown.stderr


def test_a_dimension_beyond_the_largest_is_refused(artifact: Path) -> None:
    shown = asked(artifact, "x\n1x3x8x2147483648\n")
    assert shown.exit_code == 2
    assert "line 2: 2147483648 in the shape of 'x' is beyond the largest dimension, 2147483647" in shown.stderr
