"""Every calibrator by its formula, its defaults, its errors; the registry; degenerate tensors."""

from __future__ import annotations

import math
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import calibrators
from calibrators import TensorStatistics, registry, resolve_amax, scale_of
from calibrators.accumulate import add_batch
from calibrators.divergence import divergences
from calibrators.entropy import CANDIDATE_BINS, LOG2_LEVELS, least_divergence, resampled, spread_over_levels
from calibrators.legacy import regression_cutoff
from calibrators.mse import squared_error
from calibrators.ranges import DEFAULT_AMAX, SMALLEST_AMAX
from calibrators.statistics import PERCENTILES
from pipeline.core.errors import InputError

Array = np.ndarray
RANDOM = np.random.default_rng(11)
DATA = {
    "normal": RANDOM.standard_normal(200_000),
    "relu": np.maximum(RANDOM.standard_normal(200_000), 0.0),
    "relu6": np.clip(3.0 * RANDOM.standard_normal(200_000), 0.0, 6.0),
    "laplace": RANDOM.laplace(size=200_000),
    "outlier": np.append(RANDOM.standard_normal(200_000), 40.0),
    "heavy tail": RANDOM.standard_t(3, 200_000),
    "tiny": 1e-30 * RANDOM.standard_normal(200_000),
    "few": RANDOM.standard_normal(20),
}


def of(*batches: Array) -> TensorStatistics:
    statistics = TensorStatistics()
    for index, batch in enumerate(batches):
        add_batch(statistics, np.asarray(batch, np.float32), index)
    return statistics


def split(name: str) -> TensorStatistics:
    return of(*np.array_split(DATA[name], 8))


# --- all of them


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
@pytest.mark.parametrize("data", sorted(DATA))
def test_range_is_positive_and_at_most_the_maximum(name: str, data: str) -> None:
    stats = split(data)
    amax = calibrators.get(name).amax(stats)
    assert 0.0 < amax <= stats.amax


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**50])
def test_range_scales_with_the_data(name: str, factor: float) -> None:
    calibrator = calibrators.get(name)
    scaled = of(*(factor * part for part in np.array_split(DATA["laplace"], 8)))
    assert calibrator.amax(scaled) == pytest.approx(factor * calibrator.amax(split("laplace")), rel=1e-12)


@pytest.mark.parametrize("name", sorted(set(registry.BUILT_IN) - {"ema", "ema-percentile"}))
def test_range_does_not_depend_on_the_batches(name: str) -> None:
    calibrator = calibrators.get(name)
    x = DATA["heavy tail"]
    assert (
        calibrator.amax(of(x))
        == calibrator.amax(of(*np.array_split(x[::-1], 5)))
        == calibrator.amax(split("heavy tail"))
    )


# --- one by one


def test_minmax() -> None:
    assert calibrators.get("minmax").amax(of([-3.0, 2.0], [1.0])) == 3.0


def test_ema_by_hand() -> None:
    batches = of([10.0], [20.0], [-30.0])
    assert calibrators.get("ema").amax(batches) == pytest.approx(0.9 * (0.9 * 10 + 0.1 * 20) + 0.1 * 30)
    assert calibrators.get("ema", {"alpha": 0.5}).amax(batches) == 0.5 * (0.5 * 10 + 0.5 * 20) + 0.5 * 30


def test_moving_averages_follow_the_global_index_and_not_the_order_of_arrival() -> None:
    late, early = TensorStatistics(), TensorStatistics()
    add_batch(late, np.array([30.0], np.float32), 7)
    add_batch(early, np.array([10.0], np.float32), 2)
    for name in ("ema", "ema-percentile"):
        ordered = calibrators.get(name).amax(early.merge(late))
        assert ordered == calibrators.get(name).amax(late.merge(early)) < 15.0


def test_moving_averages_pass_over_batches_without_a_value() -> None:
    assert calibrators.get("ema").amax(of([], [10.0])) == 10.0


