"""The table and the recommendation from figures made up for the purpose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pipeline.compare.measured import Measured, chosen_score
from pipeline.compare.page import _end
from pipeline.compare.recommend import recommend
from pipeline.compare.shifts import CLEAN, Shift
from pipeline.compare.table import COLUMNS, rows, write_csv, write_parquet
from pipeline.compare.variants import expand
from pipeline.core.errors import InputError

SAMPLES = 300
EASE = np.random.default_rng(0).random(SAMPLES)
NOISE = Shift(kind="activations", strength=0.1)


def graph(label: str, top1: float, error: float, *, noisy: float | None = None, digest: str | None = None) -> Measured:
    """Right on the easiest share ``top1`` of the samples; with relative error ``error``."""
    (variant,) = expand(["minmax"])
    item = Measured(label=label, graph=digest or label, calibration_samples=64, variant=variant, clipping_share=0.001)
    item.add(CLEAN, figures(top1, error))
    if noisy is not None:
        for draw in (0, 1):
            item.add(Shift(kind="activations", strength=0.1, draw=draw), figures(noisy, 2 * error))
    return item


def figures(top1: float, error: float) -> dict[str, np.ndarray]:
    return {
        "samples": np.arange(SAMPLES),
        "top1": (top1 > EASE).astype(float),
        "top5": np.ones(SAMPLES),
        "relative_l2": np.full(SAMPLES, error),
        "cosine": np.full(SAMPLES, 1 - error),
        "agreement": np.ones(SAMPLES),
    }


def fp32() -> Measured:
    item = Measured(label="fp32", graph="float")
    for shift in (CLEAN, NOISE, Shift(kind="activations", strength=0.1, draw=1)):
        item.add(shift, {"samples": np.arange(SAMPLES), "top1": (EASE < 0.8).astype(float), "top5": np.ones(SAMPLES)})
    return item


def advice(*measured: Measured):  # type: ignore[no-untyped-def]
    return recommend(measured, chosen_score(measured), seed=0)


def test_a_clear_winner_is_taken() -> None:
    found = advice(graph("a", 0.60, 0.1), graph("b", 0.80, 0.2), graph("c", 0.61, 0.1))
    assert found.calibrator == found.best == "b"
    assert found.alike == ("b",)
    assert all(item.told_apart for item in found.comparisons)
    assert "can be told from every other" in found.reasons[0]


def test_among_those_alike_the_least_error_decides_and_it_is_said() -> None:
    found = advice(graph("a", 0.800, 0.2), graph("b", 0.796, 0.05), graph("c", 0.5, 0.01))
    assert found.best == "a"
    assert found.calibrator == "b"
    assert found.alike == ("a", "b")
    assert "cannot be told apart from b" in found.reasons[0]
    assert "b has the least error at the outputs among them (relative L2 0.05)" in found.reasons[1]
    assert "differences below about" in found.reasons[2]


def test_shifts_decide_before_the_error_does() -> None:
    found = advice(graph("a", 0.8, 0.01, noisy=0.5), graph("b", 0.8, 0.2, noisy=0.7))
    assert found.calibrator == "b"
    assert "b does best under the shifts" in found.reasons[1]
    assert "measurably worse there: a" in found.reasons[1]


def test_shifts_that_tell_nothing_leave_the_decision_to_the_error() -> None:
    found = advice(graph("a", 0.8, 0.2, noisy=0.7), graph("b", 0.8, 0.1, noisy=0.68))
    assert found.calibrator == "b"
    assert "not by a difference that can be told" in found.reasons[1]


def test_the_same_graph_is_marked() -> None:
    found = advice(graph("a", 0.8, 0.1, digest="x"), graph("b", 0.8, 0.1, digest="x"))
    assert [(item.calibrator, item.same_graph, item.difference) for item in found.comparisons] == [("b", True, 0.0)]


def test_calibrators_of_equal_score_are_named_together() -> None:
    """None of them has the best score alone, and each tie is said as one."""
    found = advice(graph("a", 0.8, 0.2), graph("b", 0.8, 0.05), graph("c", 0.796, 0.3), graph("d", 0.5, 0.01))
    assert found.best == "a"
    assert found.calibrator == "b"
    text = "a and b have the best top-1, 73.67 % on 300 samples, both exactly so, but cannot be told apart from c."
    assert found.reasons[0] == text
    assert [item.tied for item in found.comparisons] == [True, False, False]
    two = advice(graph("a", 0.8, 0.2), graph("b", 0.8, 0.05), graph("d", 0.5, 0.01))
    assert two.reasons[0].endswith("both exactly so, and can be told from every other.")


def test_when_all_are_equal_nothing_is_claimed() -> None:
    found = advice(*(graph(label, 0.8, 0.1, noisy=0.7) for label in "abc"))
    assert found.calibrator == "a"
    assert found.reasons[0] == "a, b and c have exactly the same top-1, 73.67 % on 300 samples."
    assert found.reasons[1] == "Under the shifts they are exactly alike (62.67 %)."
    assert found.reasons[2] == (
        "a, b and c have the same error at the outputs (relative L2 0.1); a is the first of them."
    )
    assert len(found.reasons) == 3  # no difference was seen, so that none is named as too small to tell


def test_the_same_graph_under_two_names_is_said_to_be_one() -> None:
    found = advice(graph("a", 0.8, 0.1, digest="x"), graph("b", 0.8, 0.1, digest="x"), graph("c", 0.797, 0.3))
    assert "a and b have the best top-1, 73.67 % on 300 samples, both by the same graph, but" in found.reasons[0]
    both = advice(graph("a", 0.8, 0.1, digest="x"), graph("b", 0.8, 0.1, digest="x"))
    assert both.reasons[0] == "a and b give the same graph: top-1 73.67 % on 300 samples."
    assert "a and b are the same graph (relative L2 0.1); a is the first of them." in found.reasons


def test_ties_under_the_shifts() -> None:
    found = advice(
        graph("a", 0.8, 0.3, noisy=0.7), graph("b", 0.8, 0.2, noisy=0.7), graph("c", 0.8, 0.1, noisy=0.4)
    )
    assert found.calibrator == "b"
    assert found.reasons[1].startswith("Of these a and b do best under the shifts (")
    assert "measurably worse there: c" in found.reasons[1]


def test_the_least_output_error_is_no_best_one() -> None:
    items = []
    for label, error in (("a", 0.1), ("b", 0.2)):
        items.append(Measured(label=label, graph=label))
        items[-1].add(CLEAN, {name: v for name, v in figures(0.8, error).items() if name in ("relative_l2", "cosine")})
    assert "a has the least output error, 0.1 on 300 samples" in advice(*items).reasons[0]


def test_one_calibrator_alone() -> None:
    found = advice(graph("a", 0.8, 0.1))
    assert found.calibrator == "a"
    assert found.comparisons == ()
    assert found.resolution is None
    assert "it is the only one" in found.reasons[0]


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [((), "top1"), (("top1",), "agreement"), (("top1", "agreement"), "relative_l2")],
)
def test_the_score_is_the_first_figure_there_is(left_out: tuple[str, ...], expected: str) -> None:
    item = Measured(label="a", graph="a")
    item.add(CLEAN, {name: values for name, values in figures(0.8, 0.1).items() if name not in left_out})
    assert chosen_score([item]).figure == expected
    item.add(CLEAN, {**figures(0.8, 0.1), "metric": np.ones(SAMPLES)})


def test_a_metric_comes_first_and_nan_figures_do_not_count() -> None:
    item = Measured(label="a", graph="a")
    item.add(CLEAN, {**figures(0.8, 0.1), "metric": np.linspace(0, 1, SAMPLES)})
    assert chosen_score([item]).figure == "metric"
    other = Measured(label="b", graph="b")
    other.add(CLEAN, {"agreement": np.full(SAMPLES, np.nan), "relative_l2": np.ones(SAMPLES)})
    assert chosen_score([other]).figure == "relative_l2"


def test_outputs_that_cannot_be_compared_need_a_metric() -> None:
    item = Measured(label="a", graph="a")
    item.add(CLEAN, {"agreement": np.full(SAMPLES, np.nan), "relative_l2": np.full(SAMPLES, np.nan)})
    with pytest.raises(InputError, match="the outputs of FP32 and INT8 cannot be compared"):
        chosen_score([item])


def table() -> list[dict[str, object]]:
    measured = [graph("a", 0.78, 0.1, noisy=0.6), graph("b", 0.8, 0.0)]
    measured[0].layers = np.array([0.1, 0.3])
    return rows(fp32(), measured, chosen_score(measured), ["l1", "l2"], samples=SAMPLES, seed=0)


def test_a_row_for_every_graph_and_shift() -> None:
    found = table()
    assert [(row["calibrator"], row["shift"], row["strength"], row["draws"]) for row in found] == [
        ("fp32", "none", 0.0, 1),
        ("fp32", "activations", 0.1, 2),
        ("a", "none", 0.0, 1),
        ("a", "activations", 0.1, 2),
        ("b", "none", 0.0, 1),
    ]
    assert all(tuple(row) == COLUMNS for row in found)


def test_drops_against_clean_and_shifted_fp32() -> None:
    clean, noisy = table()[2:4]
    top1 = {share: float((share > EASE).mean()) for share in (0.6, 0.78, 0.8)}
    assert clean["drop_from_clean"] == pytest.approx(top1[0.8] - top1[0.78])
    assert noisy["drop_from_clean"] == pytest.approx(top1[0.8] - top1[0.6])
    assert noisy["drop_from_shifted"] == pytest.approx(top1[0.8] - top1[0.6])
    assert noisy["drop_from_clean_low"] < noisy["drop_from_clean"] < noisy["drop_from_clean_high"]
    assert clean["sqnr_db"] == pytest.approx(20.0)
    assert (clean["worst_layer"], clean["worst_layer_relative_l2"]) == ("l2", 0.3)
    assert noisy["worst_layer"] is None


def test_no_error_at_all_has_no_decibels() -> None:
    assert table()[4]["relative_l2"] == 0.0
    assert table()[4]["sqnr_db"] is None


def test_without_labels_drops_are_against_shifted_fp32_alone() -> None:
    reference = Measured(label="fp32", graph="float")
    reference.add(CLEAN, {"samples": np.arange(SAMPLES)})
    item = Measured(label="a", graph="a", variant=expand(["mse"])[0])
    item.add(CLEAN, {name: values for name, values in figures(0.8, 0.1).items() if name not in ("top1", "top5")})
    found = rows(reference, [item], chosen_score([item]), [], samples=SAMPLES, seed=0)
    assert found[0]["drop_from_shifted"] is None
    assert found[1]["drop_from_clean"] is None
    assert found[1]["drop_from_shifted"] == 0.0


def test_the_files_hold_the_same_table(tmp_path: Path) -> None:
    found = table()
    write_csv(tmp_path / "t.csv", found)
    write_parquet(tmp_path / "t.parquet", found)
    parquet = pd.read_parquet(tmp_path / "t.parquet")
    csv = pd.read_csv(tmp_path / "t.csv")
    assert list(parquet.columns) == list(csv.columns) == list(COLUMNS)
    for column in ("top1", "drop_from_clean_low", "sqnr_db", "strength"):
        expected = np.array([np.nan if row[column] is None else row[column] for row in found], float)
        assert np.array_equal(parquet[column].to_numpy(float), expected, equal_nan=True)
        assert np.array_equal(csv[column].to_numpy(float), expected, equal_nan=True)
    assert parquet["calibration_samples"].dropna().tolist() == [64, 64, 64]


@pytest.mark.parametrize(
    ("name", "text"), [("/a/Conv", "/a/Conv"), ("x" * 40, "x" * 40), ("/first" + "y" * 39, "…" + "y" * 39)]
)
def test_the_end_of_a_long_name_says_that_it_is_one(name: str, text: str) -> None:
    assert _end(name) == text
