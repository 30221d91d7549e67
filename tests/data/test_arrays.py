from __future__ import annotations

import zipfile

import numpy as np
import pytest

from pipeline.core.errors import InputError
from pipeline.data import open_source
from pipeline.records import TensorSpec
from tests.data.specs import IDS, IMAGE, MASK, ROW, everything

RNG = np.random.default_rng(0)


def _npy(tmp_path, array, inputs=(ROW,)):
    np.save(tmp_path / "x.npy", array)
    return open_source(str(tmp_path / "x.npy"), list(inputs), None)


def _npz(tmp_path, inputs=(IDS, MASK), *, compressed: bool = False, **arrays):
    (np.savez_compressed if compressed else np.savez)(tmp_path / "x.npz", **arrays)
    return open_source(str(tmp_path / "x.npz"), list(inputs), None)


def test_npy_samples(tmp_path) -> None:
    array = RNG.standard_normal((5, 3)).astype(np.float32)
    source = _npy(tmp_path, array)
    assert source.length == source.count(None) == 5
    assert source.names is None
    found = list(source.read(lambda number: number != 2))
    assert [number for number, _ in found] == [0, 1, 3, 4]
    for number, sample in found:
        np.testing.assert_array_equal(sample["x"], array[number])
        assert sample["x"].flags.owndata


def test_npy_in_column_major_order(tmp_path) -> None:
    array = np.asfortranarray(RNG.standard_normal((5, 3)).astype(np.float32))
    for number, sample in _npy(tmp_path, array).read(everything):
        np.testing.assert_array_equal(sample["x"], array[number])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_is_streamed(tmp_path, compressed: bool, order: str) -> None:
    ids = np.array(RNG.integers(0, 100, (7, 4)), order=order)
    mask = RNG.standard_normal((7, 4)).astype(np.float32)
    source = _npz(tmp_path, compressed=compressed, mask=mask, ids=ids)
    assert source.length == 7
    found = list(source.read(lambda number: number in (0, 3, 6)))
    assert [number for number, _ in found] == [0, 3, 6]
    for number, sample in found:
        assert list(sample) == ["ids", "mask"]
        np.testing.assert_array_equal(sample["ids"], ids[number])
        np.testing.assert_array_equal(sample["mask"], mask[number])


def test_npz_is_never_whole_in_memory(tmp_path) -> None:
    import tracemalloc

    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 1000))
    source = _npz(tmp_path, [spec], x=np.zeros((20_000, 1000), np.float32))
    tracemalloc.start()
    for _ in source.read(lambda number: number % 1000 == 0):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_one_number_a_sample(tmp_path) -> None:
    lengths = TensorSpec(name="x", dtype="int64", shape=("batch",))
    for array in (np.arange(4), np.arange(4, dtype=np.int32), np.arange(8)[::2]):
        samples = [sample["x"] for _, sample in _npy(tmp_path, array, [lengths]).read(everything)]
        assert [sample.shape for sample in samples] == [()] * 4
        assert np.stack(samples).tolist() == array.tolist()


def test_casts(tmp_path) -> None:
    source = _npy(tmp_path, np.ones((2, 3), np.float64))
    assert source.notes == [f"{tmp_path}/x.npy: float64 data are cast to float32 for the input 'x'"]
    assert next(source.read(everything))[1]["x"].dtype == np.float32
    small = TensorSpec(name="x", dtype="int32", shape=("batch", 3))
    source = _npy(tmp_path, np.full((1, 3), 7, np.int64), [small])
    assert source.notes == []
    assert next(source.read(everything))[1]["x"].dtype == np.int32


def test_values_that_do_not_survive_the_cast(tmp_path) -> None:
    half = TensorSpec(name="x", dtype="float16", shape=("batch", 3))
    with pytest.raises(
        InputError, match=r"sample 1: the data for 'x' have the value 70000\.0, which float16 cannot hold"
    ):
        list(_npy(tmp_path, np.array([[1, 2, 3], [4, 7e4, 5]], np.float32), [half]).read(everything))
    byte = TensorSpec(name="x", dtype="uint8", shape=("batch", 3))
    with pytest.raises(InputError, match=r"sample 0: the data for 'x' have the value -1, which uint8 cannot hold"):
        list(_npy(tmp_path, np.array([[1, -1, 300]], np.int64), [byte]).read(everything))


def test_integers_for_a_float_input_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="data for 'x' are uint8, the model expects float32") as caught:
        _npy(tmp_path, np.zeros((2, 3), np.uint8))
    assert "raw pixels" in str(caught.value.remedy)


