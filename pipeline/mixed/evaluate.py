"""Measuring candidates on a set of samples, each only once, also across a kill.

Only the graph's outputs are compared. The FP32 outputs are computed once per set and kept; where inputs and outputs are
too large to keep, both are read and computed again each time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.accuracy import Figures
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.files import write_json
from pipeline.errors.capture import OrtReading, micro_batches
from pipeline.errors.outputs import TopOne, decibels
from pipeline.errors.scores import score_kinds, scores_of
from pipeline.errors.streaming import compared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays
    from pipeline.mixed.candidate import Candidate, Network

__all__ = ["Evaluator", "Memory"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_KEPT_BYTES = 512 << 20
_AT_ONCE = 2
"""Samples computed at a time. Their activations stay near the caches: on two cores EfficientNet-Lite0 takes two thirds
of the time that 8 at a time take."""


class Memory:
    """Figures by key in a JSON file, written after each: a killed search goes on where it stopped.

    Args:
        identity: of everything that the figures depend on beside the candidate; those of another one are forgotten.
        others: files of other searches, to start with where ``path`` holds nothing: another target measures much the
            same candidates.
    """

    def __init__(self, path: Path, identity: str = "", others: Iterable[Path] = ()) -> None:
        self._path = path
        self._identity = identity
        self._found: dict[str, dict[str, Any]] = {}
        for place in (path, *others):
            if place.is_file() and not self._found:
                try:
                    stored = json.loads(place.read_text())
                    self._found = stored["figures"] if stored["identity"] == identity else {}
                except (ValueError, KeyError, TypeError) as error:
                    if place != path:
                        continue  # it is nothing that this search needs
                    raise InputError(
                        f"{place} is damaged: {error}", remedy="delete it; the search starts anew"
                    ) from error

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Figures | None:
        found = self._found.get(key)
        return None if found is None else Figures.model_validate(found)

    def put(self, key: str, figures: Figures) -> None:
        self._found[key] = figures.model_dump(mode="json")
        write_json(self._path, {"identity": self._identity, "figures": self._found})


class Evaluator:
    """Measures candidates of one network on one set of samples.

    Args:
        name: of the set; part of the memory's keys.
        read: a new pass over the samples.
        labels: sample number to class, for top-1.

    Raises:
        InputError: there are no samples.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        read: Callable[[], Iterable[Batch]],
        memory: Memory,
        labels: Mapping[int, int] | None = None,
    ) -> None:
        self.name = name
        self.network = network
        self.labels = labels
        self.memory = memory
        self.kinds = score_kinds(network.fp32, labelled=labels is not None)
        self.outputs = list(self.kinds)
        self._reference = OrtReading(
            network.fp32.proto,
            self.outputs,
            label="the FP32 graph",
            optimise=True,
            external_data_dir=network.fp32.folder,
        )
        self._read = read
        self._batches: list[Batch] | None = []
        self._wanted: list[Arrays] | None = []
        self.samples = 0
        size = 0
        for batch in self._parts():
            values = self._reference(batch)
            self.samples += len(batch.samples)
            size += sum(array.nbytes for array in (*batch.feeds.values(), *values.values()))
            if size > _KEPT_BYTES:
                self._batches = self._wanted = None
            if self._batches is not None and self._wanted is not None:
                self._batches.append(batch)
                self._wanted.append(values)
        if not self.samples:
            raise InputError(f"no samples in the {name} set of the mixed-precision search", remedy="give more data")

    def pairs(self) -> Iterator[tuple[Batch, Arrays]]:
        """Every batch with the FP32 outputs."""
        if self._batches is not None and self._wanted is not None:
            yield from zip(self._batches, self._wanted, strict=True)
            return
        for batch in self._parts():
            yield batch, self._reference(batch)

    def _parts(self) -> Iterator[Batch]:
        for batch in self._read():
            yield from micro_batches(batch, None if self._reference.static_batch else _AT_ONCE)

    def measure(self, candidate: Candidate) -> Figures:
        """Figures of ``candidate``.

        Raises:
            InputError: labels that do not fit.
            CheckFailed: a NaN or infinity in an output.
        """
        key = f"{self.name}:{candidate.key}"
        known = self.memory.get(key)
        if known is not None:
            return known
        figures = self._measured(candidate)
        self.memory.put(key, figures)
        return figures

    def _measured(self, candidate: Candidate) -> Figures:
        graph = self.network.of(candidate).graph(candidate)
        reading = OrtReading(graph, self.outputs, label="the INT8 graph", optimise=True)
        signal, noise = dict.fromkeys(self.outputs, 0.0), dict.fromkeys(self.outputs, 0.0)
        agreed: list[float] = []
        top = TopOne(self.labels, self.kinds) if self.labels is not None else None
        judged: str | None = None
        for batch, wanted in self.pairs():
            found = reading(batch)
            for name in self.outputs:
                if wanted[name].shape != found[name].shape or wanted[name].dtype.kind != "f":
                    continue  # depends on the data, such as a list of boxes, or counts: no distance to measure
                sums = compared(name, wanted[name], found[name], batch.samples)
                signal[name] += float(sums.reference_square.sum())
                noise[name] += float(sums.difference_square.sum())
                scores = scores_of(self.kinds[name], wanted[name], len(batch.samples))
                if scores is not None and judged in (None, name):
                    judged = name
                    other = scores_of(self.kinds[name], found[name], len(batch.samples))
                    if other is not None:
                        agreed.extend((scores.argmax(axis=2) == other.argmax(axis=2)).mean(axis=1).tolist())
            if top is not None:
                top.add(batch.samples, wanted, found)
        if not any(signal.values()):
            raise CheckFailed(
                f"no output of the network can be compared: {', '.join(map(repr, self.outputs))}",
                remedy="a search needs an output of floating-point values whose shape does not depend on the data",
            )
        ratios = [decibels(signal[name], noise[name]) for name in self.outputs if signal[name] > 0]
        return Figures(
            sqnr_db=min(ratios),
            agreement=float(np.mean(agreed)) if len(agreed) == self.samples else None,
            top1=top.other if top else None,
            top1_fp32=top.reference if top else None,
            samples=self.samples,
        )
