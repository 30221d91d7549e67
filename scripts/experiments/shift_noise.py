"""Does a calibrator that clips hold out better when the activations drift? EfficientNet-Lite0 with noise on its ReLU6.

    python scripts/experiments/shift_noise.py --data FOLDER [--out artifacts/shift-noise] [--page FILE]

Every calibrator on 372 held-aside ImageNet photographs, noise of 0, 0.01, 0.05, 0.10 and 0.15 standard deviations of
each tensor on the outputs of all activation layers, two drawings each. Writes the reports of `quantize compare` into
--out and the results page, which says whether the drops are ordered as in the reference: minmax > ema 0.9 >
percentile 99.9. What stands on the page below the mark is written by hand and kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    from pipeline.compare.records import Outcome

ROOT = Path(__file__).resolve().parents[2]
SIGMAS = (0.0, 0.01, 0.05, 0.10, 0.15)
REFERENCE = {"minmax": (2.3, 7.8), "ema 0.9": (1.1, 4.2), "percentile 99.9": (0.6, 2.9)}
"""Drop in points of a ResNet-50 at 0.05 and 0.10, as the literature of the design gives it."""
JUDGED = (0.05, 0.10)
BY_HAND = "<!-- Below this line by hand: shift_noise.py writes what is above it, and keeps the rest. -->"
ORDER = (("minmax", "ema 0.9"), ("ema 0.9", "percentile 99.9"), ("minmax", "percentile 99.9"))


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Photographs and labels.csv.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "artifacts" / "shift-noise", show_default=True)
@click.option("--page", type=click.Path(path_type=Path), default=Path(__file__).with_name("results-shift.md"))
@click.option("--draws", type=int, default=2, show_default=True)
@click.option("--calibrators", default="all", show_default=True, help="At least minmax, ema and percentile.")
@click.option("--verify-samples", type=int, help="Photographs to measure on [all that do not calibrate].")
@click.option("--workers", type=int, help="Evaluations at a time [one per core].")
def main(
    data: Path, out: Path, page: Path, draws: int, calibrators: str, verify_samples: int | None, workers: int | None
) -> None:
    from pipeline.cli.common import make_progress
    from pipeline.compare.config import CompareConfig
    from pipeline.compare.experiment import run_experiment
    from pipeline.config import PRESETS, Preprocess

    before = page.read_text() if page.is_file() else ""
    if before and BY_HAND not in before:
        raise click.ClickException(f"{page} is no page of this script: it lacks the line {BY_HAND}")
    config = CompareConfig(
        model=f"{ROOT / 'scripts' / 'models.py'}:efficientnet_lite0",
        data=str(data),
        labels=data / "labels.csv",
        preprocess=Preprocess(**PRESETS["efficientnet-lite"]),
        # Without a profile the batch would be static, and ema would see single images.
        profiles=("x=1x3x224x224,8x3x224x224,64x3x224x224",),
        out=out,
        samples=128,
        verify_samples=verify_samples,
        calibrators=(calibrators,),
        shift_sigma=SIGMAS,
        shift_draws=draws,
        workers=workers,
    )
    outcome = run_experiment(config, command="scripts/experiments/shift_noise.py", progress=make_progress(quiet=False))
    page.write_text(page_text(results(outcome), before))
    click.echo(f"{page} written; reports in {out}")


def page_text(measured: str, before: str) -> str:
    """The new page: what was measured, and below the mark what stood below it ``before``, written by hand."""
    return f"{measured}\n{BY_HAND}{before.partition(BY_HAND)[2] or chr(10)}"


def results(outcome: Outcome) -> str:
    """The measured part of the results page."""
    document = outcome.document
    tools = ", ".join(f"{name} {document['tools'][name]}" for name in ("onnxruntime", "numpy", "torch"))
    runs = document["runs"]
    calibrators = document["config"]["calibrators"]
    lines = [
        "# Noise on activations: which calibrator holds out?",
        "",
        "    python scripts/experiments/shift_noise.py --data IMAGENET500"
        + ("" if calibrators == ["all"] else f' --calibrators "{",".join(calibrators)}"'),
        "",
        f"EfficientNet-Lite0 (trained weights), {len(document['data']['calibration_samples'])} photographs calibrate, "
        f"{outcome.samples} others are measured, with their labels. Gaussian noise, in standard deviations of each "
        f"tensor over the calibration samples, is added to the outputs of {len(document['activation_layers'])} ReLU6 "
        f"layers, in FP32 and INT8 alike: {document['seeds']['shift_draws']} drawings per strength, seed "
        f"{document['seeds']['experiment']}. The Q/DQ graphs are computed by onnxruntime on a CPU with float kernels, "
        f"without integer fusion; {tools}.",
        "",
        f"{len(runs['measured_seconds'])} evaluations in {runs['seconds'] / 60:.1f} minutes "
        f"({runs['cpu_seconds_of_this_process'] / 60:.1f} minutes of CPU time), {runs['taken_from_cache']} taken from "
        f"an earlier run; one calibration pass of {runs['calibration_seconds']:.1f} s.",
        "",
        "## Top-1 without shift",
        "",
        *_clean(outcome),
        "",
        *(f"- {reason}" for reason in outcome.recommendation.reasons),
        "",
        "## Drop of top-1 in points",
        "",
        "Against FP32 without noise; in brackets the 95 % interval over the photographs.",
        "",
        *_drops(outcome, "drop_from_clean"),
        "",
        "Against FP32 under the same noise: what the quantisation adds.",
        "",
        *_drops(outcome, "drop_from_shifted"),
        "",
        "## Does the order of the reference hold?",
        "",
        *_order(outcome),
    ]
    return "\n".join(lines) + "\n"


def _rows(outcome: Outcome, label: str) -> dict[float, dict[str, Any]]:
    return {row["strength"]: row for row in outcome.table if row["calibrator"] == label}


def _labels(outcome: Outcome) -> list[str]:
    return [outcome.fp32.label, *(item.label for item in outcome.measured)]


def _clean(outcome: Outcome) -> list[str]:
    lines = ["| calibrator | top-1, % | SQNR, dB | agreement with FP32, % | clipped, % |", "| --- |" + " ---: |" * 4]
    for label in _labels(outcome):
        row = _rows(outcome, label)[0.0]
        top1 = f"{100 * row['top1']:.2f} ({100 * row['top1_low']:.1f} to {100 * row['top1_high']:.1f})"
        others = (
            ("-", "-", "-")
            if row["sqnr_db"] is None
            else (f"{row['sqnr_db']:.1f}", f"{100 * row['agreement']:.1f}", f"{100 * row['clipping_share']:.4f}")
        )
        lines.append(f"| {label} | {top1} | {' | '.join(others)} |")
    return lines


def _drops(outcome: Outcome, figure: str) -> list[str]:
    lines = ["| calibrator |" + "".join(f" {sigma:g} |" for sigma in SIGMAS), "| --- |" + " ---: |" * len(SIGMAS)]
    for label in _labels(outcome):
        cells = [
            f"{_points(row[figure])} ({_points(row[f'{figure}_low'])} to {_points(row[f'{figure}_high'])})"
            for row in (_rows(outcome, label)[sigma] for sigma in SIGMAS)
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _points(value: float) -> str:
    return f"{round(100 * value, 2) + 0.0:.2f}"


def _order(outcome: Outcome) -> list[str]:
    from pipeline.compare.bootstrap import Resampling

    by_label = {item.label: item for item in outcome.measured}
    lines = [
        "Reference (ResNet-50, noise on ReLU outputs), drop at 0.05 / 0.10: "
        + ", ".join(f"{label} {low:g} / {high:g} points" for label, (low, high) in REFERENCE.items())
        + ".",
        "",
        "| larger drop expected | smaller drop expected | at | difference of the drops, points | verdict |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    verdicts: list[str] = []
    for sigma in JUDGED:
        for larger, smaller in ORDER:
            key = ("activations", sigma)
            scores = [outcome.score.of(by_label[label].figures(key)) for label in (smaller, larger)]
            (interval,) = Resampling(outcome.samples, 0).intervals(np.stack([scores[0] - scores[1]]))
            verdict = "holds" if interval.low > 0 else "reversed" if interval.high < 0 else "cannot be told"
            verdicts.append(verdict)
            text = f"{_points(interval.mean)} ({_points(interval.low)} to {_points(interval.high)})"
            lines.append(f"| {larger} | {smaller} | {sigma:g} | {text} | {verdict} |")
    counts = {verdict: verdicts.count(verdict) for verdict in ("holds", "reversed", "cannot be told")}
    lines += [
        "",
        f"Of {len(verdicts)} comparisons the reference's order holds in {counts['holds']}, is reversed in "
        f"{counts['reversed']}, and in {counts['cannot be told']} the drops cannot be told apart on these photographs.",
    ]
    return lines


if __name__ == "__main__":
    main()
