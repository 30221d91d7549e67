"""Figures per sample: ranks, agreement, errors, labels that do not fit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from pipeline.compare.figures import OutputFacts, SampleFigures, check_labels
from pipeline.core.errors import CheckFailed, InputError
from pipeline.errors.scores import Scores


def facts(outputs: Iterable[str], scores: Scores = "rows") -> dict[str, OutputFacts]:
    return {name: OutputFacts(scores, 0.0) for name in outputs}


def figures_of(
    outputs: dict[str, np.ndarray],
    labels: dict[int, int] | None = None,
    reference: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    collected = SampleFigures(labels, facts(outputs))
    count = len(next(iter(outputs.values())))
    for start in range(0, count, 2):  # batches of two, the last one shorter
        rows = slice(start, start + 2)
        samples = tuple(range(10 + start, 10 + min(start + 2, count)))
        part = {name: values[rows] for name, values in outputs.items()}
        expected = None if reference is None else {name: values[rows] for name, values in reference.items()}
        collected.add(samples, part, expected, None)
    return collected.arrays()


def test_top1_and_top5_follow_the_order_of_the_scores() -> None:
    scores = np.arange(8, dtype=np.float32)[None, :].repeat(5, axis=0)
    labels = dict(zip(range(10, 15), [7, 6, 3, 2, 0], strict=True))
    found = figures_of({"scores": scores}, labels)
    assert found["samples"].tolist() == [10, 11, 12, 13, 14]
    assert found["top1"].tolist() == [1, 0, 0, 0, 0]
    assert found["top5"].tolist() == [1, 1, 1, 0, 0]


def test_of_equal_scores_the_first_wins_as_argmax_has_it() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]], np.float32)
    assert figures_of({"scores": scores}, {10: 0, 11: 1})["top1"].tolist() == [1, 0]
    assert scores.argmax(axis=1).tolist() == [0, 0]


def test_top1_equals_argmax_on_random_scores() -> None:
    scores = np.random.default_rng(0).standard_normal((50, 12)).astype(np.float32)
    labels = {10 + row: int(value) for row, value in enumerate(np.random.default_rng(1).integers(0, 12, 50))}
    expected = [int(scores[row].argmax() == labels[10 + row]) for row in range(50)]
    assert figures_of({"scores": scores}, labels)["top1"].tolist() == expected


def test_the_first_output_with_class_scores_is_judged() -> None:
    features = np.zeros((2, 3, 4, 4), np.float32)
    scores = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    assert figures_of({"features": features, "scores": scores}, {10: 1, 11: 1})["top1"].tolist() == [1, 0]


def test_agreement_and_error_against_fp32() -> None:
    reference = np.array([[3.0, 4.0], [0.0, 2.0]], np.float32)
    other = np.array([[3.0, 4.0], [2.0, 0.0]], np.float32)
    found = figures_of({"scores": other}, None, {"scores": reference})
    assert found["agreement"].tolist() == [1.0, 0.0]
    assert found["relative_l2"] == pytest.approx([0.0, np.sqrt(2.0)])
    assert found["cosine"] == pytest.approx([1.0, 0.0])


def test_several_outputs_count_alike_and_integers_agree_or_not() -> None:
    reference = {"a": np.ones((2, 3, 2, 2), np.float32), "ids": np.array([[1, 2], [3, 4]], np.int64)}
    outputs = {"a": reference["a"] * np.float32(1.5), "ids": np.array([[1, 2], [3, 5]], np.int64)}
    found = figures_of(outputs, None, reference)
    assert found["relative_l2"] == pytest.approx([0.5, 0.5])
    assert found["agreement"] == pytest.approx([0.75, 0.75])


def test_outputs_of_other_shape_are_left_out() -> None:
    reference = {"boxes": np.ones((2, 7), np.float32)}
    found = SampleFigures(None, facts(reference))
    found.add((0, 1), {"boxes": np.ones((2, 5), np.float32)}, reference, None)
    assert np.isnan(found.arrays()["relative_l2"]).all()


def test_a_nan_is_named() -> None:
    reference = {"scores": np.ones((1, 2), np.float32)}
    found = {"scores": np.array([[np.nan, 1.0]], np.float32)}
    with pytest.raises(CheckFailed, match="'scores'"):
        SampleFigures(None, facts(reference)).add((4,), found, reference, None)


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        ({"f": np.zeros((2, 3, 4, 4), np.float32)}, {0: 0, 1: 0}, "no output has one row of class scores per sample"),
        ({"s": np.zeros((2, 5), np.float32)}, {0: 0}, "sample 1 has no label"),
        ({"s": np.zeros((2, 5), np.float32)}, {0: 0, 1: 5}, "sample 1 has label 5, but output 's' has 5 classes"),
        ({"s": np.zeros((2, 5), np.float32)}, {0: -1, 1: 0}, "sample 0 has label -1"),
    ],
)
def test_labels_that_do_not_fit(outputs: dict[str, np.ndarray], labels: dict[int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_labels(outputs, (0, 1), labels, facts(outputs))


def test_a_sample_of_almost_nothing_has_no_relative_error() -> None:
    reference = {"a": np.array([[1.0, 1.0], [1e-6, 0.0]], np.float32), "b": np.ones((2, 2), np.float32)}
    outputs = {"a": np.array([[2.0, 1.0], [1.0, 1.0]], np.float32), "b": np.ones((2, 2), np.float32)}
    found = SampleFigures(None, facts(reference))
    found.add((0, 1), outputs, reference, None)
    arrays = found.arrays()
    assert arrays["relative_l2"] == pytest.approx([np.sqrt(0.5) / 2, 0.0]), "of the other output alone"
    assert arrays["left_out"].tolist() == [0.0, 0.0]
    alone = SampleFigures(None, facts(["a"]))
    alone.add((0, 1), {"a": outputs["a"]}, {"a": reference["a"]}, None)
    assert np.isnan(alone.arrays()["relative_l2"]).tolist() == [False, True]
    assert np.isnan(alone.arrays()["cosine"]).tolist() == [False, True]
    assert alone.arrays()["left_out"].tolist() == [0.0, 1.0]


def test_another_shape_is_no_almost_zero() -> None:
    reference = {"boxes": np.ones((2, 7), np.float32)}
    found = SampleFigures(None, facts(reference))
    found.add((0, 1), {"boxes": np.ones((2, 5), np.float32)}, reference, None)
    assert found.arrays()["left_out"].tolist() == [0.0, 0.0]


def test_agreement_is_of_class_scores_alone() -> None:
    values = {"y": np.eye(2, dtype=np.float32)}
    found = SampleFigures(None, facts(values, "none"))
    found.add((0, 1), values, values, None)
    assert np.isnan(found.arrays()["agreement"]).all()
