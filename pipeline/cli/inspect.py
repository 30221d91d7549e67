"""`quantize inspect`: an artifact as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import JsonCommand, console, output_options, print_json, user_errors
from pipeline.cli.idle import refuse_idle
from pipeline.cli.mixed_options import mixed_table
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.artifact import Artifact, Manifest


@click.command(cls=JsonCommand)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--scales", is_flag=True, help='Also list the scale of every tensor, as "scales" in --json.')
@click.option("--engine", "target", metavar="TARGET", help="Show the layers of this target's engine instead.")
@click.option("--batch", type=click.IntRange(1), help="With --engine: time each layer at this batch size, on a GPU.")
@output_options
@user_errors
def command(
    artifact: Path, scales: bool, target: str | None, batch: int | None, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Show what ARTIFACT holds: source, data, calibrator, targets, verification figures and files."""
    from pipeline.artifact import Artifact

    if target is None:
        refuse_idle(("batch",), "the layers of an engine", "give --engine as well")
    else:
        refuse_idle(("scales",), "the artifact's own tables", "leave --engine out")
    opened = Artifact.open(artifact)
    if target is not None:
        _show_engine(opened, target, batch, as_json=as_json)
        return
    if as_json:
        listed = {"scales": activation_scales(opened)} if scales else {}
        print_json({**opened.manifest.model_dump(mode="json"), **listed})
        return

    out = console()
    print_table(out, summary_table(opened.manifest))
    if opened.manifest.targets:
        print_table(out, targets_table(opened.manifest))
    for table in choices_tables(opened.manifest):
        print_table(out, table)
    if opened.manifest.mixed:
        print_table(out, mixed_table(opened.manifest.mixed))
    print_table(out, files_table(opened.manifest))
    if scales:
        print_table(out, scales_table(opened))
    for warning in opened.manifest.warnings:
        out.print(f"warning: {warning}", style="yellow")


def _show_engine(artifact: Artifact, target: str, batch: int | None, *, as_json: bool) -> None:
    from pipeline.cli.engine_view import print_view
    from pipeline.engine.view import view_engine

    view = view_engine(artifact, target, batch=batch)
    if as_json:
        print_json(view.model_dump(mode="json"))
    else:
        print_view(console(), view)


def _rows(title: str, rows: list[tuple[str, str]]) -> Table:

    table = new_table(title, ("", "text"), ("", "text"), header=False)
    for key, value in rows:
        add_row(table, key, value)
    return table


def summary_table(manifest: Manifest) -> Table:
    """Source, data, calibrator, profiles and verification figures, a row each."""
    data, calibration = manifest.data, manifest.calibration
    aside = "" if data.held_aside else " (not held aside)"
    rows = [
        ("model", f"{manifest.source.spec} ({manifest.source.kind}), SHA-256 {manifest.source.sha256[:12]}"),
        ("data", f"{data.spec}, {data.calibration_samples} to calibrate, {data.verification_samples} to verify{aside}"),
        ("calibrator", f"{calibration}, {calibration.tensors} tensors"),
        *([("float16", ", ".join(manifest.fp16_io))] if manifest.fp16_io else []),
        *((f"profile {number}", text) for number, text in enumerate(manifest.profiles)),
        *(verification_rows(manifest)),
        ("made", manifest.created),
        ("with", ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))),
    ]
    return _rows(manifest.name, rows)


def verification_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """The figures people look for first; every one of them is in the manifest under ``verification``."""
    from pipeline.errors.figures import OutputFigures, layers_remark

    figures = manifest.verification
    rows: list[tuple[str, str]] = []
    if figures.get("top1_fp32") is not None:
        fp32, int8 = 100 * figures["top1_fp32"], 100 * figures["top1_int8"]
        count = figures.get("labelled_samples", figures["samples"])
        text = f"FP32 {fp32:.2f} %, INT8 {int8:.2f} % ({int8 - fp32:+.2f} points) on {count} samples"
        rows.append(("top-1", text))
    outputs = [OutputFigures.model_validate(output) for output in figures.get("outputs", [])]
    rows += [(f"output {output.name}", output.text(figures["samples"])) for output in outputs]
    zeros = layers_remark(figures.get("almost_zero_layers") or {}, figures.get("layers", 0), figures.get("samples", 0))
    return [*rows, ("layers", zeros)] if zeros else rows


def targets_table(manifest: Manifest) -> Table:

    table = new_table(
        "targets",
        ("target", "word"),
        ("version", "text"),
        ("plan", "figure"),
        ("build", "figure"),
        ("peak\nmemory", "figure"),
        ("where", "text"),
    )
    for name, record in sorted(manifest.targets.items()):
        size, seconds, peak = record.get("plan_bytes"), record.get("build_seconds"), record.get("peak_memory_bytes")
        add_row(
            table,
            name,
            str(record.get("version", "")),
            f"{size / 1e6:.1f} MB" if size else "-",
            f"{seconds:.1f} s" if seconds is not None else "-",
            f"{peak / 1e6:.0f} MB" if peak else "-",
            str(record.get("built_on") or ""),
        )
    return table


def choices_tables(manifest: Manifest) -> list[Table]:
    """Of each target that was built with --fastest: what was measured, and which plan serves which profile."""
    from pipeline.cli.choices import choices_table
    from pipeline.engine.fastest import Fastest

    return [
        choices_table(f"{name}: which plan serves which profile", Fastest.model_validate(record["fastest"]).choices)
        for name, record in sorted(manifest.targets.items())
        if "fastest" in record
    ]


def files_table(manifest: Manifest) -> Table:

    table = new_table("files", ("file", "text"), ("size", "figure"), ("SHA-256", "word"))
    for name, record in sorted(manifest.files.items()):
        add_row(table, name, f"{record.bytes / 1e3:,.1f} kB", record.sha256[:12])
    return table


def activation_scales(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """Tensor to its ``amax``, ``scale``, ``min``, ``max`` and ``calibrator``.

    Raises:
        InputError: the file is not in the artifact or not what it should be.
    """
    import json

    from pipeline.artifact import SCALES
    from pipeline.core.errors import InputError

    path = artifact.path(SCALES)
    try:
        found: dict[str, dict[str, Any]] = dict(json.loads(path.read_text())["tensors"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} has no scales that can be read: {error}",
            remedy="the file is as the manifest lists it: build the artifact again",
        ) from error
    return found


def scales_table(artifact: Artifact) -> Table:
    figures = ("amax", "scale", "min", "max")
    table = new_table(
        "activation scales", ("tensor", "text"), *((name, "figure") for name in figures), ("calibrator", "word")
    )
    for name, entry in activation_scales(artifact).items():
        add_row(table, name, *(f"{entry[key]:.6g}" for key in figures), str(entry["calibrator"]))
    return table
