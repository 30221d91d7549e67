"""`quantize drift`: has recent data moved away from the calibrated ranges?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import JsonCommand, console, make_progress, output_options, print_json, user_errors
from pipeline.cli.numbers import POSITIVE
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from pipeline.compare.drift import DriftReport, Measure

_SHOWN = 10


@click.command(cls=JsonCommand)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--data", required=True, help="Recent data: folder of images, .npy, .npz, or file.py:callable.")
@click.option("--preprocess", help="Images: preset or key=value;... [as in the build].")
@click.option("--samples", type=click.IntRange(min=1), help="Look at the first so many [all].")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples a step of a moving average [as in the build].")
@click.option("--limit", type=POSITIVE, default=15.0, show_default=True, help="Per cent.")
@click.option(
    "--range",
    "measure",
    type=click.Choice(["percentile", "calibrator"]),
    default="percentile",
    show_default=True,
    help="Judge the 99.99th percentile of |x|, or what the artifact's calibrator gives.",
)
@output_options
@user_errors
def command(
    artifact: Path,
    data: str,
    preprocess: str | None,
    samples: int | None,
    batch_size: int | None,
    limit: float,
    measure: Measure,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Compare the ranges of recent data with those of ARTIFACT, layer by layer.

    Exit code 1 when a range moved by more than the limit.
    """
    from pipeline.cli.errors import parse_preprocess
    from pipeline.compare.drift import measure_drift
    from pipeline.core.errors import CheckFailed

    report = measure_drift(
        artifact,
        data,
        preprocess=None if preprocess is None else parse_preprocess(preprocess),
        samples=samples,
        batch_size=batch_size,
        limit=limit / 100.0,
        measure=measure,
        progress=make_progress(quiet=quiet, verbose=verbose),
    )
    figures = {**report.model_dump(mode="json"), "flagged": [item.tensor for item in report.flagged]}
    if not as_json and (not quiet or report.flagged):
        print_report(report)
    if report.flagged:
        first = report.flagged[0]
        raise CheckFailed(
            f"{len(report.flagged)} of {len(report.tensors)} ranges moved by more than {limit:g} %, "
            f"{first.tensor!r} most ({100 * first.change:+.1f} %)",
            remedy="look at the data; if they are what the model will see from now on, build again on them",
            figures=figures,
        )
    if as_json:
        print_json(figures)


def print_report(report: DriftReport) -> None:
    """The flagged tensors, and the others that moved most, up to ten."""

    flagged = report.flagged
    others = sorted((item for item in report.tensors if not item.flagged), key=lambda item: -abs(item.change))
    headers = ("range\nthen", "\nnow", "change\n%", "\namax", "clipped\n%", "error\nthen", "\nnow", "if\nrenewed")
    table = new_table(
        f"{report.artifact}: ranges of {report.samples} recent samples against {report.calibration_samples} "
        f"calibrated ones ({report.calibrator})",
        ("tensor", "text"),
        *((header, "figure") for header in headers),
        dense=True,
    )
    for item in (*flagged, *others[: max(0, _SHOWN - len(flagged))]):
        add_row(
            table,
            item.tensor,
            f"{item.calibrated:.4g}",
            f"{item.recent:.4g}",
            f"{100 * item.change:+.1f}",
            f"{item.amax:.4g}",
            f"{100 * item.clipped_recent:.3f}",
            f"{item.error_calibrated:.4f}",
            f"{item.error_recent:.4f}",
            f"{item.error_recalibrated:.4f}",
            style="red" if item.flagged else None,
        )
    out = console()
    print_table(out, table)
    out.print(
        f"{len(flagged)} of {len(report.tensors)} ranges moved by more than {100 * report.limit:g} %. Errors are the "
        "relative L2 expected at the tensor itself: on the calibration data, on the recent data, and on these with the "
        "range that a new calibration would give.",
        markup=False,
    )
