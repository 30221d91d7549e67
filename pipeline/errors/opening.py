"""What an error report is made from: the models of an artifact, the samples, the ranges of other calibrators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.artifact import CALIBRATION, FP32_MODEL, INT8_MODEL, PLACEMENT, SAMPLES, Artifact
from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT
from pipeline.errors.graphs import Graph, float_graph
from pipeline.errors.layers import layers_of_graph, layers_of_plan
from pipeline.floatgraph import check_float_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from pipeline.config import Preprocess
    from pipeline.core.progress import Progress
    from pipeline.data.batching import Batch
    from pipeline.data.source import DataSource
    from pipeline.errors.layers import Layer
    from pipeline.placement.plan import PlacementPlan

__all__ = ["ChosenData", "Opened", "calibrated_ranges", "choose_data", "load_plan", "open_models"]

DEFAULT_SAMPLES = 64


class ChosenData:
    """The samples to measure on: a new pass at every :attr:`read`, how many there are, and what they are in words."""

    def __init__(
        self,
        read: Callable[[], Iterable[Batch]],
        total: int,
        text: str,
        labels: Mapping[int, int] | None,
        *,
        verified: bool,
    ) -> None:
        self.read = read
        self.total = total
        self.text = text
        self.labels = labels
        self.verified = verified
        """They are the very samples that the build verified on."""


class Opened:
    """The models of an artifact, and its quantised layers."""

    def __init__(
        self, artifact: Artifact, fp32: Graph, int8: Graph, layers: Sequence[Layer], plan: PlacementPlan
    ) -> None:
        self.artifact = artifact
        self.fp32 = fp32
        self.int8 = int8
        self.layers = tuple(layers)
        self.plan = plan


def open_models(folder: Path) -> Opened:
    """Open an artifact for measuring.

    Raises:
        InputError: it is no artifact, or nothing in it is quantised.
    """
    artifact = Artifact.open(folder)
    fp32, int8 = float_graph(artifact.path(FP32_MODEL)), Graph(artifact.path(INT8_MODEL))
    plan = load_plan(artifact)
    layers = layers_of_graph(int8) if plan.prequantized else layers_of_plan(plan, fp32)
    if not layers:
        raise InputError(f"{folder} has no quantised layer", remedy="`quantize explain` says why each node stays float")
    return Opened(artifact, fp32, int8, layers, plan)


def load_plan(artifact: Artifact) -> PlacementPlan:
    """The placement an artifact was built with.

    Raises:
        InputError: its file is damaged.
    """
    from pipeline.placement.plan import PlacementPlan

    path = artifact.path(PLACEMENT)
    try:
        values = json.loads(path.read_text())
        return PlacementPlan.model_validate_json(
            json.dumps({key: value for key, value in values.items() if key in PlacementPlan.model_fields})
        )
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        raise InputError(
            f"{path} cannot be read: {error}", remedy="the file is as the manifest lists it: build the artifact again"
        ) from error


def choose_data(
    artifact: Artifact,
    data: str | None,
    *,
    preprocess: Preprocess | None = None,
    samples: int | None = None,
    batch_size: int = 8,
    labels: Path | None = None,
    recorded: bool = False,
    progress: Progress = SILENT,
) -> ChosenData:
    """The samples to measure on.

    Without ``data``: those that the build verified on, where its files are still there and as they were, otherwise the
    few kept in the artifact. Of the very data of the build: those it verified on, or ``samples`` that were held aside,
    or all of these where there are labels. Of other data: all (up to ``samples``, evenly spaced). Images are
    preprocessed as in the build unless ``preprocess`` says otherwise.

    Args:
        recorded: without ``data``: those kept in the artifact, for which outputs are recorded.

    Raises:
        InputError: as the data modules say; labels without data.
    """
    from pipeline.data import load_labels, open_again, split_source
    from pipeline.errors.verified import built_on, verified_numbers

    manifest = artifact.manifest
    kept, feeds = _kept_samples(artifact)
    if data is None:
        if labels is not None or preprocess is not None:
            raise InputError("labels and preprocessing belong to --data, and none is given", remedy="add --data")
        source, reason = (None, "") if recorded else built_on(manifest)
        numbers = None if source is None else verified_numbers(manifest, source, kept)
        if source is None or numbers is None:
            return _of_kept(artifact, kept, feeds, reason)
        return _of_source(artifact, source, numbers, batch_size, None, verified=True)
    source = open_again(manifest, data, preprocess, progress=progress)
    record = manifest.data
    known = load_labels(labels, source) if labels is not None else None
    same = source.sha256() == record.sha256
    verified = verified_numbers(manifest, source, kept) if same else None
    if verified is not None and samples is None and known is None:
        numbers = verified
    elif same and record.held_aside:
        split = split_source(
            source, manifest.inputs, samples=record.calibration_samples, verify=samples, labelled=labels is not None
        )
        numbers = split.verification
    else:
        length = source.length
        wanted = samples if samples is not None else DEFAULT_SAMPLES if known is None else length or DEFAULT_SAMPLES
        count = wanted if length is None else min(wanted, length)
        numbers = frozenset(range(count) if length is None else (i * length // count for i in range(count)))
    return _of_source(
        artifact, source, numbers, batch_size, known, verified=numbers == verified and preprocess is None, same=same
    )


def _of_source(
    artifact: Artifact,
    source: DataSource,
    numbers: frozenset[int],
    batch_size: int,
    labels: Mapping[int, int] | None,
    *,
    verified: bool,
    same: bool = True,
) -> ChosenData:
    from pipeline.data import batched, select

    inputs = artifact.manifest.inputs
    aside = ", held aside from calibration" if same and artifact.manifest.data.held_aside else ""
    text = f"{source.describe()}, {len(numbers)} samples{aside}"
    return ChosenData(
        lambda: batched(select(source, numbers), batch_size, inputs), len(numbers), text, labels, verified=verified
    )


def _of_kept(
    artifact: Artifact, numbers: tuple[int, ...], feeds: dict[str, np.ndarray[Any, np.dtype[Any]]], reason: str
) -> ChosenData:
    from pipeline.data.batching import Batch

    count = artifact.manifest.verification.get("samples", 0)
    of = f", of {count} that it was verified on" if count > len(numbers) else ""
    hint = f"{reason}; --data gives more" if reason else "--data gives more"
    text = f"the {len(numbers)} samples kept in the artifact{of} ({hint})"
    whole = count <= len(numbers)
    return ChosenData(lambda: [Batch(0, numbers, feeds)], len(numbers), text, None, verified=whole)


def _kept_samples(artifact: Artifact) -> tuple[tuple[int, ...], dict[str, np.ndarray[Any, np.dtype[Any]]]]:
    """Numbers and inputs of the samples in the artifact."""
    import numpy as np

    path = artifact.path(SAMPLES)
    try:
        with np.load(path, allow_pickle=False) as archive:
            numbers = tuple(int(number) for number in archive["samples"])
            prefix = "inputs/"
            feeds = {name.removeprefix(prefix): archive[name] for name in archive.files if name.startswith(prefix)}
    except Exception as error:
        raise InputError(
            f"{path} cannot be read: {error}", remedy="the file is as the manifest lists it: build the artifact again"
        ) from error
    return numbers, feeds


def calibrated_ranges(
    artifact: Artifact, plan: PlacementPlan, *, progress: Progress = SILENT
) -> dict[str, dict[str, float]]:
    """What every calibrator would make of the artifact's statistics: calibrator to tensor to amax.

    Empty where the scales came with the model. A third-party calibrator that fails is left out.

    Raises:
        InputError: the statistics cannot be read, or are of another float graph than the artifact's.
    """
    import calibrators
    from pipeline.quantize import activation_ranges

    if plan.prequantized or CALIBRATION not in artifact.manifest.files or not plan.tensors:
        return {}
    statistics, meta = calibrators.load_statistics(artifact.path(CALIBRATION))
    doubt = check_float_graph(
        artifact.path(CALIBRATION),
        meta,
        artifact.path(FP32_MODEL),
        remedy="the artifact was put together of two builds: build it again",
    )
    if doubt is not None:
        progress.warn(doubt)
    found = {}
    for name in calibrators.names():
        try:
            found[name], _ = activation_ranges(plan.activations, statistics, calibrators.get(name))
        except InputError:
            continue  # it needs something these statistics do not hold, such as the batches in order
    return found
