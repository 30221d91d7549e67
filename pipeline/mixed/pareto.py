"""The points that were measured: accuracy against speed, as a table and as a picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from pipeline.accuracy import Figures
from pipeline.core.files import write_bytes
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.accuracy import Target
    from pipeline.mixed.cost import Costs
    from pipeline.mixed.search import Checked

__all__ = ["Point", "pareto_plot", "pareto_points"]


class Point(Record):
    """One row of the table."""

    number: int
    """What ``--choose`` takes."""
    restored: tuple[str, ...]
    """Nodes back in float."""
    repaired: bool
    equalised: bool
    """Made from the float model with equalised channels."""
    figures: Figures
    """On the check set, by which points are chosen."""
    unseen: Figures | None
    """On samples that the search never used; None: not measured (all but the first and the taken point)."""
    int8_share: float
    """Share of the multiply-accumulates that run in INT8."""
    lost: float
    """Cost of the restored nodes, in the table's unit."""
    meets: bool
    """Meets the target."""
    best: bool
    """No other point is at least as accurate and as fast, and better in one of the two."""
    chosen: bool


def pareto_points(
    checked: Sequence[Checked],
    chosen: Checked,
    costs: Costs,
    quantized: Sequence[Sequence[str]],
    target: Target,
    unseen: Mapping[str, Figures],
) -> tuple[Point, ...]:
    """Rows in order of speed, the fastest first.

    Args:
        unseen: figures on other samples, by the candidate's key.
        quantized: for each of ``checked``, the nodes that compute in INT8.
    """
    rows = []
    for item, nodes in zip(checked, quantized, strict=True):
        rows.append((costs.lost(item.candidate.restored), -item.figures.sqnr_db, item, costs.int8_share(set(nodes))))
    rows.sort(key=lambda row: (row[0], row[1]))
    shortfalls = [target.shortfall(row[2].figures) for row in rows]
    points = []
    for number, (lost, _, item, share) in enumerate(rows):
        own = shortfalls[number]
        beaten = any(
            rows[other][0] <= lost and shortfalls[other] <= own and (rows[other][0] < lost or shortfalls[other] < own)
            for other in range(len(rows))
        )
        points.append(
            Point(
                number=number,
                restored=tuple(sorted(item.candidate.restored)),
                repaired=item.candidate.repairs.any,
                equalised=item.candidate.repairs.equalised,
                figures=item.figures,
                unseen=unseen.get(item.candidate.key),
                int8_share=share,
                lost=lost,
                meets=own <= 0,
                best=not beaten,
                chosen=item.candidate.key == chosen.candidate.key,
            )
        )
    return tuple(points)


def pareto_plot(path: Path, points: Sequence[Point], target: Target, unit: str) -> None:
    """Write the picture: the target's figure over what the nodes in float cost."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def height(point: Point) -> float:
        if target.kind == "min_sqnr":
            return point.figures.sqnr_db
        return 100.0 * ((point.figures.drop or 0.0) if target.kind == "max_drop" else (point.figures.agreement or 0.0))

    def speed(point: Point) -> float:
        return point.lost if unit == "ms" else point.lost / 1e6

    titles = {"min_sqnr": "SQNR at the output, dB", "max_drop": "top-1 drop, points", "min_agreement": "agreement, %"}
    figure = Figure(figsize=(8.0, 5.0), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    front = sorted((point for point in points if point.best), key=lambda point: point.lost)
    axes.plot([speed(p) for p in front], [height(p) for p in front], color="#9aa6b5", linewidth=1.2, zorder=1)
    for point in points:
        colour = "#1a7f37" if point.meets else "#c0392b"
        place = (speed(point), height(point))
        axes.scatter(
            *place,
            s=130 if point.chosen else 45,
            color=colour,
            edgecolor="black",
            linewidth=1.6 if point.chosen else 0.4,
            zorder=2,
        )
        axes.annotate(str(point.number), place, xytext=(6, 6), textcoords="offset points", fontsize=8)
    limit = target.value if target.kind == "min_sqnr" else 100 * target.value
    axes.axhline(limit, color="#2166ac", linestyle="--", linewidth=1)
    axes.annotate(
        f"target: {target}",
        (0.01, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=8,
        color="#2166ac",
    )
    axes.set_xlabel("lost against all in INT8, " + ("ms" if unit == "ms" else "million multiply-accumulates"))
    axes.set_ylabel(titles[target.kind])
    if target.kind == "max_drop":
        axes.invert_yaxis()
    axes.grid(color="#e3e7ed")
    axes.set_title(
        f"Mixed precision: {len(points)} networks measured (cost in {unit}); the large dot is the one taken",
        fontsize=10,
    )
    figure.tight_layout()
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    write_bytes(path, stream.getvalue())
