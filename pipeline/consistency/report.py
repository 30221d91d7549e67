"""A comparison as table, JSON and heatmap."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.consistency.comparison import describe
from pipeline.core.files import finite_json, write_bytes, write_json, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.consistency.batches import BatchReport
    from pipeline.consistency.comparison import Comparison, Row
    from pipeline.consistency.ranks import RanksReport

__all__ = [
    "BATCHES", "HEATMAP", "SNAPSHOT", "TABLE", "batches_text", "ranks_text", "relative_differences", "summary", "table",
    "write_batches", "write_snapshot",
]  # fmt: skip

SNAPSHOT, TABLE, HEATMAP = "consistency.json", "consistency.txt", "consistency.png"
BATCHES = "batches"
"""Stem of the files about single batches."""
_FLOOR, _CENTRE = 1e-8, 1e-5
"""Least relative difference that the heatmap shows, and the middle of its colours: the usual tolerance."""


def write_snapshot(folder: Path, comparison: Comparison) -> list[Path]:
    """Write the table, the JSON and the heatmap of a comparison into ``folder``; the files, in that order."""
    paths = [folder / TABLE, folder / SNAPSHOT, folder / HEATMAP]
    write_text(paths[0], table(comparison))
    write_json(
        paths[1],
        finite_json(
            {
                **comparison.model_dump(mode="json"),
                "consistent": comparison.consistent,
                "rate": comparison.rate,
                "who": list(comparison.who),
            }
        ),
    )
    write_bytes(paths[2], heatmap(comparison))
    return paths


def table(comparison: Comparison, *, most: int | None = None) -> str:
    """Every tensor that differs, worst first, a column for each context; then the verdict.

    Args:
        most: rows to show; None: all.
    """
    rows = sorted(comparison.mismatches, key=lambda row: (row.problem == "scale", -row.relative))
    header = ("tensor", *comparison.labels, "largest difference", "relative", "who differs")
    lines: list[tuple[str, ...]] = [header]
    for row in rows[:most]:
        name = row.tensor if row.channel is None else f"{row.tensor}[{row.channel}]"
        who = ", ".join(comparison.labels[number] for number in row.differs)
        if row.problem == "scale":
            difference, relative = f"{row.difference:.4g}", f"{100 * row.relative:.4g} %"
        else:
            difference, relative = row.detail, "-"
        lines.append((name, *(_value(value) for value in row.values), difference, relative, who))
    text = _aligned(lines) + "\n" if rows else ""
    if most is not None and len(rows) > most:
        text += f"and {len(rows) - most} more\n"
    return text + summary(comparison) + "\n"


def summary(comparison: Comparison) -> str:
    """One line when all agree; otherwise how many differ, where, and the likely cause."""
    if not comparison.consistent:
        return f"{describe(comparison, most=0)}\nconsistency {_percent(comparison.rate)}"
    same = len(set(comparison.digests)) == 1
    worst = comparison.worst
    bits = "bit for bit" if same else f"largest difference {100 * worst.relative:.3g} % ({worst.tensor})"
    return (
        f"{len(comparison.rows)} tensors agree in {len(comparison.labels)} contexts, {bits} ({comparison.tolerance}): "
        f"consistency {_percent(comparison.rate)}"
    )


def _percent(rate: float) -> str:
    """Rounded down, so that 100 % means all."""
    return f"{math.floor(10000 * rate) / 100:.6g} %"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]]) + "\n"


def relative_differences(rows: Sequence[Row], count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """|scale - reference| / reference at each row's worst slice, (tensors, contexts); NaN where a context has none."""
    values = np.full((len(rows), count), np.nan)
    for number, row in enumerate(rows):
        for context, value in enumerate(row.values):
            if value is not None and row.reference:
                values[number, context] = abs(value - row.reference) / abs(row.reference)
    return values


