"""`quantize compare`: parse, make the configuration, call `pipeline.compare.experiment`, print."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import (
    JsonCommand,
    console,
    make_progress,
    output_options,
    preprocess_option,
    print_json,
    user_errors,
)
from pipeline.cli.idle import without_idle
from pipeline.cli.numbers import list_of_floats, list_of_whole
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from collections.abc import Collection

    from pipeline.combinations import Idle
    from pipeline.compare.config import CompareConfig
    from pipeline.compare.records import Outcome
    from pipeline.core.progress import Progress
    from pipeline.engine.records import BuildOptions


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


@click.command(cls=JsonCommand)
@click.argument("model", required=False)
@click.option("-c", "--config", type=click.Path(path_type=Path), help="YAML file with any of these options.")
@click.option("--data", help="Folder of images, .npy, .npz, or file.py:callable yielding arrays.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the reports and the kept measurements.")
@click.option("--labels", type=click.Path(path_type=Path), help="CSV with file,class_index or index,class_index.")
@click.option("--metric", help="file.py:callable(outputs, samples, labels): one number per sample, higher is better.")
@click.option("--calibrators", help="all, or names with parameters: minmax,percentile(99.9),ema(alpha=0.95) [all].")
@click.option("--target", type=click.Choice(["onnx", "tensorrt"]), help="What computes the INT8 graphs [onnx].")
@click.option("--shift-sigma", callback=list_of_floats(0), help="Noise on activation outputs, such as 0,0.05,0.1.")
@click.option("--shift-absolute", is_flag=True, default=None, help="The noise is not relative to each tensor's spread.")
@click.option("--shift-draws", type=int, help="Drawings of the noise per strength [2].")
@click.option("--shift-images", callback=_names, help="Of brightness,contrast,blur,jpeg,noise; three grades each.")
@click.option("--calibration-size", "calibration_sizes", callback=list_of_whole, help="Also with so few: 8,16,32.")
@click.option("--calibration-subsets", type=int, help="Different choices of samples for each size [5].")
@click.option("--seed", type=int, help="Of noise, subsets and bootstrap [0].")
@click.option(
    "--workers", type=int, help="Evaluations at a time [one per core]; more than one on Ray, where that is installed."
)
@click.option("--address", help="A running Ray cluster to spread the evaluations over.")
@click.option("--input", "inputs", multiple=True, metavar="NAME:SHAPE:DTYPE", help="Example input (repeatable).")
@click.option("--profile", "profiles", multiple=True, metavar="NAME=MIN,OPT,MAX", help="Dynamic shapes (repeatable).")
@click.option("--opset", type=int, help="ONNX opset of the export [17].")
@click.option("--samples", type=int, help="Samples to calibrate on [128]; others are held aside to compare on.")
@click.option("--verify-samples", type=int, help="Held-aside samples to compare on [64, or all that are labelled].")
@click.option("--batch-size", type=int, help="Samples per batch [8]; what ema calibrators see as one step.")
@preprocess_option
@click.option("--on-nonfinite", type=click.Choice(["error", "skip"]), help="A NaN or Inf in an activation [error].")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where the float model is calibrated [cpu].")
@click.option("--include", multiple=True, help="Quantise these nodes although a rule says no (repeatable).")
@click.option("--exclude", multiple=True, help="Keep these nodes float (repeatable).")
@click.option("--rule-off", "rules_off", multiple=True, help="Switch off a placement rule (repeatable).")
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), help="Type of the part that stays float [fp32].")
@click.option("--fp16-io", type=click.Choice(["inputs", "outputs", "both"]), help="Make these of the model float16.")
@click.option("--build", "build_artifact", is_flag=True, help="Build the recommended artifact into OUT/artifact.")
@click.option("--fresh", is_flag=True, help="Measure everything again, take nothing from an earlier experiment.")
@output_options
@user_errors
def command(as_json: bool, quiet: bool, verbose: bool, build_artifact: bool, fresh: bool, **flags: Any) -> None:
    """Compare calibrators for MODEL on held-aside data, also when activations or images shift, and recommend one."""
    from pipeline.cli.places import check_out_folder
    from pipeline.compare.experiment import run_experiment
    from pipeline.compare.follow_up import build_recommended, check_follow_up
    from pipeline.config import load_config

    progress = make_progress(quiet=quiet, verbose=verbose)
    values = load_config(flags["config"]) if flags["config"] else {}
    origin = str(flags["config"]) if flags["config"] else "options"
    typed = frozenset(key for key, value in flags.items() if value not in (None, ()))
    config, targets = _effective(_merged(values, flags), typed, origin, progress, artifact=build_artifact)
    check_out_folder(config.out)
    if build_artifact:
        check_follow_up(config, targets)
    outcome = run_experiment(config, fresh=fresh, artifact=build_artifact, command=_command_line(), progress=progress)
    artifact = build_recommended(config, outcome, targets, progress=progress) if build_artifact else None
    if as_json:
        print_json({**outcome.document, "artifact": None if artifact is None else str(artifact.folder)})
    elif not quiet:
        print_outcome(outcome, config)


def _effective(
    values: dict[str, Any], typed: Collection[str], origin: str, progress: Progress, *, artifact: bool
) -> tuple[CompareConfig, tuple[str, ...]]:
    """The configuration and the artifact's targets, every option looked at.

    Raises:
        InputError: a value is wrong, or an option that was typed does nothing.
    """
    from pipeline.combinations import refuse
    from pipeline.compare.asked import idle_in_comparison
    from pipeline.compare.config import CompareConfig
    from pipeline.compare.follow_up import artifact_targets
    from pipeline.config import validated
    from pipeline.engine.records import BuildOptions

    def asked(values: dict[str, Any]) -> tuple[tuple[CompareConfig, BuildOptions, tuple[str, ...]], tuple[Idle, ...]]:
        config: CompareConfig = validated(CompareConfig, values, origin=origin)
        options: BuildOptions = validated(BuildOptions, config.engine, origin="engine options")
        targets = artifact_targets(config) if artifact else ()
        return (config, options, targets), idle_in_comparison(config, options, targets, typed=typed, artifact=artifact)

    (config, options, targets), idle = without_idle(values, asked, typed=typed, origin=origin, progress=progress)
    refuse(options, (config.target,), idle)
    return config, targets


def _merged(values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The file's values with the given flags laid over them."""
    from pipeline.config import PlacementConfig
    from pipeline.core.errors import InputError

    merged = dict(values)
    given = {key: value for key, value in flags.items() if key != "config" and value not in (None, ())}
    if isinstance(merged.get("calibrator"), str):
        merged["calibrator"] = {"name": merged["calibrator"]}
    if placement := {key: given.pop(key) for key in PlacementConfig.model_fields if key in given}:
        merged["placement"] = {**(merged.get("placement") or {}), **placement}
    merged.update(given)
    for key, flag in (("model", "MODEL"), ("data", "--data"), ("out", "--out")):
        if not merged.get(key):
            raise InputError(f"{flag} is missing", remedy="give it on the command line or as a key of the file (-c)")
    return merged


