"""Figures of a benchmark."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from pipeline.core.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.engine.bench import Measurement

__all__ = ["plot_throughput"]


def plot_throughput(path: Path, found: Sequence[Measurement], *, title: str) -> None:
    """Throughput over batch, a line for each engine, dashed without CUDA graph; bars span the rounds (the noise)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    names = list(dict.fromkeys(m.name for m in found))
    colours = dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name in names:
        for graph in (True, False):
            line = sorted((m for m in found if m.name == name and m.cuda_graph == graph), key=lambda m: m.batch)
            if not line:
                continue
            rates = [m.throughput for m in line]
            low = [m.throughput - 1000 * m.batch / max(m.rounds_ms) for m in line]
            high = [1000 * m.batch / min(m.rounds_ms) - m.throughput for m in line]
            axes.errorbar(
                [m.batch for m in line],
                rates,
                yerr=[low, high],
                color=colours[name],
                linestyle="-" if graph else "--",
                marker="o",
                markersize=4,
                capsize=2,
                label=f"{name}{', CUDA graph' if graph else ''}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({m.batch for m in found})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch")
    axes.set_ylabel("samples per second")
    axes.set_title(title)
    axes.grid(visible=True, which="both", linewidth=0.4, alpha=0.5)
    axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    plt.close(figure)
    write_bytes(path, buffer.getvalue())