def test_floats_for_an_integer_input_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="data for 'ids' are float32, the model expects int64") as caught:
        _npy(tmp_path, np.zeros((2, 3), np.float32), [IDS])
    assert caught.value.remedy == "convert the data: array.astype('int64')"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_named(tmp_path, value: float) -> None:
    array = np.ones((4, 3), np.float32)
    array[2, 1] = value
    with pytest.raises(InputError, match=rf"sample 2: the data for 'x' have {value} at \(1,\) \(1 of 3 values"):
        list(_npy(tmp_path, array).read(everything))
    assert len(list(_npy(tmp_path, array).read(lambda number: number < 2))) == 2


def test_python_objects_are_never_unpickled(tmp_path) -> None:
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    array = np.array([Bomb()] * 2, dtype=object)
    with pytest.raises(InputError, match="Python objects, which are never unpickled"):
        _npy(tmp_path, array)
    with pytest.raises(InputError, match="Python objects, which are never unpickled"):
        _npz(tmp_path, [ROW], x=array)


def test_shapes_that_do_not_fit(tmp_path) -> None:
    with pytest.raises(InputError, match=r"a sample of 'x' has the shape \(4,\), the model expects \(3,\) float32"):
        _npy(tmp_path, np.zeros((2, 4), np.float32))
    with pytest.raises(InputError, match=r"has the shape \(\), the model") as caught:
        _npy(tmp_path, np.zeros(3, np.float32))
    assert "array[np.newaxis] turns (3,) into one sample" in str(caught.value.remedy)
    with pytest.raises(InputError, match=r"has the shape \(8, 8\)") as caught:
        _npy(tmp_path, np.zeros((3, 8, 8), np.float32), [IMAGE])
    assert "array[np.newaxis] turns (3, 8, 8) into one sample" in str(caught.value.remedy)
    with pytest.raises(InputError, match=r"has the shape \(1, 3, 8, 8\)") as caught:
        _npy(tmp_path, np.zeros((5, 1, 3, 8, 8), np.float32), [IMAGE])
    assert "array[:, 0] turns (5, 1, 3, 8, 8) into (5, 3, 8, 8)" in str(caught.value.remedy)
    with pytest.raises(InputError, match=r"has the shape \(8, 8, 3\), the model expects \(3, 8, 8\)") as caught:
        _npy(tmp_path, np.zeros((6, 8, 8, 3), np.float32), [IMAGE])
    assert caught.value.remedy == (
        "the channels are last, and the model takes them first: array.transpose(0, 3, 1, 2) turns (6, 8, 8, 3) "
        "into (6, 3, 8, 8)"
    )
    last = TensorSpec(name="x", dtype="float32", shape=("batch", "h", "w", 3))
    with pytest.raises(InputError, match=r"has the shape \(3, 8, 9\), the model expects \(h, w, 3\)") as caught:
        _npz(tmp_path, [last], x=np.zeros((6, 3, 8, 9), np.float32))
    assert "array.transpose(0, 2, 3, 1) turns (6, 3, 8, 9) into (6, 8, 9, 3)" in str(caught.value.remedy)
    with pytest.raises(InputError, match=r"has the shape \(8, 9, 3\)") as caught:
        _npy(tmp_path, np.zeros((6, 8, 9, 3), np.float32), [IMAGE])
    assert "transpose" not in str(caught.value.remedy)
    with pytest.raises(InputError, match="the data for 'x' are a single number"):
        _npy(tmp_path, np.float32(3))


def test_dynamic_dimensions_take_any_size_but_none(tmp_path) -> None:
    assert _npy(tmp_path, np.zeros((2, 9), np.int64), [IDS]).length == 2
    with pytest.raises(InputError, match=r"has the shape \(0,\)"):
        _npy(tmp_path, np.zeros((2, 0), np.int64), [IDS])


def test_no_samples(tmp_path) -> None:
    with pytest.raises(InputError, match=r"the data for 'x' have no samples \(shape \(0, 3\)\)"):
        _npy(tmp_path, np.zeros((0, 3), np.float32))


def test_npy_for_several_inputs(tmp_path) -> None:
    with pytest.raises(InputError, match="holds one array, and the model has 2 inputs") as caught:
        _npy(tmp_path, np.zeros((2, 3)), [IDS, MASK])
    assert caught.value.remedy == "give an .npz with one array per input: np.savez(path, ids=..., mask=...)"


