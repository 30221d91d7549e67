"""`quantize errors`: where an artifact's accuracy went, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import JsonCommand, console, make_progress, output_options, print_json, user_errors
from pipeline.cli.idle import refuse_idle
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from pipeline.config import Preprocess
    from pipeline.engine.capture import Recorded
    from pipeline.reports.error_report import ErrorReport


@click.command(cls=JsonCommand)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--data",
    help="Folder of images, .npy, .npz or file.py:callable [the samples that the build verified on, where its files "
    "are still as they were; otherwise, or for an engine, the few kept in the artifact].",
)
@click.option("--preprocess", help="Images: preset or key=value;... [as in the build].")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Measure on so many [as in the build; of other data 64, or all that are labelled].",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Samples read at a time.")
@click.option("--labels", type=click.Path(path_type=Path), help="CSV with file,class_index or index,class_index.")
@click.option("--engine", type=click.Choice(["tensorrt", "rtx"]), help="Also read the engine's tensors, on a GPU here.")
@click.option("--engine-tensors", type=click.Path(path_type=Path), help="An engine's tensors recorded elsewhere, .npz.")
@click.option(
    "--engine-capture",
    type=click.Choice(["debug-tensors", "marked-outputs"]),
    help="With --engine: unfused debug tensors (TensorRT 10.12 and newer: fusion stays as it is) or marked outputs "
    "(of a Q/DQ graph its INT8 tensors first, which keeps kernels whole) [debug tensors where the version has them and "
    "shows any].",
)
@click.option(
    "--qat", type=click.Path(path_type=Path), help="A Q/DQ graph from quantisation-aware training to compare."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write here [ARTIFACT/reports; of other samples than the build's, ARTIFACT/reports/other-samples].",
)
@output_options
@user_errors
def command(
    artifact: Path,
    preprocess: str | None,
    engine_capture: str | None,
    qat: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Measure every quantised layer of ARTIFACT and write its error report.

    Accumulated and local error, weights and activations apart, clipping and rounding, every calibrator beside the one
    in use: errors.parquet, errors.csv, heatmaps and report.html. Only a report of the samples that the build verified
    on takes the place of the build's.
    """
    from pipeline.cli.places import check_out_folder
    from pipeline.reports.error_report import report_artifact

    if options["engine"] is None:
        refuse_idle(("engine_capture",), "an engine that is built and read here", "give --engine as well")
    if options["data"] is None:
        refuse_idle(("samples", "batch_size"), "the samples of --data", "give --data as well")
    if options["out"] is not None:
        check_out_folder(options["out"])
    progress = make_progress(quiet=quiet, verbose=verbose)
    report = report_artifact(
        artifact,
        preprocess=None if preprocess is None else parse_preprocess(preprocess),
        engine_capture=_recorded(engine_capture),
        qat=qat,
        progress=progress,
        **options,
    )
    if as_json:
        print_json(report.model_dump(mode="json"))
    elif not quiet:
        print_report(report)


def _recorded(choice: str | None) -> Recorded | None:
    if choice is None:
        return None
    return "debug tensors" if choice == "debug-tensors" else "marked outputs"


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
    from pipeline.errors.figures import layers_remark

    out = console()
    headers = ("layers", "local\nmean", "\nstd", "\nmax", "accum.\nmean", "\nstd", "\nmax")
    operators = new_table(
        "relative L2 error by operator type, per cent",
        ("operator", "text"),
        *((name, "figure") for name in headers),
        dense=True,
    )
    for row in report.operators:
        cells = [row[f"{kind}_{part}"] for kind in ("local", "accumulated") for part in ("mean", "std", "max")]
        add_row(operators, row["op"], str(row["layers"]), *("-" if cell is None else f"{cell:.3g}" for cell in cells))
    print_table(out, operators)
    worst = new_table(
        "layers that make the largest error themselves, relative L2",
        ("layer", "text"),
        ("operator", "word"),
        *((name, "figure") for name in ("local", "weights", "activ.", "accum.", "max\nabs.")),
        ("cause", "word"),
        dense=True,
    )
    for row in report.worst:
        cells = [row[key] for key in ("local", "weights", "activations", "accumulated")]
        shown = ("-" if cell is None else f"{cell:.4f}" for cell in cells)
        add_row(worst, row["node"], row["op"], *shown, f"{row['max_abs']:.3g}", row["cause"])
    print_table(out, worst)
    for name, output in report.outputs.items():
        out.print(f"output {name}: {output.text(report.samples)}", markup=False)
    if zeros := layers_remark(report.almost_zero, report.layers, report.samples):
        out.print(zeros, markup=False)
    if report.top1_fp32 is not None and report.top1_int8 is not None:
        out.print(f"top-1: FP32 {100 * report.top1_fp32:.2f} %, INT8 {100 * report.top1_int8:.2f} %")
    if report.engine:
        layers = ", ".join(f"{count} {kind}" for kind, count in report.engine_layers.items())
        recorded = f", recorded: {report.recorded}" if report.recorded else ""
        out.print(f"{report.engine}{recorded}; layers: {layers}", markup=False)
        for reason, count in report.engine_hidden.items():
            out.print(f"  not shown, {count}: {reason}", markup=False)
    for line in report.comparison:
        out.print(line, markup=False)
    out.print(f"measured on {report.data}; see {report.folder / 'report.html'}", markup=False, soft_wrap=True)
