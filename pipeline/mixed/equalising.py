"""Equalised channels as a repair: another float model that computes the same bits, with statistics of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.artifact import CALIBRATION
from pipeline.core.progress import SILENT, Progress
from pipeline.mixed.candidate import Network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pipeline.data.batching import Batch

__all__ = ["equalised_network"]

_RECORD = "equalised.json"


def equalised_network(
    network: Network, batches: Callable[[], Iterable[Batch]], folder: Path, *, progress: Progress = SILENT
) -> tuple[Network, int] | None:
    """``network`` with its channels equalised and calibrated again, and how many tensors were equalised.

    None where no tensor can be. ``folder`` holds the model and its statistics; what is finished there is taken.

    Args:
        batches: a new pass over the calibration samples.
    """
    from calibrators.statistics import load_statistics
    from pipeline import calibrate
    from pipeline.core.files import write_json
    from pipeline.placement import equalise, make_plan

    record = folder / _RECORD
    if record.is_file():
        done = equalise.EqualiseResult.model_validate_json(record.read_text()).at(folder)
    else:
        done = equalise.run(network.model, batches(), folder=folder, config=network.config, progress=progress)
        write_json(record, done.model_dump(mode="json"))
    if not done.tensors:
        return None
    if not (folder / CALIBRATION).is_file():
        plan = make_plan(done.model_path, network.config)
        calibrate.run(done.model_path, plan.tensors, batches(), folder=folder, progress=progress)
    statistics, _ = load_statistics(folder / CALIBRATION)
    return Network(done.model_path, network.config, statistics, network.calibrator), len(done.tensors)