def test_npz_names(tmp_path) -> None:
    ids, mask = np.zeros((2, 3), np.int64), np.zeros((2, 3), np.float32)
    with pytest.raises(InputError, match="data for 'masks', which is no input of the model; did you mean 'mask'"):
        _npz(tmp_path, ids=ids, masks=mask)
    with pytest.raises(InputError, match="no data for the input 'mask'; the model has ids, mask, the data ids"):
        _npz(tmp_path, ids=ids)
    np.savez(tmp_path / "y.npz", ids)
    with pytest.raises(InputError, match="'arr_0', which is no input"):
        open_source(str(tmp_path / "y.npz"), [IDS], None)


def test_npz_lengths(tmp_path) -> None:
    with pytest.raises(InputError, match="'ids' has 2 samples and 'mask' has 3"):
        _npz(tmp_path, ids=np.zeros((2, 3), np.int64), mask=np.zeros((3, 3), np.float32))


@pytest.mark.parametrize("keep", [0, 40, 300])
def test_truncated_npz(tmp_path, keep: int) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((50, 3), np.float32))
    data = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(data[:keep])
    with pytest.raises(InputError, match=r"x\.npz cannot be read: .*\n.*truncated"):
        open_source(str(tmp_path / "x.npz"), [ROW], None)


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_npz_is_found_while_reading(tmp_path, compressed: bool) -> None:
    array = RNG.standard_normal((500, 3)).astype(np.float32)
    _npz(tmp_path, [ROW], compressed=compressed, x=array)
    data = bytearray((tmp_path / "x.npz").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0x15 for byte in data[middle : middle + 8])
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(InputError, match=r"x\.npz"):
        list(open_source(str(tmp_path / "x.npz"), [ROW], None).read(everything))


def _write_member(tmp_path, data: bytes) -> str:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", data)
    return str(tmp_path / "x.npz")


@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_array_of_another_size_than_its_header_says(tmp_path, order: str) -> None:
    np.save(tmp_path / "x.npy", np.zeros((50, 3), np.float32, order=order))
    data = (tmp_path / "x.npy").read_bytes()
    with pytest.raises(InputError, match=r"x.npy is said to have the shape \(50, 3\), which is 600 bytes, and has 580"):
        open_source(_write_member(tmp_path, data[:-20]), [ROW], None)
    # A damaged header must not be believed: so many samples would not even be counted in a day.
    vast = data.replace(b"(50, 3), }" + b" " * 9, b"(9999999999, 3), }" + b" ")
    with pytest.raises(InputError, match="and has 600"):
        open_source(_write_member(tmp_path, vast), [ROW], None)


def test_npz_that_becomes_shorter_after_it_was_opened(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((50, 3), np.float32))
    data = (tmp_path / "x.npy").read_bytes()
    source = open_source(_write_member(tmp_path, data), [ROW], None)
    _write_member(tmp_path, data[:-20])
    for wanted in (everything, lambda number: number == 0):
        with pytest.raises(InputError, match="the array ends early"):
            list(source.read(wanted))


@pytest.mark.parametrize("keep", [0, 5, 200])
def test_truncated_npy(tmp_path, keep: int) -> None:
    np.save(tmp_path / "x.npy", np.zeros((50, 3), np.float32))
    data = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(data[:keep])
    with pytest.raises(InputError, match=r"x\.npy cannot be read"):
        open_source(str(tmp_path / "x.npy"), [ROW], None)


def test_unknown_npy_version(tmp_path) -> None:
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x09\x00" + bytes(100))
    with pytest.raises(InputError, match=r"unknown \.npy version"):
        open_source(str(tmp_path / "x.npy"), [ROW], None)


def test_input_types_that_cannot_be_fed(tmp_path) -> None:
    spec = TensorSpec(name="words", dtype="string", shape=("batch",))
    with pytest.raises(
        InputError, match="input 'words' has the type string, for which no calibration data can be read"
    ):
        _npy(tmp_path, np.zeros(3, np.float32), [spec])


def test_key_and_hash(tmp_path) -> None:
    source = _npy(tmp_path, np.zeros((2, 3), np.float32))
    key, digest = source.key(), source.sha256()
    other = _npy(tmp_path, np.ones((4, 3), np.float32))
    assert key != other.key()
    assert digest != other.sha256()
    assert other.describe() == f"4 samples in {tmp_path}/x.npy"
    assert other.dependencies == ()
