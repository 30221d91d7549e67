from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import Preprocess
from pipeline.core.errors import InputError
from pipeline.data import open_source
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
