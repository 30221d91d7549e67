from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import Preprocess
from pipeline.core.errors import InputError
from pipeline.data import check_source, open_source
from tests.data.specs import ROW


def test_nothing_there(tmp_path) -> None:
    with pytest.raises(InputError, match=r"--data .*/nothing does not exist"):
        open_source(str(tmp_path / "nothing"), [ROW], None)
    with pytest.raises(InputError, match=r"data\.py does not exist, named in"):
        open_source(f"{tmp_path}/data.py:rows", [ROW], None)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("data.py", "name the callable in it"), ("a.png", "give the folder"), ("x.h5", "give a folder of images")],
)
def test_unknown_kind(tmp_path, name: str, remedy: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(InputError, match="is of no known kind") as caught:
        open_source(str(tmp_path / name), [ROW], None)
    assert remedy in str(caught.value.remedy)


def test_preprocessing_is_for_images_only(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3), np.float32))
    (tmp_path / "data.py").write_text("rows = []")
    for spec in (f"{tmp_path}/x.npy", f"{tmp_path}/data.py:rows"):
        with pytest.raises(InputError, match="gives arrays, to which none is applied"):
            open_source(spec, [ROW], Preprocess())
    (tmp_path / "x.png").touch()
    with pytest.raises(InputError, match="is of no known kind") as caught:
        open_source(f"{tmp_path}/x.png", [ROW], Preprocess())
    assert caught.value.remedy == f"give the folder: {tmp_path}"


def test_what_is_known_of_the_samples_before_the_model_is(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2), np.int64))
    np.savez(tmp_path / "x.npz", a=np.zeros((4, 2)), b=np.zeros((4, 1)))
    np.savez(tmp_path / "uneven.npz", a=np.zeros((4, 2)), b=np.zeros((3, 1)))
    for name, length in (("x.npy", 3), ("x.npz", 4), ("uneven.npz", None)):
        found = check_source(str(tmp_path / name), None)
        assert (found.length, found.names) == (length, None)
    code = tmp_path / "code.py"
    code.write_text("raise OSError('run')")
    found = check_source(f"{code}:make", None)
    assert (found.length, found.names, found.describe()) == (None, None, f"samples from {code}:make")


def test_arrays_that_cannot_be_read_are_told_before_the_model_is_there(tmp_path) -> None:
    for name in ("bad.npy", "bad.npz"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(InputError, match=rf"{name} cannot be read"):
            check_source(str(tmp_path / name), None)
