"""`reports/summary.md`: the manifest as a page to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.reports.points import search_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.artifact import Manifest

__all__ = ["summary_markdown"]

_WORST = 10


def summary_markdown(manifest: Manifest) -> str:
    """Source, data, accuracy, worst layers, engines and warnings, as Markdown."""
    data, calibration, figures = manifest.data, manifest.calibration, manifest.verification
    lines = [
        f"# {manifest.name}",
        "",
        f"- model: `{manifest.source.spec}`, SHA-256 `{manifest.source.sha256}`",
        f"- data: `{data.spec}`, SHA-256 `{data.sha256}`",
        f"- calibrated with {calibration} on {data.calibration_samples} samples, {calibration.tensors} tensors",
        f"- verified on {data.verification_samples} samples"
        + (" held aside from calibration" if data.held_aside else ", **not held aside from calibration**"),
        "",
        "## Accuracy",
        "",
    ]
    if figures.get("top1_fp32") is not None:
        fp32, int8 = 100 * figures["top1_fp32"], 100 * figures["top1_int8"]
        lines += [f"Top-1: FP32 {fp32:.2f} %, INT8 {int8:.2f} % ({int8 - fp32:+.2f} points).", ""]
    rows = [(f"`{output['name']}`", *_output_cells(output)) for output in figures.get("outputs", [])]
    lines += _table(("output", "relative L2, mean", "worst sample", "cosine, mean", "arg-max agreement"), rows)
    if worst := figures.get("worst", [])[:_WORST]:
        lines += [
            "",
            "## Layers with the largest error",
            "",
            "Relative L2 error, accumulated from the input on; all layers are in `errors.csv`.",
            "",
        ]
        lines += _table(
            ("layer", "operator", "mean", "worst sample"),
            [
                (
                    f"`{layer['layer']}`",
                    layer["op"],
                    f"{layer['relative_l2_mean']:.5f}",
                    f"{layer['relative_l2_max']:.5f}",
                )
                for layer in worst
            ],
        )
    if manifest.mixed:
        lines += ["", "## Mixed precision", "", *_mixed(manifest.mixed)]
    if manifest.targets:
        lines += ["", "## Engines", ""]
        rows_targets = [
            (
                name,
                str(record.get("version") or "-"),
                f"{record['plan_bytes'] / 1e6:.1f} MB" if record.get("plan_bytes") else "-",
                f"{record['build_seconds']:.1f} s" if record.get("build_seconds") is not None else "-",
                str(record.get("built_on") or "-"),
            )
            for name, record in sorted(manifest.targets.items())
        ]
        lines += _table(("target", "version", "plan", "build time", "built on"), rows_targets)
    if manifest.warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in manifest.warnings)]
    return "\n".join(lines) + "\n"


def _mixed(entry: dict[str, Any]) -> list[str]:
    """The points of a search, as a table, and what they were judged by."""
    reached = "" if entry["reached"] else ", which no mix reaches"
    unseen = (
        f" The figures above are of {entry['unseen_samples']} others, which the search never saw."
        if entry["unseen_samples"]
        else " The figures above are of the same samples, and flatter."
    )
    table = search_table(entry)
    rows = [
        (f"**{number}**" if row == table.built else number, *cells) for row, (number, *cells) in enumerate(table.rows)
    ]
    return [
        f"Target: {entry['text']}{reached}. Points are judged on {entry['check_samples']} held-aside samples.{unseen}",
        f"The bold one was built, with {len(entry['restored'])} nodes back in float and {entry['repairs']} repairs; "
        "`--choose` builds another. All of it is in `pareto.json`, the picture in `pareto.png`.",
        "",
        *_table(table.header, rows),
        "",
        "\\* nothing measured is faster and as accurate",
    ]


def _output_cells(output: dict[str, Any]) -> tuple[str, ...]:
    if output.get("relative_l2_mean") is None:
        return ("-", "-", "-", str(output.get("note") or "-"))
    agreement = output.get("agreement")
    return (
        f"{output['relative_l2_mean']:.5f}",
        f"{output['relative_l2_max']:.5f}",
        f"{output['cosine_mean']:.6f}",
        "-" if agreement is None else f"{100 * agreement:.2f} %",
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = "| " + " | ".join(header) + " |"
    return [
        line,
        "|" + " --- |" * len(header),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]
