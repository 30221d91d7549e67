"""What one evaluation says about each sample: right or wrong, agreement with FP32, error of the outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.errors.outputs import class_scores
from pipeline.errors.streaming import compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["AGREEMENT", "COSINE", "METRIC", "RELATIVE_L2", "TOP1", "TOP5", "SampleFigures", "check_labels"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

TOP1: Final = "top1"
TOP5: Final = "top5"
METRIC: Final = "metric"
AGREEMENT: Final = "agreement"
RELATIVE_L2: Final = "relative_l2"
COSINE: Final = "cosine"


def judged_output(outputs: Mapping[str, Array], samples: int) -> str | None:
    """The first output with one row of class scores per sample."""
    for name, values in outputs.items():
        scores = class_scores(values, samples)
        if scores is not None and scores.shape[1] == 1:
            return name
    return None


def check_labels(outputs: Mapping[str, Array], samples: Sequence[int], labels: Mapping[int, int]) -> None:
    """Do the labels belong to these outputs?

    Raises:
        InputError: no output has class scores, a sample has no label, or a label is no class of the model.
    """
    name = judged_output(outputs, len(samples))
    if name is None:
        shapes = ", ".join(f"{key!r} {values.shape}" for key, values in outputs.items())
        raise InputError(
            f"labels are given, but no output has one row of class scores per sample: {shapes}",
            remedy="leave --labels out for this model, or give a --metric",
        )
    scores = class_scores(outputs[name], len(samples))
    classes = 0 if scores is None else scores.shape[2]
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


class SampleFigures:
    """Collects one number per sample and figure over the batches of an evaluation."""

    def __init__(self, labels: Mapping[int, int] | None) -> None:
        self._labels = labels
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
            check_labels(outputs, samples, self._labels)
            ranks = _ranks(outputs, samples, self._labels)
            self._append(TOP1, ranks < 1)
            self._append(TOP5, ranks < 5)
        if metric is not None:
            self._append(METRIC, metric)
        if reference is not None:
            self._compare(samples, outputs, reference)

    def _compare(self, samples: Sequence[int], outputs: Mapping[str, Array], reference: Mapping[str, Array]) -> None:
        relative, cosine, agreement = [], [], []
        for name, expected in reference.items():
            found = outputs[name]
            if found.shape != expected.shape:
                continue  # such as the boxes that are left after a threshold: their number depends on the values
            if expected.dtype.kind in "iub":
                agreement.append(np.full(len(samples), float((expected == found).mean())))
                continue
            sums = compared(name, expected, found, samples)
            relative.append(sums.relative_l2)
            cosine.append(sums.cosine)
            scores, other = class_scores(expected, len(samples)), class_scores(found, len(samples))
            if scores is not None and other is not None:
                agreement.append((scores.argmax(axis=2) == other.argmax(axis=2)).mean(axis=1))
        for figure, values in ((RELATIVE_L2, relative), (COSINE, cosine), (AGREEMENT, agreement)):
            self._append(figure, np.mean(values, axis=0) if values else np.full(len(samples), np.nan))

    def _append(self, figure: str, values: Array) -> None:
        self._columns.setdefault(figure, []).append(np.asarray(values, np.float64))

    def arrays(self) -> dict[str, Array]:
        """float64 (samples,) by figure, and ``samples`` with the numbers; NaN where a figure cannot be had."""
        columns: dict[str, Array] = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        return {"samples": np.asarray(self._samples, np.int64), **columns}


def _ranks(outputs: Mapping[str, Array], samples: Sequence[int], labels: Mapping[int, int]) -> Array:
    """How many classes come before the label's, ties going to the smaller index as ``argmax`` has it."""
    name = judged_output(outputs, len(samples))
    scores = None if name is None else class_scores(outputs[name], len(samples))
    if scores is None:
        raise ValueError("check_labels comes first")
    rows = scores[:, 0]
    chosen = np.asarray([labels[sample] for sample in samples])
    own = np.take_along_axis(rows, chosen[:, None], axis=1)
    before = np.arange(rows.shape[1])[None, :] < chosen[:, None]
    return np.asarray(((rows > own) | ((rows == own) & before)).sum(axis=1))