def test_percentile_is_interpolated_in_the_bin() -> None:
    stats = of(np.linspace(0.0, 1.0, 100_001))
    for percentile in (50.0, 99.9, 99.99):
        assert calibrators.get("percentile", {"percentile": percentile}).amax(stats) == pytest.approx(
            percentile / 100, abs=2e-5
        )
    assert calibrators.get("percentile", {"percentile": 100.0}).amax(stats) == 1.0


def test_ema_percentile_by_hand() -> None:
    parts = [DATA["normal"][:1000], 3.0 * DATA["normal"][1000:2000]]
    stats = of(*parts)
    for percentile in PERCENTILES:
        first, second = (of(part).percentile(percentile) for part in parts)
        found = calibrators.get("ema-percentile", {"percentile": percentile, "decay": 0.75}).amax(stats)
        assert found == pytest.approx(0.75 * first + 0.25 * second)
    assert calibrators.get("ema-percentile", {"percentile": 100}).amax(stats) == pytest.approx(
        calibrators.get("ema", {"alpha": 0.95}).amax(stats)
    )


def test_spread_over_levels_is_the_slides_example() -> None:
    assert spread_over_levels(np.array([1.0, 0, 2, 3, 5, 3, 1, 7]), 2).tolist() == [2, 0, 2, 2, 4, 4, 4, 4]


def kullback_leibler(counts: Array, kept: int, levels: int) -> float:
    """The slides' procedure, bin by bin."""
    p = counts[:kept].copy()
    p[-1] += counts[kept:].sum()
    q = spread_over_levels(counts[:kept], levels)
    if q.sum() == 0 or ((q == 0) & (p > 0)).any():
        return math.inf
    p, q = p / p.sum(), q / q.sum()
    used = p > 0
    return float((p[used] * np.log(p[used] / q[used])).sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.integers(0, 40), st.floats(0.0, 0.9))
def test_divergences_are_the_slides_procedure(seed: int, log2_levels: int, extra: int, empty: float) -> None:
    random = np.random.default_rng(seed)
    levels = 1 << log2_levels
    counts = random.integers(1, 10 ** random.integers(1, 12), levels + extra).astype(np.float64)
    counts[random.random(counts.size) < empty] = 0.0
    if not counts.any():
        counts[0] = 1.0
    expected = [kullback_leibler(counts, kept, levels) for kept in range(levels, counts.size + 1)]
    np.testing.assert_allclose(divergences(counts, log2_levels), expected, rtol=1e-9, atol=1e-11)


def test_divergences_of_the_slides_example() -> None:
    counts = np.array([1.0, 0, 2, 3, 5, 3, 1, 7])
    p, q = counts / 22, np.array([2.0, 0, 2, 2, 4, 4, 4, 4]) / 22
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
    assert divergences(counts, 1)[-1] == pytest.approx(expected)


def test_entropy_ties_go_to_the_largest_threshold() -> None:
    counts = np.zeros(CANDIDATE_BINS)
    counts[:128] = 5.0  # one bin per level for every kept number up to here, nothing outside: divergence 0
    counts[-1] = 0.0
    divergence = divergences(counts, LOG2_LEVELS)
    ties = np.flatnonzero(divergence == divergence.min())
    assert ties.size > 1
    assert least_divergence(counts) == 128 + ties[-1]


def test_entropy_clips_an_outlier_and_keeps_a_heap_at_the_end() -> None:
    entropy = calibrators.get("entropy")
    assert entropy.amax(split("outlier")) < 6.0
    assert entropy.amax(split("relu6")) == 6.0


def test_entropy_does_not_mind_zeros() -> None:
    entropy = calibrators.get("entropy")
    half = np.abs(DATA["laplace"])
    assert entropy.amax(of(np.concatenate([half, np.zeros(half.size)]))) == entropy.amax(of(half))


