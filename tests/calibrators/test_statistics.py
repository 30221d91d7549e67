"""The statistic: exact whatever the split, order, merge tree, type or range of the values; and its file."""

from __future__ import annotations

import itertools
import math
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrators import TensorStatistics, load_statistics, save_statistics
from calibrators.accumulate import BatchAccumulator, add_batch
from calibrators.kernels import BLOCK
from calibrators.statistics import BINS, MIN_EXPONENT, PERCENTILES
from pipeline.core.errors import InputError

Array = np.ndarray

float32s = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 1e-30, 1e30, 3.4028235e38, 1.0, -2.0, 0.5]),
)
values32 = hnp.arrays(np.float32, st.integers(0, 60), elements=float32s)
values16 = hnp.arrays(
    np.float16, st.integers(0, 60), elements=st.floats(width=16, allow_nan=False, allow_infinity=False)
)
any_values = st.one_of(values32, values16)


def of(*batches: Array, start: int = 0) -> TensorStatistics:
    statistics = TensorStatistics()
    for index, batch in enumerate(batches, start):
        add_batch(statistics, batch, index)
    return statistics


def by_definition(x: Array) -> tuple[int, Array]:
    """Width exponent and bins, in exact arithmetic on Python's terms: the slow way."""
    magnitudes = np.abs(x.astype(np.float64))
    amax = float(magnitudes.max(initial=0.0))
    exponent = MIN_EXPONENT
    while amax >= BINS * 2.0**exponent:
        exponent += 1
    return exponent, np.bincount(np.floor(magnitudes / 2.0**exponent).astype(np.int64), minlength=BINS)


def values_only(statistics: TensorStatistics) -> tuple[object, ...]:
    """Everything that may not depend on how the values were cut into batches."""
    return (
        statistics.bins.tobytes(),
        statistics.exponent,
        statistics.minimum,
        statistics.maximum,
        statistics.elements,
        statistics.zeros,
        statistics.nans,
        statistics.infs,
    )


@settings(max_examples=150, deadline=None)
@given(any_values)
@example(np.array([1e-30, 1e30], np.float32))
@example(np.zeros(5, np.float32))
@example(np.full(7, 3.0, np.float32))
@example(np.zeros(0, np.float32))
@example(np.array([-4.0], np.float16))
@example(np.array([2.0**-149, -(2.0**-126)], np.float32))
@example(np.array([3.4028235e38], np.float32))
def test_histogram_is_the_definition(x: Array) -> None:
    found = of(x)
    exponent, bins = by_definition(x)
    assert (found.exponent, found.elements, found.zeros) == (exponent, x.size, int((x == 0).sum()))
    np.testing.assert_array_equal(found.bins, bins)
    if x.size:
        assert (found.minimum, found.maximum) == (float(x.min()), float(x.max()))
        assert found.amax == float(np.abs(x.astype(np.float64)).max())


@settings(max_examples=150, deadline=None)
@given(any_values, st.data())
def test_values_do_not_remember_their_batches(x: Array, data: st.DataObject) -> None:
    shuffled = x[data.draw(st.permutations(range(x.size)))] if x.size else x
    cuts = sorted(data.draw(st.lists(st.integers(0, x.size), max_size=5)))
    pieces = np.split(shuffled, cuts)
    assert values_only(of(*pieces)) == values_only(of(x))


@settings(max_examples=100, deadline=None)
@given(st.lists(any_values, min_size=1, max_size=6), st.data())
def test_any_merge_tree_gives_the_same_bits(batches: list[Array], data: st.DataObject) -> None:
    whole = of(*batches)
    parts = [of(batch, start=index) for index, batch in enumerate(batches)]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 1))
        first = parts.pop(i)
        j = data.draw(st.integers(0, len(parts) - 1))
        parts[j] = first.merge(parts[j]) if data.draw(st.booleans()) else parts[j].merge(first)
    assert parts[0] == whole


@settings(max_examples=100, deadline=None)
@given(values32, values32, values32)
def test_merge_is_commutative_and_associative_with_a_neutral_element(x: Array, y: Array, z: Array) -> None:
    a, b, c = of(x, start=0), of(y, start=1), of(z, start=2)
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(TensorStatistics()) == a == TensorStatistics().merge(a)


def test_merge_leaves_its_operands_alone() -> None:
    a, b = of(np.array([1.0], np.float32)), of(np.array([1e6], np.float32), start=1)
    before = (of(np.array([1.0], np.float32)), of(np.array([1e6], np.float32), start=1))
    a.merge(b)
    assert (a, b) == before


@settings(max_examples=100, deadline=None)
@given(st.lists(values32, min_size=1, max_size=4))
def test_batch_sequences_depend_on_the_batch_alone(batches: list[Array]) -> None:
    whole = of(*batches)
    seen = [index for index, batch in enumerate(batches) if batch.size]
    assert whole.batch_index.tolist() == seen
    for row, index in enumerate(seen):
        alone = of(batches[index], start=index)
        assert whole.batch_amax[row] == alone.batch_amax[0] == np.abs(batches[index]).max()
        np.testing.assert_array_equal(whole.batch_percentiles[row], alone.batch_percentiles[0])


