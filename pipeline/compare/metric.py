"""The user's metric, ``file.py:callable``, in its child process.

The callable is called once per batch as ``metric(outputs, samples, labels)``: output name to array, the sample numbers,
and the class indices (None without ``--labels``). It returns one number per sample; higher is better, and the mean over
the samples is what is reported.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.usercode import CodeSpec, UserProcess, parse_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.records import Dependency

__all__ = ["MetricProcess", "metric_code", "metric_process"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def metric_code(text: str) -> CodeSpec:
    """What ``--metric`` names.

    Raises:
        InputError: it is not ``file.py:callable`` or ``package.module:callable``, or the file does not exist.
    """
    code = parse_code(text)
    if code is None:
        raise InputError(
            f"--metric {text!r} is not file.py:callable",
            remedy="write a function metric(outputs, samples, labels) that returns one number per sample",
        )
    return code


@contextmanager
def metric_process(text: str, file: Path | None) -> Iterator[MetricProcess]:
    """The child for one evaluation.

    Args:
        file: where the file of ``text`` lies on this machine; None for ``package.module:callable``.
    """
    code = metric_code(text) if file is None else metric_code(f"{file}:{text.rpartition(':')[2]}")
    with UserProcess(code, {"task": "metric"}) as process:
        yield MetricProcess(process, text)


class MetricProcess:
    """A running metric."""

    def __init__(self, process: UserProcess, text: str) -> None:
        self._process = process
        self._text = text

    def dependencies(self) -> tuple[Dependency, ...]:
        """Files that the callable has read, its own source among them."""
        return self._process.dependencies()

    def __call__(
        self, outputs: Mapping[str, Array], samples: Sequence[int], labels: Sequence[int] | None
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One number per sample.

        Raises:
            InputError: the callable raised (its traceback is in the message), or gave a NaN, an infinity or another
                number of values.
        """
        arrays: dict[str, Array] = {"samples": np.asarray(samples, np.int64)}
        if labels is not None:
            arrays["labels"] = np.asarray(labels, np.int64)
        arrays.update({f"output/{name}": np.asarray(values) for name, values in outputs.items()})
        self._process.send({"kind": "batch"}, arrays)
        _, answer = self._process.receive()
        values = answer["values"]
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            raise InputError(
                f"the metric {self._text} gave {values[row]} for sample {samples[row]}",
                remedy="return a finite number for every sample; finished runs are kept",
            )
        return values