def test_entropy_with_tensorrt_range_depends_on_the_first_batch() -> None:
    x = DATA["laplace"]
    first = x[np.abs(x) < 3.0][:1000]
    as_tensorrt = calibrators.get("entropy", {"tensorrt_range": 1})
    stats = of(first, x)
    limit = float(stats.batch_amax[0]) * 2.0 ** math.ceil(math.log2(stats.amax / float(stats.batch_amax[0])))
    assert limit > stats.amax
    step = as_tensorrt.amax(stats) / limit * CANDIDATE_BINS
    assert step == pytest.approx(round(step - 0.5) + 0.5, abs=1e-9), "the middle of one of 2048 bins over its range"


def test_entropy_of_values_in_the_zero_bin_alone() -> None:
    assert calibrators.get("entropy").amax(of([1e-9, 1.0], [2e-9])) == pytest.approx(1.0)
    lonely = of(np.full(100, 1e-9), [1e-9 * 2**11])
    assert 0.0 < calibrators.get("entropy", {"tensorrt_range": 1}).amax(lonely) <= lonely.amax


@pytest.mark.parametrize("data", sorted(DATA))
def test_resampling_keeps_the_number_of_values(data: str) -> None:
    stats = split(data)
    for limit in (stats.amax, 1.7 * stats.amax):
        counts = resampled(stats.bins, stats.width, stats.amax, limit)
        assert counts.shape == (CANDIDATE_BINS,)
        assert counts.sum() == pytest.approx(stats.finite)
        assert (counts >= 0).all()


def test_resampling_puts_values_where_they_are() -> None:
    stats = split("laplace")
    counts = resampled(stats.bins, stats.width, stats.amax, stats.amax)
    direct = np.histogram(np.abs(DATA["laplace"].astype(np.float32)), CANDIDATE_BINS, (0.0, stats.amax))[0]
    np.testing.assert_allclose(np.cumsum(counts), np.cumsum(direct), atol=0.002 * stats.finite)


def quantisation_error(x: Array, amax: float) -> float:
    scale = amax / 127.0
    return float(((x - scale * np.clip(np.round(x / scale), -127, 127)) ** 2).sum())


@pytest.mark.parametrize("data", ["normal", "relu", "relu6", "laplace", "heavy tail"])
def test_squared_error_is_that_of_the_values(data: str) -> None:
    stats, x = split(data), DATA[data].astype(np.float32).astype(np.float64)
    thresholds = stats.amax * np.array([1.0, 0.7, 0.3, 0.1])
    found = squared_error(stats.bins, stats.width, thresholds, stats.zeros)
    np.testing.assert_allclose(found, [quantisation_error(x, t) for t in thresholds], rtol=0.02)


@pytest.mark.parametrize("data", ["normal", "laplace", "outlier", "heavy tail"])
def test_mse_is_the_best_of_many_thresholds(data: str) -> None:
    stats, x = split(data), DATA[data].astype(np.float32).astype(np.float64)
    amax = calibrators.get("mse").amax(stats)
    best = min(quantisation_error(x, t) for t in stats.amax * np.linspace(0.02, 1.0, 200))
    assert quantisation_error(x, amax) <= best * 1.01


def test_legacy_is_a_quantile_and_with_a_cutoff_at_most_that() -> None:
    stats = split("laplace")
    assert calibrators.get("legacy").amax(stats) == stats.percentile(99.9)
    assert calibrators.get("legacy", {"quantile": 1.0}).amax(stats) == stats.amax
    assert calibrators.get("legacy", {"quantile": 0.5, "cutoff": 0.5}).amax(stats) == stats.percentile(50.0)


def test_regression_finds_where_an_exponential_ends() -> None:
    counts = 1e6 * np.exp(-np.arange(256.0) / 10.0)
    assert regression_cutoff(counts, 0.5) == pytest.approx(10.0 * math.log(1e6) + 0.5)
    cut = calibrators.get("legacy", {"quantile": 1.0, "cutoff": 0.3}).amax(
        of(np.append(np.abs(DATA["laplace"]), 100.0))
    )
    assert 5.0 < cut < 20.0


