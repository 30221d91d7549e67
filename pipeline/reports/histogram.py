"""Distributions of activations with the calibrators' thresholds: people look rather than read."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from pipeline.artifact import calibrator_text
from pipeline.core.errors import InputError, did_you_mean
from pipeline.core.files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from calibrators import Calibrator, TensorStatistics

__all__ = ["density", "draw", "select", "thresholds"]

_POINTS = 256
_ROW_INCHES, _WIDTH_INCHES = 3.0, 11.0


def select(known: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that ``patterns`` (names or shell patterns) match, in the order of the patterns, each once.

    Raises:
        InputError: a pattern matches nothing.
    """
    names = list(known)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise InputError(f"no calibrated tensor is called or matches {pattern!r}; {did_you_mean(pattern, names)}")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def thresholds(stats: TensorStatistics, calibrators: Sequence[Calibrator]) -> list[tuple[str, float]]:
    """(calibrator, amax) in ascending order of amax, as the quantise stage would use them."""
    from calibrators import resolve_amax

    found = [(_label(each), resolve_amax(stats, each)[0]) for each in calibrators]
    return sorted(found, key=lambda item: item[1])


def _label(calibrator: Calibrator) -> str:
    return calibrator_text(calibrator.name, calibrator.params)


def density(stats: TensorStatistics, points: int = _POINTS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Edges (points + 1,) over [0, amax] and the share of the values between them (points,), exact zeros left out."""
    counts = stats.bins.astype(np.float64)
    counts[0] -= stats.zeros
    edges = np.linspace(0.0, stats.amax or 1.0, points + 1)
    cumulative = np.concatenate([[0.0], np.cumsum(counts)])
    positions = np.arange(counts.size + 1) * stats.width
    inside = np.diff(np.interp(edges, positions, cumulative))
    inside[-1] += cumulative[-1] - np.interp(edges[-1], positions, cumulative)  # the rest of the last used bin
    return edges, inside / max(stats.finite, 1)


def draw(
    statistics: Mapping[str, TensorStatistics], ranges: Mapping[str, Sequence[tuple[str, float]]], path: Path
) -> None:
    """One row per tensor: its distribution, logarithmic, and a line at every threshold. Writes a PNG."""
    import matplotlib
    import seaborn

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    labels = sorted({label for found in ranges.values() for label, _ in found})
    colours = dict(zip(labels, seaborn.color_palette("husl", max(len(labels), 1)), strict=False))
    with seaborn.axes_style("whitegrid"):
        figure = Figure(figsize=(_WIDTH_INCHES, 0.6 + _ROW_INCHES * len(statistics)), layout="constrained")
        rows = figure.subplots(len(statistics), 1, squeeze=False)[:, 0]
    for axes, (name, stats) in zip(rows, statistics.items(), strict=True):
        edges, share = density(stats)
        axes.stairs(share, edges, fill=True, color="0.75")
        axes.set_yscale("log")
        axes.set_xlim(0.0, edges[-1] * 1.02)
        for label, amax in ranges[name]:
            axes.axvline(amax, color=colours[label], linewidth=1.5, label=f"{label}: {amax:.4g}")
        zeros = stats.zeros / max(stats.finite, 1)
        axes.set_title(
            f"{name}   {stats.finite:,} values, {zeros:.1%} zeros, max |x| {stats.amax:.5g}", fontsize=9, loc="left"
        )
        axes.set_ylabel("share of values")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    rows[-1].set_xlabel("|x|")
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", dpi=110, metadata={"Software": None})