@settings(max_examples=50, deadline=None)
@given(st.lists(values32, min_size=1, max_size=4), st.permutations(range(4)))
def test_a_batch_in_parts_is_the_batch(parts: list[Array], order: list[int]) -> None:
    shuffled = [parts[index] for index in order if index < len(parts)]
    statistics = TensorStatistics()
    add_batch(statistics, shuffled, 0)
    assert statistics == of(np.concatenate(parts))


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("growing", [False, True])
def test_large_tensors_in_blocks(size: int, growing: bool) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    x[::3] = 0.0
    if growing:  # every block needs a wider bin than the one before
        x *= 8.0 ** (np.arange(size) // BLOCK)
    exponent, bins = by_definition(x)
    found = of(x.reshape(1, -1))
    assert found.exponent == exponent
    np.testing.assert_array_equal(found.bins, bins)


@pytest.mark.parametrize("position", [0, 5, BLOCK, 2 * BLOCK + 1])
def test_nan_and_infinity_are_counted_and_left_out(position: int) -> None:
    x = np.random.default_rng(1).standard_normal(3 * BLOCK).astype(np.float32)
    clean = np.delete(x, [position, position + 1, position + 2, position + 3])
    x[position : position + 4] = [np.nan, np.inf, -np.inf, -np.nan]
    found, expected = of(x), of(clean)
    assert (found.nans, found.infs, found.elements, found.finite) == (2, 2, x.size, clean.size)
    np.testing.assert_array_equal(found.bins, expected.bins)
    assert (found.minimum, found.maximum, found.zeros) == (expected.minimum, expected.maximum, expected.zeros)


def test_only_nonfinite_values_leave_no_batch() -> None:
    found = of(np.full(9, np.nan, np.float32))
    assert (found.nans, found.finite, found.amax, found.batch_index.size) == (9, 0, 0.0, 0)


def test_float64_is_rounded_and_its_overflow_counts_as_infinite() -> None:
    found = of(np.array([1e300, 0.1]))
    assert (found.infs, found.maximum) == (1, float(np.float32(0.1)))


def test_arrays_that_are_not_contiguous() -> None:
    x = np.random.default_rng(2).standard_normal((40, 50)).astype(np.float32)
    assert values_only(of(x.T)) == values_only(of(x))
    assert values_only(of(x[:, ::2])) == values_only(of(x[:, ::2].copy()))


@pytest.mark.parametrize("percentile", [*PERCENTILES, 50.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_within_a_bin_of_the_exact_ones(percentile: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = [
        random.standard_normal(50_000),
        random.exponential(3.0, 50_000),
        np.maximum(random.standard_normal(50_000), 0),
    ][seed]
    found = of(x.astype(np.float32))
    exact = float(np.percentile(np.abs(x.astype(np.float32)), percentile, method="inverted_cdf"))
    assert abs(found.percentile(percentile) - exact) <= found.width
    assert found.percentile(100.0) == found.amax


def test_percentile_of_nothing_is_zero() -> None:
    assert TensorStatistics().percentile(99.0) == 0.0


def test_the_same_batch_twice_is_refused() -> None:
    a = of(np.ones(3, np.float32))
    with pytest.raises(InputError, match=r"batch 0 is in both statistics \(1 such in all\)") as caught:
        add_batch(a, np.ones(3, np.float32), 0)
    assert "each batch in one pass only" in str(caught.value)
    assert a == of(np.ones(3, np.float32)), "a refused batch leaves the statistic as it was"
    with pytest.raises(InputError, match="batch 0 is in both"):
        a.merge(of(np.ones(3, np.float32)))


def test_integers_and_negative_indices_are_refused() -> None:
    with pytest.raises(InputError, match="need float16, float32 or float64 values, got int64"):
        add_batch(TensorStatistics(), np.arange(3), 0)
    with pytest.raises(InputError, match="batch index -1 is negative"):
        BatchAccumulator().statistics(-1)


def test_a_statistic_is_not_hashable_and_differs_from_other_things() -> None:
    assert TensorStatistics() != "statistics"
    with pytest.raises(TypeError):
        hash(TensorStatistics())


# --- the file


def some() -> dict[str, TensorStatistics]:
    random = np.random.default_rng(3)
    return {
        "b/relu": of(*(random.standard_normal((4, 5)).astype(np.float32) for _ in range(3))),
        "a: ü [1]": of(np.array([1e-30, 1e30], np.float32)),
        "empty": TensorStatistics(),
    }


def test_file_round_trip(tmp_path: Path) -> None:
    save_statistics(tmp_path / "c.npz", some(), {"samples": 12})
    loaded, meta = load_statistics(tmp_path / "c.npz")
    assert loaded == some()
    assert meta == {"samples": 12}


def test_equal_statistics_give_equal_bytes(tmp_path: Path) -> None:
    files = []
    for number, names in enumerate(itertools.permutations(some())):
        statistics = some()
        files.append(tmp_path / f"{number}.npz")
        save_statistics(
            files[-1],
            {name: statistics[name] for name in names},
            {"b": 1, "a": [2]} if number % 2 else {"a": [2], "b": 1},
        )
    assert len({file.read_bytes() for file in files}) == 1


def test_no_statistic_at_all(tmp_path: Path) -> None:
    save_statistics(tmp_path / "c.npz", {}, {})
    assert load_statistics(tmp_path / "c.npz") == ({}, {})


def test_a_loaded_statistic_can_go_on(tmp_path: Path) -> None:
    first, second = np.array([1.0, 2.0], np.float32), np.array([300.0], np.float32)
    save_statistics(tmp_path / "c.npz", {"x": of(first)}, {})
    loaded = load_statistics(tmp_path / "c.npz")[0]["x"]
    add_batch(loaded, second, 1)
    assert loaded == of(first, second)


@pytest.mark.parametrize("keep", [0, 10, 1000, -1, -30])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "c.npz"
    save_statistics(path, some(), {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="is not a calibration file, or it is truncated"):
        load_statistics(path)


def test_every_damaged_byte_in_the_bins_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    save_statistics(path, some(), {})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="is not a calibration file, or it is truncated"):
        load_statistics(path)


def test_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_statistics(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match="is not a calibration file, or it is truncated"):
        load_statistics(tmp_path / "text.npz")
    np.savez(tmp_path / "data.npz", x=np.ones(3))
    with pytest.raises(InputError, match="is not a calibration file, or it is truncated"):
        load_statistics(tmp_path / "data.npz")
    np.savez(tmp_path / "header.npz", header=np.frombuffer(b'{"kind": "other"}', np.uint8))
    with pytest.raises(InputError, match=r"is an \.npz file but not a calibration file"):
        load_statistics(tmp_path / "header.npz")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", header=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match="is not a calibration file"):
        load_statistics(tmp_path / "p.npz")


def test_another_schema_and_inconsistent_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import calibrators.statistics as module

    path = tmp_path / "c.npz"
    with monkeypatch.context() as patched:
        patched.setattr(module, "SCHEMA", 99)
        save_statistics(path, some(), {})
    with pytest.raises(InputError, match="has schema 99, this version reads 1"):
        load_statistics(path)
    wrong = some()
    wrong["b/relu"].elements += 1
    save_statistics(path, wrong, {})
    with pytest.raises(InputError, match="is inconsistent: the bins of 'b/relu' hold 60 values, not 61"):
        load_statistics(path)
    short = some()
    short["b/relu"].bins = short["b/relu"].bins[:-1]
    short = {"b/relu": short["b/relu"]}
    save_statistics(path, short, {})
    with pytest.raises(InputError, match=r"is inconsistent: bins is int64 \(1, 8191\), expected int64 \(1, 8192\)"):
        load_statistics(path)


@pytest.mark.parametrize(
    ("figure", "value", "message"),
    [
        ("minimum", math.nan, "'b/relu' has values from nan to"),
        ("maximum", math.inf, "to inf, its bins go to"),
        ("maximum", 1e300, r"to 1e\+300, its bins go to"),
        ("minimum", 1e30, r"'b/relu' has values from 1e\+30 to"),
        ("batch_index", -1, "the batch numbers of 'b/relu' do not rise from 0 on"),
        ("batch_index", 7, "the batch numbers of 'b/relu' do not rise from 0 on"),
        ("batch_amax", math.nan, "a greatest value of a batch of 'b/relu' is nan"),
        ("batch_amax", -1.0, "a greatest value of a batch of 'b/relu' is -1"),
        ("batch_percentiles", math.inf, "a percentile of a batch of 'b/relu' is inf"),
    ],
)
def test_figures_that_no_pass_gives(tmp_path: Path, figure: str, value: float, message: str) -> None:
    """They went on into the scales, and ended as errors of the program, or in no error."""
    statistics = some()
    found = statistics["b/relu"]
    if isinstance(getattr(found, figure), float):
        setattr(found, figure, value)
    else:
        for name in ("batch_index", "batch_amax", "batch_percentiles"):
            array = getattr(found, name)
            setattr(found, name, np.concatenate([array, array]) if len(array) == 1 else array)
        if figure != "batch_index":
            found.batch_index = np.arange(len(found.batch_index))
        getattr(found, figure)[:] = value
    save_statistics(tmp_path / "c.npz", statistics, {})
    with pytest.raises(InputError, match=f"c.npz is inconsistent: .*{message}"):
        load_statistics(tmp_path / "c.npz")


def test_merging_many_shards_in_sequence_and_in_pairs() -> None:
    random = np.random.default_rng(5)
    shards = [of(random.standard_normal(100).astype(np.float32) * 2.0 ** (i % 7), start=i) for i in range(64)]
    in_sequence = reduce(TensorStatistics.merge, shards)
    while len(shards) > 1:
        shards = [a.merge(b) for a, b in zip(shards[::2], shards[1::2], strict=True)]
    assert shards[0] == in_sequence


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    from calibrators import kernels

    njit = numba.njit

    def without_a_cache(**options: object) -> object:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", without_a_cache)
    assert kernels.compiled(lambda x: x + 1)(2) == 3
