"""What one evaluation says about each sample: right or wrong, agreement with FP32, error of the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.errors.doubtful import almost_zero, known_range
from pipeline.errors.metrics import PEAK
from pipeline.errors.scores import class_scores, judged_output, score_kinds, scores_of
from pipeline.errors.streaming import compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.errors.graphs import Graph
    from pipeline.errors.scores import Scores

__all__ = [
    "AGREEMENT",
    "COSINE",
    "LEFT_OUT",
    "METRIC",
    "RELATIVE_L2",
    "TOP1",
    "TOP5",
    "OutputFacts",
    "SampleFigures",
    "check_labels",
    "facts_of",
    "mean_of_known",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

TOP1: Final = "top1"
TOP5: Final = "top5"
METRIC: Final = "metric"
AGREEMENT: Final = "agreement"
RELATIVE_L2: Final = "relative_l2"
COSINE: Final = "cosine"
LEFT_OUT: Final = "left_out"
"""1 where FP32 is almost zero in every output that can be compared, so that relative figures say nothing; else 0."""


@dataclass(frozen=True)
class OutputFacts:
    """What the float graph says of one output."""

    scores: Scores
    """Of classes (:func:`pipeline.errors.scores.score_kinds`)."""
    at_least: float
    """Its range is so large (:func:`pipeline.errors.doubtful.known_range`)."""


def facts_of(graph: Graph, *, labelled: bool) -> dict[str, OutputFacts]:
    """By output, in the graph's order."""
    kinds = score_kinds(graph, labelled=labelled)
    return {name: OutputFacts(kind, known_range(graph, name)) for name, kind in kinds.items()}


def check_labels(
    outputs: Mapping[str, Array],
    samples: Sequence[int],
    labels: Mapping[int, int],
    facts: Mapping[str, OutputFacts],
) -> Array:
    """The judged output's class scores, (samples, classes), which labels have to fit.

    Raises:
        InputError: no output has class scores, a sample has no label, or a label is no class of the model.
    """
    name = judged_output({key: fact.scores for key, fact in facts.items()}, outputs, len(samples))
    scores = None if name is None else class_scores(outputs[name], len(samples))
    if scores is None:
        shapes = ", ".join(f"{key!r} {values.shape}" for key, values in outputs.items())
        raise InputError(
            f"labels are given, but no output has one row of class scores per sample: {shapes}",
            remedy="leave --labels out for this model, or give a --metric",
        )
    classes = scores.shape[2]
    for sample in samples:
        label = labels.get(sample)
        if label is None:
            raise InputError(
                f"sample {sample} has no label", remedy="give --labels a row for every sample, or leave --labels out"
            )
        if not 0 <= label < classes:
            raise InputError(
                f"sample {sample} has label {label}, but output {name!r} has {classes} classes (0 to {classes - 1})",
                remedy="the labels belong to another model or count from 1",
            )
    return scores[:, 0]


class SampleFigures:
    """Collects one number per sample and figure over the batches of an evaluation."""

    def __init__(self, labels: Mapping[int, int] | None, facts: Mapping[str, OutputFacts]) -> None:
        self._labels = labels
        self._facts = dict(facts)
        self._by_output: dict[str, dict[str, list[Array]]] = {}
        self._columns: dict[str, list[Array]] = {}
        self._samples: list[int] = []

    def add(
        self,
        samples: Sequence[int],
        outputs: Mapping[str, Array],
        reference: Mapping[str, Array] | None,
        metric: Array | None,
    ) -> None:
        """Take in one batch; ``reference`` are FP32's outputs for it under the same shift."""
        self._samples.extend(samples)
        if self._labels is not None:
            ranks = _ranks(check_labels(outputs, samples, self._labels, self._facts), samples, self._labels)
            self._append(TOP1, ranks < 1)
            self._append(TOP5, ranks < 5)
        if metric is not None:
            self._append(METRIC, metric)
        if reference is not None:
            self._compare(samples, outputs, reference)

    def _compare(self, samples: Sequence[int], outputs: Mapping[str, Array], reference: Mapping[str, Array]) -> None:
        agreement = []
        for name, expected in reference.items():
            found = outputs[name]
            columns = self._by_output.setdefault(name, {RELATIVE_L2: [], COSINE: [], PEAK: []})
            none = np.full(len(samples), np.nan)
            if found.shape != expected.shape or expected.dtype.kind in "iub":
                for values in columns.values():
                    values.append(none)
                if found.shape == expected.shape:
                    agreement.append(np.full(len(samples), float((expected == found).mean())))
                continue  # another shape: such as the boxes left after a threshold, whose number depends on the values
            sums = compared(name, expected, found, samples)
            for figure, values in columns.items():
                values.append(sums.metric(figure))
            kind = self._facts[name].scores
            scores, other = (scores_of(kind, values, len(samples)) for values in (expected, found))
            if scores is not None and other is not None:
                agreement.append((scores.argmax(axis=2) == other.argmax(axis=2)).mean(axis=1))
        self._append(AGREEMENT, np.mean(agreement, axis=0) if agreement else np.full(len(samples), np.nan))

    def _relative(self) -> dict[str, Array]:
        """Mean over the outputs in which FP32 is not almost zero, and where it is so in all that can be compared."""
        count = len(self._samples)
        relative, cosine = [], []
        comparable, left_out = np.zeros(count, np.bool_), np.ones(count, np.bool_)
        for name, columns in self._by_output.items():
            values = {figure: np.concatenate(parts) for figure, parts in columns.items()}
            known = np.isfinite(values[PEAK])
            zero = known & almost_zero(np.where(known, values[PEAK], 0.0), self._facts[name].at_least)
            relative.append(np.where(zero, np.nan, values[RELATIVE_L2]))
            cosine.append(np.where(zero, np.nan, values[COSINE]))
            comparable |= known
            left_out &= zero | ~known
        return {
            RELATIVE_L2: mean_of_known(relative),
            COSINE: mean_of_known(cosine),
            LEFT_OUT: (comparable & left_out).astype(np.float64),
        }

    def _append(self, figure: str, values: Array) -> None:
        self._columns.setdefault(figure, []).append(np.asarray(values, np.float64))

    def arrays(self) -> dict[str, Array]:
        """float64 (samples,) by figure, and ``samples`` with the numbers; NaN where a figure cannot be had."""
        columns: dict[str, Array] = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        relative = self._relative() if self._by_output else {}
        return {"samples": np.asarray(self._samples, np.int64), **columns, **relative}


def mean_of_known(rows: Sequence[Array] | Array) -> Array:
    """Mean over the first axis without NaN; NaN where there is nothing else."""
    stacked = np.asarray(rows, np.float64)
    known = ~np.isnan(stacked)
    counts = known.sum(axis=0)
    total = np.where(known, stacked, 0.0).sum(axis=0)
    return np.asarray(np.divide(total, counts, out=np.full(total.shape, np.nan), where=counts > 0))


def _ranks(rows: Array, samples: Sequence[int], labels: Mapping[int, int]) -> Array:
    """How many classes come before the label's, ties going to the smaller index as ``argmax`` has it.

    Args:
        rows: scores, (samples, classes).
    """
    chosen = np.asarray([labels[sample] for sample in samples])
    own = np.take_along_axis(rows, chosen[:, None], axis=1)
    before = np.arange(rows.shape[1])[None, :] < chosen[:, None]
    return np.asarray(((rows > own) | ((rows == own) & before)).sum(axis=1))
