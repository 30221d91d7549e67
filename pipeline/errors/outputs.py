"""The graph's outputs: what a user of the network sees of the quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.errors.metrics import rows_per_sample
from pipeline.errors.streaming import compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.errors.capture import Arrays

__all__ = ["OutputErrors", "TopOne", "class_scores"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


def class_scores(values: Array, samples: int) -> Array | None:
    """``values`` as class scores of shape (samples, steps, classes), or None where they cannot be.

    Scores are floating point of shape (samples, classes), (samples, steps, classes), or (samples, classes, 1, 1).
    """
    if values.dtype.kind != "f" or values.ndim < 2 or values.shape[0] != samples:
        return None
    if values.ndim > 3 and all(dim == 1 for dim in values.shape[2:]):
        values = values.reshape(samples, -1)
    if values.ndim > 3 or values.shape[-1] < 2:
        return None
    return values.reshape(samples, -1, values.shape[-1])


class OutputErrors:
    """Relative L2, cosine and agreement of one output over all samples."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._relative: list[float] = []
        self._cosine: list[float] = []
        self._agree: list[float] = []
        self.samples: list[int] = []
        self._max_abs: list[float] = []
        self._peaks: list[float] = []
        self._different_shape: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None

    def add(self, samples: Sequence[int], reference: Array, other: Array) -> None:
        """Take in one batch."""
        if reference.shape != other.shape:
            self._different_shape = self._different_shape or (samples[0], reference.shape, other.shape)
            return
        sums = compared(self.name, reference, other, samples)
        self._relative.extend(sums.relative_l2.tolist())
        self._cosine.extend(sums.cosine.tolist())
        self.samples.extend(samples)
        self._max_abs.extend(sums.max_abs.tolist())
        rows = rows_per_sample(reference, len(samples))
        rows = np.asarray(reference, np.float32).reshape(1, -1) if rows is None else rows
        self._peaks.extend(np.broadcast_to(np.abs(rows).max(axis=1, initial=0.0), len(samples)).tolist())
        if reference.dtype.kind in "iub":
            self._agree.extend([float((reference == other).mean())] * len(samples))
            return
        scores, other_scores = class_scores(reference, len(samples)), class_scores(other, len(samples))
        if scores is not None and other_scores is not None:
            self._agree.extend((scores.argmax(axis=2) == other_scores.argmax(axis=2)).mean(axis=1).tolist())

    @property
    def comparable(self) -> bool:
        """False where a shape that depends on the data forbids a comparison."""
        return self._different_shape is None

    @property
    def relative_l2(self) -> Floats:
        """Per sample of :attr:`samples`, float64."""
        return np.asarray(self._relative, np.float64)

    @property
    def max_abs(self) -> Floats:
        """Largest absolute error per sample of :attr:`samples`, float64."""
        return np.asarray(self._max_abs, np.float64)

    @property
    def peaks(self) -> Floats:
        """Largest absolute FP32 value per sample of :attr:`samples`, float64."""
        return np.asarray(self._peaks, np.float64)

    def figures(self) -> dict[str, Any]:
        """Fields of ``OutputFigures``; only a note where a shape that depends on the data forbids a comparison."""
        if self._different_shape is not None:
            sample, shape, other = self._different_shape
            return {"note": f"not compared: sample {sample} has shape {shape} in FP32 and {other} in INT8"}
        return {
            "relative_l2_mean": float(np.mean(self._relative)),
            "relative_l2_max": float(np.max(self._relative)),
            "cosine_mean": float(np.mean(self._cosine)),
            "cosine_min": float(np.min(self._cosine)),
            "agreement": float(np.mean(self._agree)) if len(self._agree) == len(self._relative) else None,
        }


class TopOne:
    """Share of samples whose highest score is their label, in both readings.

    The first output that gives one row of class scores per sample is judged.

    Args:
        labels: sample number to class index.
        outputs: the graph's outputs in order.
    """

    def __init__(self, labels: Mapping[int, int], outputs: Sequence[str]) -> None:
        self._labels = labels
        self._outputs = list(outputs)
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
        for name in self._outputs:
            scores = class_scores(arrays[name], samples)
            if scores is not None and scores.shape[1] == 1:
                return name
        shapes = ", ".join(f"{name!r} {arrays[name].shape}" for name in self._outputs)
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
