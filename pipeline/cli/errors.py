"""`quantize errors`: where an artifact's accuracy went, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import console, make_progress, output_options, print_json, user_errors

if TYPE_CHECKING:
    from pipeline.config import Preprocess
    from pipeline.errors.report import ErrorReport


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--data", help="Folder of images, .npy, .npz or file.py:callable [the samples kept in the artifact].")
@click.option("--preprocess", help="Images: preset or key=value;... [as in the build].")
@click.option("--samples", type=click.IntRange(min=1), help="Measure on so many [64, or all that are labelled].")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Samples read at a time.")
@click.option("--labels", type=click.Path(path_type=Path), help="CSV with file,class_index or index,class_index.")
@click.option("--engine", type=click.Choice(["tensorrt", "rtx"]), help="Also read the engine's tensors, on a GPU here.")
@click.option("--engine-tensors", type=click.Path(path_type=Path), help="An engine's tensors recorded elsewhere, .npz.")
@click.option(
    "--qat", type=click.Path(path_type=Path), help="A Q/DQ graph from quantisation-aware training to compare."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write here, not into the artifact's reports.")
@output_options
@user_errors
def command(
    artifact: Path,
    preprocess: str | None,
    qat: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Measure every quantised layer of ARTIFACT and write its error report.

    Accumulated and local error, weights and activations apart, clipping and rounding, every calibrator beside the one
    in use: errors.parquet, errors.csv, heatmaps and report.html.
    """
    from pipeline.errors.report import report_artifact

    progress = make_progress(quiet=quiet, verbose=verbose)
    report = report_artifact(
        artifact,
        preprocess=None if preprocess is None else parse_preprocess(preprocess),
        qat=qat,
        progress=progress,
        **options,
    )
    if as_json:
        print_json(report.model_dump(mode="json"))
    elif not quiet:
        print_report(report)


def parse_preprocess(text: str) -> Preprocess:
    """``--preprocess`` as its record, or an :class:`InputError` saying what is wrong with it."""
    from pydantic import ValidationError

    from pipeline.config import Preprocess
    from pipeline.core.errors import InputError

    try:
        return Preprocess.model_validate(text)
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise InputError(f"--preprocess {text!r}: {reasons}") from error


def print_report(report: ErrorReport) -> None:
    """Errors by operator type, the layers that make most themselves, the outputs, and where the files are."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from pipeline.reports.heatmap import shortened

    out = console()
    layout: dict[str, Any] = {"title_justify": "left", "box": SIMPLE_HEAD, "pad_edge": False, "padding": 0}
    operators = Table(title="relative L2 error by operator type, per cent", **layout)
    operators.add_column("operator")
    for column in ("layers", "local\nmean", "\nstd", "\nmax", "accum.\nmean", "\nstd", "\nmax"):
        operators.add_column(column, justify="right")
    for row in report.operators:
        cells = [row[f"{kind}_{part}"] for kind in ("local", "accumulated") for part in ("mean", "std", "max")]
        operators.add_row(row["op"], str(row["layers"]), *("-" if cell is None else f"{cell:.3g}" for cell in cells))
    out.print(operators)
    worst = Table(title="layers that make the largest error themselves", **layout)
    worst.add_column("layer", no_wrap=True)
    worst.add_column("operator", no_wrap=True, min_width=7)
    for column in ("local", "weights", "activ.", "accum."):
        worst.add_column(column, justify="right", no_wrap=True, min_width=7)
    worst.add_column("cause", no_wrap=True, min_width=8)
    names = shortened([row["node"] for row in report.worst], lengths=(28, 48, 96))
    for name, row in zip(names, report.worst, strict=True):
        cells = [row[key] for key in ("local", "weights", "activations", "accumulated")]
        worst.add_row(name, row["op"], *("-" if cell is None else f"{cell:.4f}" for cell in cells), row["cause"])
    out.print(worst)
    for name, output in report.outputs.items():
        if output.get("note"):
            out.print(f"output {name}: {output['note']}", markup=False)
            continue
        agreement = "" if output["agreement"] is None else f", arg-max agreement {100 * output['agreement']:.2f} %"
        figures = f"relative L2 {output['relative_l2_mean']:.4f}, cosine {output['cosine_mean']:.5f}"
        out.print(f"output {name}: {figures}{agreement}", markup=False)
    if report.top1_fp32 is not None and report.top1_int8 is not None:
        out.print(f"top-1: FP32 {100 * report.top1_fp32:.2f} %, INT8 {100 * report.top1_int8:.2f} %")
    for line in report.comparison:
        out.print(line, markup=False)
    out.print(f"measured on {report.data}; see {report.folder / 'report.html'}", markup=False, soft_wrap=True)