def heatmap(comparison: Comparison) -> bytes:
    """Tensors x contexts, coloured by the relative difference from what most contexts say, as PNG."""
    from pipeline.reports.heatmap import heatmap_png

    tolerance = comparison.tolerance
    differences = relative_differences(comparison.rows, len(comparison.labels))
    return heatmap_png(
        np.log10(np.maximum(differences, _FLOOR) / _FLOOR),
        [row.tensor for row in comparison.rows],
        list(comparison.labels),
        colour_label=f"Relative difference of the scale: decades above {_FLOOR:g}",
        title=f"{len(comparison.mismatches)} of {len(comparison.rows)} tensors differ ({tolerance})",
        centre=float(np.log10((tolerance.rtol or _CENTRE) / _FLOOR)),
    )


def ranks_text(report: RanksReport) -> str:
    """The check across ranks in lines for a terminal."""
    lines = [("scenario", "tensors", "consistent", "same bits", "largest difference")]
    for scenario in report.scenarios:
        lines.append(
            (
                scenario.name,
                str(scenario.tensors),
                _percent(scenario.rate),
                "yes" if scenario.identical else "no",
                f"{100 * scenario.largest:.3g} % ({scenario.worst})" if scenario.largest else "0",
            )
        )
    head = [
        f"{len(report.ranks)} ranks over {report.backend}, shards {report.shard}: {report.batches} batches, "
        f"{report.samples} samples in {max(report.seconds):.1f} s, merged in {report.merge_seconds:.1f} s",
        *(f"  {rank}" for rank in report.ranks),
    ]
    tail = [
        "source of the largest difference:",
        *(f"  {scenario.name}: {scenario.source}" for scenario in report.scenarios),
        f"statistics {report.statistics}",
        f"scales     {report.digest}",
    ]
    return "\n".join(head) + "\n\n" + _aligned(lines) + "\n" + "\n".join(tail) + "\n"


def batches_text(report: BatchReport, *, most: int | None = None) -> str:
    """The spread over batches in lines for a terminal, the least certain tensors first."""
    lines: list[tuple[str, ...]] = [("tensor", "scale", "smallest", "median", "largest", "ratio", "within")]
    for row in report.rows[:most]:
        lines.append(
            (
                row.tensor,
                *(f"{value:.6g}" for value in (row.merged, row.smallest, row.median, row.largest)),
                f"{row.ratio:.3g}",
                f"{row.within}/{row.seen}",
            )
        )
    more = f"and {len(report.rows) - most} more\n" if most is not None and len(report.rows) > most else ""
    worry = report.worrying
    verdict = (
        f"{len(report.rows)} tensors, {len(report.batches)} batches, {report.calibrator}: "
        f"{_percent(report.rate)} of the batch scales are within {100 * report.rtol:g} % of the merged scale"
    )
    named = ", ".join(row.tensor for row in worry[:5]) + (", ..." if len(worry) > 5 else "")
    about = f"{len(worry)} tensors to worry about: {named}" if worry else "no tensor to worry about"
    return f"{_aligned(lines)}{more}\n{verdict}\n{about}\n"


def write_batches(folder: Path, report: BatchReport) -> list[Path]:
    """Table, JSON and heatmap (tensors x batches) of the spread over batches."""
    from pipeline.reports.heatmap import heatmap_png

    paths = [folder / f"{BATCHES}.{suffix}" for suffix in ("txt", "json", "png")]
    write_text(paths[0], batches_text(report))
    write_json(paths[1], finite_json({**report.model_dump(mode="json"), "rate": report.rate}))
    scales = np.array(report.scales, np.float64)
    merged = np.array([[row.merged] for row in report.rows])
    write_bytes(
        paths[2],
        heatmap_png(
            np.abs(scales - merged) / merged,
            [row.tensor for row in report.rows],
            [str(index) for index in report.batches],
            colour_label="Relative distance from the merged scale",
            column_label="Batch",
            title=f"The scale each batch alone would give ({report.calibrator})",
            centre=report.rtol,
        ),
    )
    return paths
