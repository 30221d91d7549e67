"""Equalised channels as a repair: another float model that computes the same bits, with statistics of its own."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from pipeline.artifact import CALIBRATION
from pipeline.core.progress import SILENT, Progress
from pipeline.mixed.candidate import Network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from pipeline.data.batching import Batch

__all__ = ["changed_tensors", "equalised_network"]

_RECORD = "equalised.json"


def equalised_network(
    network: Network, batches: Callable[[], Iterable[Batch]], folder: Path, *, progress: Progress = SILENT
) -> tuple[Network, int] | None:
    """``network`` with its channels equalised and calibrated again, and how many tensors were equalised.

    None where no tensor can be. ``folder`` holds the model and its statistics; what is finished there is taken. Tensors
    that have the same bits as before keep their statistics.

    Args:
        batches: a new pass over the calibration samples.
    """
    from calibrators.statistics import load_statistics, save_statistics
    from pipeline import calibrate
    from pipeline.core.files import write_json
    from pipeline.placement import equalise, make_plan

    record, finished = folder / _RECORD, folder / CALIBRATION
    if record.is_file():
        done = equalise.EqualiseResult.model_validate_json(record.read_text()).at(folder)
    else:
        done = equalise.run(network.model, batches(), folder=folder, config=network.config, progress=progress)
        write_json(record, done.model_dump(mode="json"))
    if not done.tensors:
        return None
    if not finished.is_file():
        tensors = make_plan(done.model_path, network.config).tensors
        known = [name for name in tensors if name in network.statistics]
        changed = changed_tensors(network.model, done.model_path, known, next(iter(islice(batches(), 1))))
        changed |= {tensor.tensor for tensor in done.tensors}
        missing = [name for name in tensors if name in changed or name not in network.statistics]
        part = calibrate.run(done.model_path, missing, batches(), folder=folder / "changed", progress=progress)
        own, meta = load_statistics(part.statistics_path)
        every = {**network.statistics, **own}
        save_statistics(finished, {name: every[name] for name in tensors}, meta)
    statistics, _ = load_statistics(finished)
    return Network(done.model_path, network.config, statistics, network.calibrator), len(done.tensors)


def changed_tensors(before: Path, after: Path, tensors: Sequence[str], batch: Batch) -> frozenset[str]:
    """Those of ``tensors``, which both models have, whose values are not the same bits."""
    from pipeline.errors.capture import OrtReading

    if not tensors:
        return frozenset()
    old, new = (OrtReading(model, tensors, label=model.name, optimise=False)(batch) for model in (before, after))
    return frozenset(name for name in tensors if not np.array_equal(old[name], new[name]))
