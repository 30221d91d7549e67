"""Atomic files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline.core.errors import InputError
from pipeline.core.files import (
    atomic_file,
    canonical_json,
    copy_file,
    explain_os_errors,
    link_or_copy,
    sha256_json,
    write_json,
    write_text,
)


def test_a_failed_write_leaves_the_old_file_and_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_text(path, "old")

    def stopped() -> None:
        with atomic_file(path) as stream:
            stream.write(b"new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        stopped()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"no space left on the disk while writing .*x"),
        explain_os_errors(tmp_path / "x"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_in_the_way_is_explained(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "")
    with pytest.raises(InputError, match="cannot write"):
        write_text(tmp_path / "a" / "b", "")


def test_links_share_content_and_replace(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "1")
    write_text(tmp_path / "b", "2")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "1"


def test_a_copy_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"old")
    copy_file(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "b").open("r+b") as stream:
        stream.write(b"2")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_json_is_canonical_and_refuses_nan(tmp_path: Path) -> None:
    assert canonical_json({"b": 1, "a": [0.1]}) == '{"a":[0.1],"b":1}'
    assert sha256_json({"b": 1, "a": 2}) == sha256_json({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x", {"a": float("nan")})
