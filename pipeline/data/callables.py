"""A user's callable as a data source; it runs in a child process, anew for every pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.files import sha256_file, sha256_json
from pipeline.data.checking import InputCheck
from pipeline.records import Dependency
from pipeline.usercode import UserProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.data.source import Sample
    from pipeline.records import TensorSpec
    from pipeline.usercode import CodeSpec

__all__ = ["CallableSource"]

_AHEAD = 16
"""Samples about which the child is told in advance, so that it can produce the next one meanwhile."""


class CallableSource:
    """Samples that ``file.py:callable`` or ``package.module:callable`` yields."""

    def __init__(self, code: CodeSpec, inputs: Sequence[TensorSpec]) -> None:
        self._code = code
        self._specs = [(spec.name, None if spec.shape is None else len(spec.shape)) for spec in inputs]
        self._checks = {spec.name: InputCheck(spec) for spec in inputs}
        self._opened: set[str] = set()
        self._notes: list[str] = []

    @property
    def length(self) -> None:
        return None

    @property
    def names(self) -> None:
        return None

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def dependencies(self) -> tuple[Dependency, ...]:
        """Files that the callable has read in the passes so far."""
        existing = sorted(path for path in self._opened if Path(path).is_file())
        return tuple(Dependency(path=path, sha256=sha256_file(Path(path))) for path in existing)

    def describe(self) -> str:
        return f"samples from {self._code.text}"

    def key(self) -> str:
        return sha256_json({"code": self._code.source_sha256(), "name": self._code.attribute, "kind": "callable"})

    def sha256(self) -> str:
        """Hash of the callable's source: what it yields is known only while it runs."""
        return self._code.source_sha256()

    def count(self, limit: int | None) -> int:
        """Runs the callable to its end or ``limit``; no array leaves the child."""
        seen = 0
        for seen, _ in enumerate(self._stream(lambda number: False), 1):
            if seen == limit:
                break
        return seen

    def read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        for number, sample in enumerate(self._stream(wanted)):
            if sample is not None:
                yield number, self._checked(sample, number)

    def _stream(self, wanted: Callable[[int], bool]) -> Iterator[Sample | None]:
        """Each sample as it came, None for one that is not wanted."""
        task = {"task": "samples", "inputs": self._specs}
        number = asked = 0
        with UserProcess(self._code, task) as process:
            try:
                while True:
                    while asked < number + _AHEAD:
                        process.answer(wanted(asked))
                        asked += 1
                    header, arrays = process.receive()
                    if header["kind"] == "end":
                        return
                    yield arrays if header["kind"] == "sample" else None
                    number += 1
            finally:
                self._opened |= process.opened()

    def _checked(self, arrays: Sample, number: int) -> Sample:
        where = f"{self._code.text}, sample {number}"
        sample = {}
        for name, array in arrays.items():
            check = self._checks[name]
            note = check.check_dtype(array.dtype, where=self._code.text)
            if note is not None and note not in self._notes:
                self._notes.append(note)
            remedy = "yield batches or samples of the shape that the model takes"
            if (axes := check.other_layout(array.shape)) is not None:
                remedy = f"move the channels of each sample: sample.transpose{axes}"
            check.check_shape(array.shape, where=where, remedy=remedy)
            sample[name] = check.convert(array, where=where)
        return sample
