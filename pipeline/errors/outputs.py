"""The graph's outputs: what a user of the network sees of the quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.errors.doubtful import judge
from pipeline.errors.figures import OutputFigures
from pipeline.errors.metrics import PEAK
from pipeline.errors.scores import class_scores, judged_output, scores_of
from pipeline.errors.streaming import compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.errors.capture import Arrays
    from pipeline.errors.scores import Scores

__all__ = ["LARGEST_SQNR_DB", "OutputErrors", "TopOne", "decibels"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

LARGEST_SQNR_DB = 200.0


def decibels(signal: float, noise: float) -> float:
    """SQNR of two energies, ``signal`` above 0, at most 200."""
    return min(LARGEST_SQNR_DB, 10.0 * float(np.log10(signal / noise))) if noise > 0 else LARGEST_SQNR_DB


class OutputErrors:
    """Relative L2, cosine, absolute error and agreement of one output over all samples.

    Args:
        at_least: the output's range is so large (:func:`pipeline.errors.doubtful.known_range`).
        scores: of classes, which agree or not (:func:`pipeline.errors.scores.score_kinds`).
    """

    def __init__(self, name: str, at_least: float = 0.0, *, scores: Scores = "none") -> None:
        self.name = name
        self._scores: Scores = scores
        self._at_least = at_least
        self._samples: list[int] = []
        self._values: dict[str, list[Floats]] = {key: [] for key in ("relative_l2", "cosine", "max_abs", PEAK)}
        self._agree: list[float] = []
        self._energy = [0.0, 0.0]
        self._different_shape: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None

    def add(self, samples: Sequence[int], reference: Array, other: Array) -> None:
        """Take in one batch."""
        if reference.shape != other.shape:
            self._different_shape = self._different_shape or (samples[0], reference.shape, other.shape)
            return
        sums = compared(self.name, reference, other, samples)
        self._samples.extend(samples)
        for key, values in self._values.items():
            values.append(sums.metric(key))
        if reference.dtype.kind in "iub":
            self._agree.extend([float((reference == other).mean())] * len(samples))
            return
        self._energy[0] += float(sums.reference_square.sum())
        self._energy[1] += float(sums.difference_square.sum())
        scores, other_scores = (scores_of(self._scores, values, len(samples)) for values in (reference, other))
        if scores is not None and other_scores is not None:
            self._agree.extend((scores.argmax(axis=2) == other_scores.argmax(axis=2)).mean(axis=1).tolist())

    def figures(self) -> OutputFigures:
        """Of at least one sample; only a note where a shape that depends on the data forbids a comparison."""
        if self._different_shape is not None:
            sample, shape, other = self._different_shape
            return OutputFigures(
                name=self.name, note=f"not compared: sample {sample} has shape {shape} in FP32 and {other} in INT8"
            )
        values = {key: np.concatenate(blocks) for key, blocks in self._values.items()}
        judged = judge(values[PEAK], values["max_abs"], values["relative_l2"], self._at_least)
        relative, cosine = (values[key][~judged.almost_zero] for key in ("relative_l2", "cosine"))
        count = len(self._samples)
        figures = OutputFigures(
            name=self.name,
            relative_l2_mean=float(relative.mean()) if relative.size else None,
            relative_l2_max=float(relative.max()) if relative.size else None,
            cosine_mean=float(cosine.mean()) if cosine.size else None,
            cosine_min=float(cosine.min()) if cosine.size else None,
            sqnr_db=decibels(*self._energy) if self._energy[0] > 0 else None,
            agreement=float(np.mean(self._agree)) if len(self._agree) == count else None,
            max_abs=judged.max_abs,
            max_abs_sample=self._samples[judged.worst],
            value_range=judged.value_range,
            almost_zero=int(judged.almost_zero.sum()),
            far=judged.far,
        )
        return figures if relative.size else figures.model_copy(update={"note": figures.remark(count)})


class TopOne:
    """Share of samples whose highest score is their label, in both readings.

    The first output that gives one row of class scores per sample is judged.

    Args:
        labels: sample number to class index.
        kinds: what the graph's outputs hold, in their order.
    """

    def __init__(self, labels: Mapping[int, int], kinds: Mapping[str, Scores]) -> None:
        self._labels = labels
        self._kinds = dict(kinds)
        self._right = [0, 0]
        self._seen = 0

    def add(self, samples: Sequence[int], reference: Arrays, other: Arrays) -> None:
        """Take in one batch.

        Raises:
            InputError: a sample without a label, a label outside the classes, or no output with class scores.
        """
        name = self._judged(reference, len(samples))
        for side, arrays in enumerate((reference, other)):
            scores = class_scores(arrays[name], len(samples))
            if scores is None:
                raise InputError(f"output {name!r} has shape {arrays[name].shape} in INT8, which holds no class scores")
            classes = scores.shape[2]
            for row, sample in enumerate(samples):
                label = self._labels.get(sample)
                if label is None:
                    raise InputError(
                        f"sample {sample} has no label",
                        remedy="give --labels a row for every sample, or leave --labels out",
                    )
                if not 0 <= label < classes:
                    raise InputError(
                        f"sample {sample} has label {label}, but output {name!r} has {classes} classes from 0",
                        remedy="the labels belong to another model or count from 1",
                    )
                self._right[side] += int(scores[row, 0].argmax() == label)
        self._seen += len(samples)

    def _judged(self, arrays: Arrays, samples: int) -> str:
        name = judged_output(self._kinds, arrays, samples)
        if name is not None:
            return name
        shapes = ", ".join(f"{name!r} {arrays[name].shape}" for name in self._kinds)
        raise InputError(
            f"labels are given, but no output has one row of class scores per sample: {shapes}",
            remedy="leave --labels out for this model",
        )

    @property
    def reference(self) -> float:
        return self._right[0] / max(self._seen, 1)

    @property
    def other(self) -> float:
        return self._right[1] / max(self._seen, 1)