def test_regression_without_a_falling_line_cuts_nothing() -> None:
    assert regression_cutoff(np.full(256, 9.0), 0.5) == 256.0
    assert regression_cutoff(np.array([5.0, 0.0, 0.0, 1.0]), 1.0) == 4.0


# --- parameters and names


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ema", {"alpha": 1.0}, "ema: alpha must be above 0 and below 1, got 1"),
        ("ema", {"alpha": 0.0}, "ema: alpha must be above 0 and below 1, got 0"),
        ("percentile", {"percentile": 0.0}, "percentile: percentile must be above 0 and at most 100, got 0"),
        ("percentile", {"percentile": math.nan}, "percentile must be above 0 and at most 100, got nan"),
        ("ema-percentile", {"decay": -1.0}, "ema-percentile: decay must be above 0 and below 1, got -1"),
        ("ema-percentile", {"percentile": 99.7}, "ema-percentile: percentile 99.7 is not kept per batch"),
        ("legacy", {"quantile": 1.5}, "legacy: quantile must be above 0 and at most 1, got 1.5"),
        ("legacy", {"cutoff": 0.0}, "legacy: cutoff must be above 0 and at most 1, got 0"),
        ("entropy", {"tensorrt_range": 0.5}, "entropy: tensorrt_range must be 0 or 1, got 0.5"),
        (
            "percentile",
            {"percentil": 99.0},
            "calibrator 'percentile' has no parameter 'percentil'; did you mean 'percentile'",
        ),
        ("minmax", {"alpha": 0.5}, "calibrator 'minmax' has no parameter 'alpha'; none is known"),
        ("entopy", {}, "unknown calibrator 'entopy'; did you mean 'entropy'"),
    ],
)
def test_wrong_names_and_parameters(name: str, params: dict[str, float], message: str) -> None:
    with pytest.raises(InputError) as caught:
        calibrators.get(name, params)
    assert message in str(caught.value)


def test_the_kept_percentiles_are_named() -> None:
    with pytest.raises(InputError, match=r"choose one of 90, 95, 99, 99\.5, 99\.9"):
        calibrators.get("ema-percentile", {"percentile": 50})


def test_params_are_those_in_force() -> None:
    assert calibrators.get("ema-percentile", {"decay": 0.5}).params == {"percentile": 99.99, "decay": 0.5}
    assert calibrators.get("minmax").params == {}


def test_names_are_the_built_in_ones_and_the_entry_points() -> None:
    assert set(registry.BUILT_IN) <= set(calibrators.names())
    for name in calibrators.names():
        calibrator = calibrators.get(name)
        assert isinstance(calibrator, calibrators.Calibrator)
        assert calibrator.name == name


def test_the_project_registers_its_own_calibrators() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][registry.GROUP] == dict(registry.BUILT_IN)


