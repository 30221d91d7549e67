"""The result as a table: one row per graph and shift, and its files.

A row depends on the measured figures alone, so the files are the same to the bit however the work was spread.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.compare.bootstrap import Resampling
from pipeline.compare.figures import AGREEMENT, COSINE, METRIC, RELATIVE_L2, TOP1, TOP5
from pipeline.compare.measured import has_figure
from pipeline.compare.shifts import CLEAN
from pipeline.core.files import canonical_json, write_bytes, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.compare.measured import Condition, Floats, Measured, Score

__all__ = ["COLUMNS", "rows", "write_csv", "write_parquet"]

_TEXT: Final = ("calibrator", "name", "params", "shift", "worst_layer", "graph")
_WHOLE: Final = ("calibration_samples", "calibration_subset", "draws", "samples")
_INTERVALS: Final = (TOP1, METRIC, AGREEMENT, RELATIVE_L2, "drop_from_clean", "drop_from_shifted")
COLUMNS: Final = (
    "calibrator", "name", "params", "calibration_samples", "calibration_subset", "shift", "strength", "draws",
    "samples", *(f"{figure}{end}" for figure in _INTERVALS for end in ("", "_low", "_high")),
    TOP5, COSINE, "sqnr_db", "clipping_share", "worst_layer", "worst_layer_relative_l2", "graph",
)  # fmt: skip
"""``drop_from_clean``: score of FP32 without shift minus the row's; ``drop_from_shifted``: of FP32 under the same
shift. Shares and scores are not in per cent; ``_low`` and ``_high`` are ends of 95 % bootstrap intervals. Relative
figures are without the samples in which FP32 is almost zero."""


def rows(
    fp32: Measured, measured: Sequence[Measured], score: Score, layers: Sequence[str], *, samples: int, seed: int
) -> list[dict[str, Any]]:
    """A mapping of :data:`COLUMNS` for FP32 and each INT8 graph under each shift; None: there is no such figure."""
    table: list[dict[str, Any]] = []
    places: list[tuple[int, str]] = []
    values: list[Floats] = []
    for item in (fp32, *measured):
        for condition in item.draws:
            row, wanted = _row(item, condition, fp32, score, layers)
            row["samples"] = samples
            places += [(len(table), figure) for figure in wanted]
            values += wanted.values()
            table.append(row)
    if values:  # one drawing of the samples for all of them
        for (index, figure), interval in zip(
            places, Resampling(samples, seed).intervals(np.stack(values)), strict=True
        ):
            table[index].update({figure: interval.mean, f"{figure}_low": interval.low, f"{figure}_high": interval.high})
    return table


def _row(
    item: Measured, condition: Condition, fp32: Measured, score: Score, layers: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Floats]]:
    """The row, and the figures per sample that get an interval."""
    kind, strength = condition
    figures = item.figures(condition)
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row.update(
        calibrator=item.label,
        name=None if item.variant is None else item.variant.calibrator,
        params=None if item.variant is None else canonical_json(item.variant.params),
        calibration_samples=item.calibration_samples,
        calibration_subset=item.subset,
        shift=kind,
        strength=strength,
        draws=len(item.draws[condition]),
        clipping_share=item.clipping_share,
        graph=item.graph,
    )
    wanted: dict[str, Floats] = {
        figure: figures[figure] for figure in (TOP1, METRIC, AGREEMENT, RELATIVE_L2) if figure in figures
    }
    wanted.update(_drops(figures, condition, fp32, score, is_fp32=item.variant is None))
    finite = {name: values for name, values in wanted.items() if has_figure({**figures, name: values}, name)}
    for figure in (TOP5, COSINE):
        if has_figure(figures, figure):
            row[figure] = float(np.nanmean(figures[figure]))
    if RELATIVE_L2 in finite:
        row["sqnr_db"] = _decibels(finite[RELATIVE_L2])
    known = item.layers is not None and np.isfinite(item.layers).any()
    if item.layers is not None and known and condition == (CLEAN.kind, CLEAN.strength):
        worst = int(np.nanargmax(item.layers))
        row.update(worst_layer=layers[worst], worst_layer_relative_l2=float(item.layers[worst]))
    return row, finite


def _drops(
    figures: Mapping[str, Floats], condition: Condition, fp32: Measured, score: Score, *, is_fp32: bool
) -> dict[str, Floats]:
    """Per sample. A score that is a comparison with FP32 under the same shift has no drop from the clean one."""
    if score.own:
        values = score.of(figures)
        return {
            "drop_from_clean": score.of(fp32.clean) - values,
            "drop_from_shifted": score.of(fp32.figures(condition)) - values,
        }
    if is_fp32:
        return {}
    perfect = 0.0 if score.figure == RELATIVE_L2 else 1.0
    return {"drop_from_shifted": perfect - score.of(figures)}


def _decibels(relative: Floats) -> float | None:
    """SQNR from the root mean square of the samples' relative errors; None where there is no error at all."""
    mean_square = float(np.nanmean(relative**2))
    return None if mean_square == 0.0 else -10.0 * float(np.log10(mean_square))


def write_csv(path: Path, table: Sequence[Mapping[str, Any]]) -> None:
    import csv

    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in table:
        writer.writerow({key: repr(value) if isinstance(value, float) else value for key, value in row.items()})
    write_text(path, stream.getvalue())


def write_parquet(path: Path, table: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {**dict.fromkeys(_TEXT, pa.string()), **dict.fromkeys(_WHOLE, pa.int64())}
    columns = {name: pa.array([row[name] for row in table], type=kinds.get(name, pa.float64())) for name in COLUMNS}
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    write_bytes(path, stream.getvalue())