def _command_line() -> str:
    """As typed, for the record."""
    return shlex.join(["quantize", *sys.argv[1:]]) if re.search(r"quantize|cli", sys.argv[0]) else ""


def print_outcome(outcome: Outcome, config: CompareConfig) -> None:
    """The clean figures, the drops under noise and the recommendation."""
    score, advice = outcome.score, outcome.recommendation
    comparisons = {item.calibrator: item for item in advice.comparisons}
    unit = "\n%" if score.percent else ""
    heading = "as FP32" if score.figure == "agreement" else score.name.replace(" ", "\n")
    table = new_table(
        f"{outcome.samples} held-aside samples",
        ("calibrator", "word"),
        (heading + unit, "figure"),
        ("95 %\ninterval", "figure"),
        ("worse\n" + ("points" if score.percent else "by"), "figure"),
        ("sure", "word"),
        ("SQNR\ndB", "figure"),
        ("clip\n%", "figure"),
    )
    for row in outcome.table:
        if row["shift"] != "none" or row["calibration_subset"] is not None:
            continue
        value, item = row[score.figure], comparisons.get(row["calibrator"])
        worse, told = ("best", "") if row["calibrator"] == advice.best else ("-", "")
        if item is not None:
            worse = "equal" if item.tied else _plain(item.difference, score.percent)
            told = "same" if item.same_graph else "yes" if item.told_apart else "no"
        add_row(
            table,
            row["calibrator"],
            "-" if value is None else _plain(value, score.percent),
            "-"
            if value is None
            else " to ".join(_plain(row[f"{score.figure}{end}"], score.percent, 1) for end in ("_low", "_high")),
            worse,
            told,
            "-" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}",
            "-" if row["clipping_share"] is None else f"{100 * row['clipping_share']:.4f}",
        )
    out = console()
    print_table(out, table)
    out.print(f"take {advice.calibrator}", style="bold", markup=False)
    for reason in advice.reasons:
        out.print(f"  {reason}", markup=False)
    out.print(f"report: {outcome.folder / 'compare.html'}", markup=False)


def _plain(value: float, percent: bool, decimals: int = 2) -> str:
    return f"{100 * value:.{decimals}f}" if percent else f"{value:.4g}"