class Half:
    """A third party's calibrator: half the maximum, times a factor."""

    name = "half"

    def __init__(self, factor: float = 1.0) -> None:
        self.params = {"factor": factor}

    def amax(self, stats: TensorStatistics) -> float:
        return 0.5 * stats.amax * self.params["factor"]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points as if installed; ``third_party`` is an importable module."""
    import sys

    module = types.ModuleType("third_party")
    module.Half, module.number, module.Lame = Half, 3, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "third_party", module)
    points: list[EntryPoint] = []
    monkeypatch.setattr(registry, "_installed", lambda: tuple(points))
    return points


def test_a_third_partys_calibrator(plugins: list[EntryPoint]) -> None:
    plugins.append(EntryPoint("half", "third_party:Half", registry.GROUP))
    assert "half" in calibrators.names()
    assert calibrators.get("half", {"factor": 2.0}).amax(of([3.0, 1.0])) == 3.0
    with pytest.raises(InputError, match="calibrator 'half' has no parameter 'other'; known: factor"):
        calibrators.get("half", {"other": 1.0})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Half", "calibrator 'bad' (no_such_module:Half) cannot be loaded: No module named"),
        ("third_party:Missing", "calibrator 'bad' (third_party:Missing) cannot be loaded: module"),
        ("third_party:number", "calibrator 'bad' (third_party:number) is a int, not a class or function"),
        ("third_party:Lame", "calibrator 'bad' gives a object without name, params and amax()"),
    ],
)
def test_broken_third_party_calibrators(plugins: list[EntryPoint], value: str, message: str) -> None:
    plugins.append(EntryPoint("bad", value, registry.GROUP))
    with pytest.raises(InputError) as caught:
        calibrators.get("bad")
    assert message in str(caught.value)


def test_two_distributions_with_one_name(plugins: list[EntryPoint]) -> None:
    plugins.append(EntryPoint("entropy", "third_party:Half", registry.GROUP))
    with pytest.raises(InputError, match="'entropy' is claimed by calibrators\\.entropy:Entropy and third_party:Half"):
        calibrators.get("entropy")
    assert calibrators.get("minmax").name == "minmax"


# --- ranges


def test_scale_is_computed_in_float32() -> None:
    scale = scale_of(1.0)
    assert scale.dtype == np.float32
    assert scale == np.float32(1.0) / np.float32(127.0)


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
@pytest.mark.parametrize(
    ("values", "kind", "amax"),
    [
        ([], "never-seen", DEFAULT_AMAX),
        ([np.nan, np.inf], "never-seen", DEFAULT_AMAX),
        ([0.0, -0.0, 0.0], "all-zero", DEFAULT_AMAX),
        ([-2.5, -2.5], "constant", 2.5),
        ([7.0], "constant", 7.0),
        ([1e-30, -2e-30], "tiny", SMALLEST_AMAX),
        ([1e-30], "tiny", SMALLEST_AMAX),
        ([1e-45, 0.0], "tiny", SMALLEST_AMAX),
    ],
)
def test_degenerate_tensors(name: str, values: list[float], kind: str, amax: float) -> None:
    found, warning = resolve_amax(of(values), calibrators.get(name))
    assert found == amax
    assert warning is not None
    assert warning.kind == kind
    assert str(warning).startswith(f"{kind}: ")


def test_nonfinite_values_are_left_out_with_a_warning() -> None:
    amax, warning = resolve_amax(of([1.0, -3.0, np.nan, np.inf, -np.inf]), calibrators.get("minmax"))
    assert amax == 3.0
    assert str(warning) == "non-finite: 1 NaN and 2 infinite values were left out"


def test_a_percentile_of_nearly_all_zeros_falls_back_to_the_maximum() -> None:
    sparse = of(np.append(np.zeros(100_000), [1.0, 2.0]))
    amax, warning = resolve_amax(sparse, calibrators.get("percentile", {"percentile": 50.0}))
    assert 0.0 < amax <= 2.0 or warning is not None
    nothing = resolve_amax(sparse, Half(factor=0.0))
    assert nothing[0] == 2.0
    assert str(nothing[1]) == "no-range: half gives amax 0; the greatest magnitude, 2, is used"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_calibrator_that_gives_no_range(bad: float) -> None:
    amax, warning = resolve_amax(of([1.0, 2.0]), Half(factor=bad))
    assert amax == 2.0
    assert warning is not None
    assert warning.kind == "no-range"


def test_an_ordinary_tensor_has_no_warning() -> None:
    assert resolve_amax(of([1.0, 2.0]), calibrators.get("minmax")) == (2.0, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), max_size=30), st.sampled_from(sorted(registry.BUILT_IN)))
def test_the_scale_is_always_positive_normal_and_finite(values: list[float], name: str) -> None:
    amax, _ = resolve_amax(of(values), calibrators.get(name))
    scale = float(scale_of(amax))
    assert math.isfinite(scale)
    assert scale >= np.finfo(np.float32).tiny
