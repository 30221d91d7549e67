"""The check across devices: what every rank measures alone, what they hold together, and how far the two are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.consistency.compare import compare
from pipeline.consistency.comparison import Comparison, Tolerance
from pipeline.consistency.context import QuantContext
from pipeline.consistency.distributed import calibrate_share, check_agreement
from pipeline.consistency.exchange import check_same
from pipeline.consistency.group import PREPARING
from pipeline.consistency.measure import measure_on_cpu
from pipeline.consistency.scenarios import Scenario, fp16_scenario, of_comparison
from pipeline.consistency.shares import rank_batches
from pipeline.consistency.wire import digest_statistics
from pipeline.core.progress import SILENT
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrators import Calibrator
    from calibrators.statistics import TensorStatistics
    from pipeline.consistency.group import Group
    from pipeline.consistency.measure import Measure
    from pipeline.consistency.opening import Opened
    from pipeline.core.progress import Progress
    from pipeline.placement import PlacementPlan

__all__ = ["RanksReport", "check_ranks"]


class RanksReport(Record):
    """What rank 0 reports."""

    ranks: tuple[str, ...]
    """Every rank's process and device."""
    backend: str
    shard: str
    batches: int
    samples: int
    seconds: tuple[float, ...]
    """Wall time of each rank's batches."""
    first_seconds: tuple[float, ...]
    """Of it, for loading the model and running the first batch."""
    cpu_seconds: tuple[float, ...]
    """Processor time of each rank's batches, all its threads together."""
    merge_seconds: float
    """Wall time of rank 0 from the end of its batches to the merged statistics, waiting for others included."""
    statistics: str
    """Digest of the merged statistics: that of one process over the same batches."""
    digest: str
    """Digest of the merged scales, calibrator and parameters."""
    scenarios: tuple[Scenario, ...]
    same_batch: Comparison | None
    """The first batch, run by every rank; None for a single rank."""
    merged: QuantContext

    @property
    def passed(self) -> bool:
        return self.same_batch is None or self.same_batch.consistent


def check_ranks(
    group: Group,
    opened: Opened,
    calibrator: Calibrator,
    *,
    tolerance: Tolerance,
    measure: Measure = measure_on_cpu,
    progress: Progress = SILENT,
) -> RanksReport:
    """Calibrate over all ranks, and compare what they hold.

    The merged scales have to be the same bits in every rank: anything else is an error. The first batch is run by every
    rank as well: devices of different kinds compute slightly different activations, and this drift is measured and
    judged by ``tolerance``.

    Raises:
        RanksDiffer, RunEnded, InputError: as :func:`check_agreement` and :func:`calibrate_share` say.
    """
    work, plan = opened.work, opened.plan
    settings = {f"calibrator parameter {key}": f"{value!r}" for key, value in calibrator.params.items()}
    check_agreement(group, work, model_sha256=opened.model_sha256, extra={"calibrator": calibrator.name, **settings})
    same = _same_batch(group, opened, calibrator, tolerance, measure) if group.size > 1 else None
    share = calibrate_share(group, work, measure=measure, progress=progress)
    context = _context(plan, share.merged, calibrator, "merged")
    check_same(group, "merged scales", context.digest)
    times = [
        np.frombuffer(data).tolist()
        for data in group.all_gather(np.array([share.seconds, share.first_seconds, share.cpu_seconds]).tobytes())
    ]
    scenarios = []
    if same is not None:
        scenarios.append(of_comparison(f"{group.size} ranks, the same batch", same))
    scenarios.append(
        Scenario(
            name=f"{group.size} ranks, exact merge" if group.size > 1 else "one device",
            tensors=len(context.tensors),
            within=len(context.tensors),
            tolerance=Tolerance(atol=0.0),
            identical=True,
            worst=context.tensors[0].name,
            largest=0.0,
            source="none: every rank holds the same bits",
        )
    )
    local = _gather_ranges(group, plan, share.own, calibrator)
    if len(local) > 1:
        contexts = [context, *local]
        apart = compare(contexts, tolerance)
        scenarios.append(of_comparison(f"{len(local)} ranks, each alone", apart, source="each rank saw other batches"))
        averaged = fp16_scenario(_amax(local), tolerance=tolerance)
        if averaged is not None:
            scenarios.append(averaged)
    return RanksReport(
        ranks=tuple(f"{peer}: {peer.device}" for peer in group.peers),
        backend=group.transport.backend,
        shard=work.shard,
        batches=len(share.batches),
        samples=share.samples,
        seconds=tuple(whole for whole, _, _ in times),
        first_seconds=tuple(first for _, first, _ in times),
        cpu_seconds=tuple(cpu for _, _, cpu in times),
        merge_seconds=share.merge_seconds,
        statistics=digest_statistics(share.merged),
        digest=context.digest,
        scenarios=tuple(scenarios),
        same_batch=same,
        merged=context,
    )


def _context(
    plan: PlacementPlan, statistics: Mapping[str, TensorStatistics], calibrator: Calibrator, label: str
) -> QuantContext:
    from pipeline.quantize import activation_ranges

    ranges, _ = activation_ranges(plan.activations, statistics, calibrator)
    return QuantContext.of_amax(ranges, label=label, calibrator=calibrator.name, params=dict(calibrator.params))


def _same_batch(
    group: Group, opened: Opened, calibrator: Calibrator, tolerance: Tolerance, measure: Measure
) -> Comparison:
    """Every rank runs batch 0 on its device."""
    work = opened.work
    group.phase("loading the model and running the first batch", patience=PREPARING)
    first = next(rank_batches(work.source, work.samples, work.batch_size, work.inputs, rank=0, size=1))
    measured = measure(work, iter([first]), group, SILENT)
    return compare(_gather_ranges(group, opened.plan, measured.statistics, calibrator), tolerance)


def _gather_ranges(
    group: Group, plan: PlacementPlan, statistics: Mapping[str, TensorStatistics], calibrator: Calibrator
) -> list[QuantContext]:
    """Every rank's own scales, in every rank; a rank that had no batch has none and is left out."""
    from pipeline.quantize import activation_ranges

    names = [point.tensor for point in plan.activations]
    values = np.zeros(len(names))
    if any(statistics[name].elements for name in plan.tensors):
        ranges, _ = activation_ranges(plan.activations, statistics, calibrator)
        values[:] = [ranges[name] for name in names]
    tables = [np.frombuffer(data, np.float64) for data in group.all_gather(values.tobytes())]
    return [
        QuantContext.of_amax(
            dict(zip(names, table.tolist(), strict=True)),
            label=f"rank {rank}",
            calibrator=calibrator.name,
            params=dict(calibrator.params),
        )
        for rank, table in enumerate(tables)
        if table.any()
    ]


def _amax(contexts: Sequence[QuantContext]) -> dict[str, list[float]]:
    return {
        tensor.name: [context.tensors[number].scales[0] * 127.0 for context in contexts]
        for number, tensor in enumerate(contexts[0].tensors)
    }
