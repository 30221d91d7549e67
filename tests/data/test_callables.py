from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.errors import InputError
from pipeline.core.files import sha256_file
from pipeline.data import open_source
from tests.data.specs import IDS, IMAGE, MASK, ROW, everything


def _source(tmp_path, body: str, inputs=(ROW,), name: str = "rows"):
    (tmp_path / "data.py").write_text("import numpy as np\n" + body)
    return open_source(f"{tmp_path}/data.py:{name}", list(inputs), None)


@pytest.mark.parametrize(
    "body",
    [
        "def rows():\n  for i in range(6): yield np.full(3, i, 'f')",
        "def rows():\n  x = np.repeat(np.arange(6, dtype='f'), 3).reshape(6, 3)\n  yield x[:4]\n  yield x[4:]",
        "def rows():\n  return [{'x': np.full((1, 3), i, 'f')} for i in range(6)]",
        "rows = [np.full(3, i, 'f') for i in range(6)]",
        "def rows():\n  return np.repeat(np.arange(6, dtype='f'), 3).reshape(6, 3)",
        "class rows:\n  def __getitem__(self, i):\n    if i == 6: raise IndexError\n    return np.full(3, i, 'f')",
    ],
    ids=["samples", "batches", "dicts", "list", "array", "sequence"],
)
def test_what_a_callable_may_give(tmp_path, body: str) -> None:
    source = _source(tmp_path, body)
    assert source.length is None
    assert [(number, sample["x"].tolist()) for number, sample in source.read(everything)] == [
        (i, [i] * 3) for i in range(6)
    ]
    assert [number for number, _ in source.read(lambda number: number in (1, 4))] == [1, 4]


def test_several_inputs(tmp_path) -> None:
    body = "def rows():\n  yield {'mask': np.ones((2, 5), 'f'), 'ids': np.arange(10).reshape(2, 5)}"
    found = list(_source(tmp_path, body, [IDS, MASK]).read(everything))
    assert [sample["ids"].tolist() for _, sample in found] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert found[0][1]["mask"].shape == (5,)


def test_tensors(tmp_path) -> None:
    body = "import torch\ndef rows():\n  yield torch.ones(2, 3, requires_grad=True)"
    assert len(list(_source(tmp_path, body).read(everything))) == 2
    body = "import torch\ndef rows():\n  yield torch.full((1, 3), 1.5, dtype=torch.bfloat16)"
    (sample,) = [sample["x"] for _, sample in _source(tmp_path, body).read(everything)]
    assert (sample.dtype, sample.tolist()) == (np.float32, [1.5, 1.5, 1.5])


def test_channels_last_for_a_model_that_takes_them_first(tmp_path) -> None:
    source = _source(tmp_path, "def rows():\n  yield np.zeros((8, 8, 3), 'f')", [IMAGE])
    with pytest.raises(InputError, match=r"sample of 'x' has the shape \(8, 8, 3\)") as caught:
        list(source.read(everything))
    assert caught.value.remedy == "move the channels of each sample: sample.transpose(2, 0, 1)"


@pytest.mark.parametrize(
    ("body", "inputs", "message"),
    [
        (
            "def rows():\n  yield np.zeros((2, 2, 3), 'f')",
            [ROW],
            r"item 0: the array for 'x' has the shape \(2, 2, 3\)",
        ),
        (
            "def rows():\n  yield np.zeros((2, 4), 'f')",
            [ROW],
            r"sample 0: a sample of 'x' has the shape \(4,\), the model expects \(3,\)",
        ),
        ("def rows():\n  yield np.zeros((2, 3), 'u1')", [ROW], "the data for 'x' are uint8, the model expects float32"),
        (
            "def rows():\n  yield np.zeros(3, 'f'), 5",
            [ROW],
            "item 0 is a tuple of 2\nyield the array alone, without labels",
        ),
        (
            "def rows():\n  yield np.zeros(3, 'f'), 5",
            [IDS, MASK],
            "item 0 is a tuple of 2\nyield a dict with the keys ids, mask",
        ),
        ("def rows():\n  yield np.zeros(3, 'f')", [IDS, MASK], "item 0 is ndarray, and the model has 2 inputs"),
        ("def rows():\n  yield {'y': np.zeros(3, 'f')}", [ROW], "item 0 has the keys y, the model's inputs are x"),
        ("def rows():\n  yield 'text'", [ROW], "item 0: the value for 'x' is str of <U4, no array of numbers"),
        ("def rows():\n  yield [[1.0], [1.0, 2.0]]", [ROW], "item 0: the value for 'x' is no array"),
        ("def rows():\n  return 5", [ROW], "must yield arrays or dicts of arrays, it returned int"),
        (
            "def rows():\n  yield {'ids': np.zeros((2, 5), 'i8'), 'mask': np.zeros((3, 5), 'f')}",
            [IDS, MASK],
            "different batch sizes: ids 2, mask 3",
        ),
        (
            "def rows():\n  yield {'ids': np.zeros((2, 5), 'i8'), 'mask': np.zeros(5, 'f')}",
            [IDS, MASK],
            "ids is a batch and mask one sample",
        ),
        ("def rows():\n  yield np.array([1, np.nan, 3], 'f')", [ROW], r"sample 0: the data for 'x' have nan at \(1,\)"),
    ],
)
def test_what_a_callable_must_not_give(tmp_path, body: str, inputs, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        list(_source(tmp_path, body, inputs).read(everything))
    assert "data.py:rows" in str(caught.value)


def test_cast_is_noted_once(tmp_path) -> None:
    source = _source(tmp_path, "def rows():\n  yield np.zeros((5, 3))")
    assert {sample["x"].dtype for _, sample in source.read(everything)} == {np.dtype(np.float32)}
    assert source.notes == [f"{tmp_path}/data.py:rows: float64 data are cast to float32 for the input 'x'"]


def test_files_that_the_callable_reads_are_dependencies(tmp_path) -> None:
    np.save(tmp_path / "numbers.npy", np.zeros((2, 3), np.float32))
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    body = (
        "import helper, pathlib\ndef rows():\n"
        "  open('/dev/null').close()\n"
        "  (pathlib.Path(__file__).parent / 'written.txt').write_text('x')\n"
        "  yield np.load(pathlib.Path(__file__).parent / 'numbers.npy') * helper.FACTOR"
    )
    source = _source(tmp_path, body)
    assert source.dependencies == ()
    list(source.read(everything))
    assert {item.path: item.sha256 for item in source.dependencies} == {
        str(tmp_path / name): sha256_file(tmp_path / name) for name in ("data.py", "helper.py", "numbers.npy")
    }


def test_key_follows_the_source(tmp_path) -> None:
    first = _source(tmp_path, "rows = []")
    key, digest = first.key(), first.sha256()
    second = _source(tmp_path, "rows = [1]")
    assert key != second.key()
    assert digest != second.sha256()
    assert second.describe() == f"samples from {tmp_path}/data.py:rows"
    assert second.names is None


def test_reading_may_stop_early(tmp_path) -> None:
    body = "def rows():\n  i = 0\n  while True:\n    yield np.full((50, 3), i, 'f')\n    i += 1"
    stream = _source(tmp_path, body).read(everything)
    assert [next(stream)[0] for _ in range(120)] == list(range(120))
    stream.close()
