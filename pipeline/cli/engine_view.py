"""Tables of an engine's layers, for `quantize inspect --engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pipeline.engine.lint import Finding
    from pipeline.engine.view import EngineView

__all__ = ["print_view"]


def print_view(out: Console, view: EngineView) -> None:
    """Layers, what the convolutions ended in, and what to change."""

    out.print(f"{view.target} engine, TensorRT {view.tensorrt}, {view.built_on}", markup=False)
    print_table(out, _layers(view))
    convolutions = [layer for layer in view.layers if layer.convolution]
    left = view.float_convolutions
    integer = sum(layer.computes_int8 for layer in convolutions)
    text = f"{len(convolutions)} convolutions, {integer} in INT8, {len(left)} in float"
    out.print(text + (f": {', '.join(layer.name for layer in left)}" if left else ""), markup=False)
    if view.times_ms:
        shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in view.shapes.items())
        out.print(f"{sum(view.times_ms.values()):.3f} ms in all at {shapes}", markup=False)
    for finding in view.findings:
        out.print(_finding(finding), markup=False)


def _layers(view: EngineView) -> Table:

    figures = ("nodes", "ms") if view.times_ms else ("nodes",)
    table = new_table(
        "layers",
        ("layer", "text"),
        ("in", "text"),
        ("out", "text"),
        ("tactic", "text"),
        *((name, "figure") for name in figures),
    )
    for layer in view.layers:
        inputs, outputs = (list(dict.fromkeys(t.dtype for t in part)) for part in (layer.inputs, layer.outputs))
        if inputs == ["unknown"]:
            inputs = [layer.computes_in]
        row = [layer.name, ", ".join(inputs), ", ".join(outputs), layer.tactic, str(len(layer.fused))]
        if view.times_ms:
            ms = view.times_ms.get(layer.name)
            row.append("-" if ms is None else f"{ms:.4f}")
        add_row(table, *row, style="dim" if layer.reformat else None)
    return table


def _finding(finding: Finding) -> str:
    cost = f" ({finding.ms:.4f} ms)" if finding.ms is not None else ""
    return f"{finding.kind}{cost}: {finding.where}: {finding.message}\n    -> {finding.remedy}"
