"""`reports/summary.md`: the manifest as a page to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.errors.figures import OutputFigures, layers_remark
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
        f"- scales of {calibration}, {calibration.tensors} tensors"
        if calibration.given
        else f"- calibrated with {calibration} on {data.calibration_samples} samples, {calibration.tensors} tensors",
        f"- verified on {data.verification_samples} samples"
        + (" held aside from calibration" if data.held_aside else ", **not held aside from calibration**"),
        *([f"- float16: {', '.join(f'`{name}`' for name in manifest.fp16_io)}"] if manifest.fp16_io else []),
        "",
        "## Accuracy",
        "",
    ]
    if figures.get("top1_fp32") is not None:
        fp32, int8 = 100 * figures["top1_fp32"], 100 * figures["top1_int8"]
        lines += [f"Top-1: FP32 {fp32:.2f} %, INT8 {int8:.2f} % ({int8 - fp32:+.2f} points).", ""]
    outputs = [OutputFigures.model_validate(output) for output in figures.get("outputs", [])]
    header = ("output", "relative L2, mean", "worst sample", "largest absolute error", "range", "cosine, mean")
    rows = [(f"`{output.name}`", *_output_cells(output)) for output in outputs]
    lines += _table((*header, "arg-max agreement"), rows)
    for output in outputs:
        if remark := output.remark(figures["samples"]):
            lines += ["", f"`{output.name}`: {remark}."]
    if worst := figures.get("worst", [])[:_WORST]:
        lines += [
            "",
            "## Layers with the largest error",
            "",
            "Relative L2 error, accumulated from the input on; all layers are in `errors.csv`.",
            "",
        ]
        zeros = layers_remark(figures.get("almost_zero_layers") or {}, figures["layers"], figures["samples"])
        lines += [f"{zeros}.", ""] if zeros else []
        lines += _table(
            ("layer", "operator", "mean", "worst sample", "largest absolute error"),
            [
                (
                    f"`{layer['layer']}`",
                    layer["op"],
                    _figure(layer["relative_l2_mean"], ".5f"),
                    _figure(layer["relative_l2_max"], ".5f"),
                    _figure(layer.get("max_abs"), ".4g"),
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
        f"The bold one was built, with {_count(len(entry['restored']), 'node')} back in float and "
        f"{_count(entry['repairs'], 'repair')}; "
        "`--choose` builds another. All of it is in `pareto.json`, the picture in `pareto.png`." + _as_verified(entry),
        "",
        *_table(table.header, rows),
        "",
        "\\* nothing measured is faster and as accurate",
    ]


def _as_verified(entry: dict[str, Any]) -> str:
    """The graph that was built, in the target's figure, by the verification and not by the search."""
    from pipeline.accuracy import Figures, Target

    if "verified" not in entry:  # an earlier version wrote it
        return ""
    target, figures = Target.model_validate(entry["target"]), dict(entry["verified"])
    meets = "meets" if figures.pop("meets") else "misses"
    return f" As verified it {meets} the target: {target.describe(Figures.model_validate(figures))}."


def _output_cells(output: OutputFigures) -> tuple[str, ...]:
    return (
        _figure(output.relative_l2_mean, ".5f"),
        _figure(output.relative_l2_max, ".5f"),
        _figure(output.max_abs, ".4g"),
        _figure(output.value_range, ".4g"),
        _figure(output.cosine_mean, ".6f"),
        "-" if output.agreement is None else f"{100 * output.agreement:.2f} %",
    )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = "| " + " | ".join(header) + " |"
    return [
        line,
        "|" + " --- |" * len(header),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
