"""`quantize build`: parse, make the configuration, call `pipeline.stages.build`, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.calibrator_options import calibrator_options, parameters_from
from pipeline.cli.common import (
    JsonCommand,
    RememberingProgress,
    console,
    make_progress,
    output_options,
    preprocess_option,
    print_json,
    same_stream,
    user_errors,
)
from pipeline.cli.engine_options import engine_options, options_from
from pipeline.cli.idle import without_idle
from pipeline.cli.mixed_options import MIXED, mixed_options, mixed_table
from pipeline.cli.tables import print_table
from pipeline.core.errors import CheckFailed, InputError, QuantizeError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pipeline.artifact import Artifact
    from pipeline.combinations import Idle
    from pipeline.config import BuildConfig
    from pipeline.core.progress import Progress
    from pipeline.engine.records import BuildOptions


@click.command(cls=JsonCommand)
@click.argument("model", required=False)
@click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="YAML file with any of these options; flags override it."
)
@click.option("--data", help="Folder of images, .npy, .npz, or file.py:callable yielding arrays.")
@click.option("--out", type=click.Path(path_type=Path), help="Artifact folder.")
@click.option("--name", help="Name in the manifest [last part of --out].")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME:SHAPE:DTYPE",
    help="Example input of a PyTorch model (repeatable).",
)
@click.option(
    "--profile", "profiles", multiple=True, metavar="NAME=MIN,OPT,MAX[;...]", help="Optimisation profile (repeatable)."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice(["rtx", "tensorrt", "onnx"]),
    help="Repeatable [what works here].",
)
@click.option("--opset", type=int, help="ONNX opset of the export [17].")
@calibrator_options("mse")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Take the statistics from this calibration.npz, without a pass.",
)
@click.option("--samples", type=int, help="Samples to calibrate on [128]; others are held aside to verify on.")
@click.option("--verify-samples", type=int, help="Held-aside samples to verify on [64, or all that are labelled].")
@click.option("--batch-size", type=int, help="Samples per batch [8]; has no influence on the statistics.")
@preprocess_option
@click.option("--labels", type=click.Path(path_type=Path), help="CSV with file,class_index or index,class_index.")
@click.option(
    "--on-nonfinite", type=click.Choice(["error", "skip"]), help="What a NaN or Inf in an activation does [error]."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where the float model is calibrated [cpu].")
@click.option(
    "--include",
    multiple=True,
    help="Quantise these nodes although a rule says no: name, pattern or operator (repeatable).",
)
@click.option("--exclude", multiple=True, help="Keep these nodes float: name, pattern or operator (repeatable).")
@click.option(
    "--rule-off", "rules_off", multiple=True, help="Switch off a placement rule, see `quantize rules` (repeatable)."
)
@click.option("--equalise", is_flag=True, help="Move the spread between channels of activations into weights.")
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), help="Type of the part that stays float [fp32].")
@click.option(
    "--fp16-io", type=click.Choice(["inputs", "outputs", "both"]), help="Make these of the model float16, in the graph."
)
@mixed_options
@engine_options
@click.option(
    "--from",
    "artifact",
    type=click.Path(path_type=Path),
    help="Build the engine of a finished artifact on the machine that serves it, and add it; needs TensorRT alone.",
)
@click.option(
    "--fastest",
    is_flag=True,
    help="With --from: keep an FP16 plan for the profiles where it is measured to be faster than INT8.",
)
@click.option("--force", is_flag=True, help="Replace the artifact of another model.")
@click.option("--fresh", is_flag=True, help="Run every stage again, take nothing from an earlier run.")
@output_options
@user_errors
def command(
    as_json: bool,
    quiet: bool,
    verbose: bool,
    force: bool,
    fresh: bool,
    artifact: Path | None,
    fastest: bool,
    **flags: Any,
) -> None:
    """Take MODEL (.onnx, package.module:callable, file.py:callable) and calibration data to a verified artifact."""
    progress = RememberingProgress(make_progress(quiet=quiet, verbose=verbose))
    engine = options_from(flags)
    if artifact is not None:
        _compile(
            artifact, engine, {**flags, "force": force, "fresh": fresh}, progress, fastest=fastest, as_json=as_json
        )
        return
    if fastest:
        raise InputError(
            "--fastest measures on the machine that serves: it goes with --from",
            remedy="build the artifact first, then: quantize build --from ARTIFACT --target tensorrt --fastest",
        )

    from pipeline.artifact import Artifact
    from pipeline.config import load_config
    from pipeline.stages import build

    flags["engine"] = engine.model_dump(mode="json", exclude_unset=True)
    values = load_config(flags["config"]) if flags["config"] else {}
    origin = str(flags["config"]) if flags["config"] else "options"
    config, targets = _effective(_merge(values, flags, origin), _typed_keys(flags), origin, progress)
    try:
        done = build(config, force=force, fresh=fresh, targets=targets, progress=progress)
    except CheckFailed as error:
        if "artifact" in error.figures and not as_json and not quiet:
            print_summary(Artifact.open(Path(error.figures["artifact"])), warned=progress.warned)
        raise
    if as_json:
        print_json({"artifact": str(done.folder), **done.manifest.model_dump(mode="json")})
    elif not quiet:
        print_summary(done, warned=progress.warned)


def _compile(
    artifact: Path, options: BuildOptions, flags: dict[str, Any], progress: Progress, *, fastest: bool, as_json: bool
) -> None:
    """``--from``: imports nothing that a serving machine lacks."""
    from pipeline.combinations import check_engine_options
    from pipeline.config import Profile
    from pipeline.engine.from_artifact import build_from_artifact, check_target

    other = [key for key, value in flags.items() if _is_given(value) and key not in ("profiles", "targets")]
    if other:
        raise InputError(
            f"--from takes --target, --profile and engine options only, not {_typed(other[0])}",
            remedy="everything else is decided in the artifact; build it anew to change that",
        )
    targets = tuple(dict.fromkeys(flags["targets"])) or ("tensorrt",)
    for target in targets:
        check_target(target, fastest=fastest)
    if len(targets) > 1:  # so that none is replaced where another cannot be built
        from pipeline.engine.probe import require_working

        require_working(targets, note="; no engine was built")
    check_engine_options(options, targets)
    try:
        profiles = [Profile.parse(text) for text in flags["profiles"]]
    except ValueError as error:
        raise InputError(f"--profile: {error}") from error
    results: list[dict[str, Any]] = []
    for target in targets:
        try:
            result = build_from_artifact(
                artifact, target=target, options=options, profiles=profiles, fastest=fastest, progress=progress
            )
        except QuantizeError as error:
            error.figures = {"target": target, **error.figures, "built": results}
            raise
        results.append(result.model_dump(mode="json"))
        if not as_json:
            record, check = result.engine, result.check
            found = "not checked: " + result.unchecked
            if check is not None:
                found = f"outputs within {max(check.relative_l2.values(), default=0.0):.2g} of the recorded ones"
            click.echo(f"{target}: {record.plan_bytes / 1e6:.1f} MB in {record.build_seconds:.1f} s, {found}")
            for choice in result.fastest.choices if result.fastest is not None else ():
                click.echo(f"  {choice}")
    if as_json:
        print_json(results)


def _effective(
    values: dict[str, Any], typed: Collection[str], origin: str, progress: Progress
) -> tuple[BuildConfig, tuple[str, ...]]:
    """The configuration and its targets, every option looked at.

    Raises:
        InputError: a value is wrong, or an option that was typed does nothing.
    """
    from pipeline.combinations import idle_options, refuse
    from pipeline.config import BuildConfig, validated
    from pipeline.stages import Build

    def asked(values: dict[str, Any]) -> tuple[tuple[Build, tuple[str, ...]], tuple[Idle, ...]]:
        config: BuildConfig = validated(BuildConfig, values, origin=origin)
        build = Build(config, force=False, fresh=False, progress=progress)
        targets = build.targets()
        return (build, targets), idle_options(config, build.engine_options, targets, typed=typed)

    (build, targets), idle = without_idle(values, asked, typed=typed, origin=origin, progress=progress)
    refuse(build.engine_options, targets, idle)
    return build.config, targets


def _typed_keys(flags: Mapping[str, Any]) -> frozenset[str]:
    """What was given on the command line, by its key in ``build.yaml``, dotted."""
    keys = {key for key, value in flags.items() if _is_given(value) and key not in MIXED}
    keys |= {f"mixed.{field}" for key, field in MIXED.items() if _is_given(flags[key])}
    return frozenset(keys | {f"engine.{key}" for key in flags["engine"]})


def _merge(values: dict[str, Any], flags: dict[str, Any], origin: str) -> dict[str, Any]:
    """The file's values with the given flags laid over them."""
    from pipeline.config import PlacementConfig

    merged = dict(values)
    given = {key: value for key, value in flags.items() if key != "config" and _is_given(value)}
    placement = {key: given.pop(key) for key in PlacementConfig.model_fields if key in given}
    params = parameters_from(given)
    name = given.pop("calibrator", None)
    if isinstance(merged.get("calibrator"), str):
        merged["calibrator"] = {"name": merged["calibrator"]}
    base = merged.get("calibrator")
    if name and not (isinstance(base, dict) and base.get("name") == name):
        merged["calibrator"] = base = {"name": name}  # the file's parameters belong to another calibrator
    if params:
        own = base.get("params") if isinstance(base, dict) else None
        merged["calibrator"] = _over(base, {"params": _over(own, params)})
    mixed = {field: given.pop(key) for key, field in MIXED.items() if key in given}
    if engine := given.pop("engine", None):
        merged["engine"] = _over(merged.get("engine"), engine)
    if mixed:
        merged["mixed"] = _over(merged.get("mixed"), mixed)
    if placement:
        merged["placement"] = _over(merged.get("placement"), placement)
    merged.update(given)
    for key, flag in (("model", "MODEL"), ("data", "--data"), ("out", "--out")):
        if not merged.get(key):
            if key == "data":
                raise InputError(
                    "no calibration data is given (--data)",
                    remedy="give a folder of images, .npy, .npz or file.py:callable; "
                    "random data is never used, its ranges would be wrong",
                )
            raise InputError(
                f"{flag} is missing ({origin})",
                remedy="give it on the command line or as a key of the configuration (-c)",
            )
    return merged


def _typed(name: str) -> str:
    """A parameter as the user typed it, such as ``--rule-off`` for ``rules_off``."""
    (parameter,) = (item for item in command.params if item.name == name)
    return parameter.opts[-1] if isinstance(parameter, click.Option) else name.upper()


def _is_given(value: Any) -> bool:
    return value not in (None, (), {}) and value is not False


def _over(value: Any, given: Mapping[Any, Any]) -> Any:
    """``given`` laid over the mapping ``value``. What is no mapping stays, for the check of the configuration."""
    return {**(value or {}), **given} if value is None or isinstance(value, dict) else value


def print_summary(artifact: Artifact, *, warned: Collection[str]) -> None:
    """The figures, the engines, warnings and where to look.

    Args:
        warned: warnings that standard error had already; where both streams go to one place they are only counted.
    """
    from pipeline.cli.inspect import summary_table, targets_table

    out = console()
    print_table(out, summary_table(artifact.manifest))
    print_table(out, targets_table(artifact.manifest))
    if artifact.manifest.mixed:
        print_table(out, mixed_table(artifact.manifest.mixed))
    warnings = artifact.manifest.warnings
    again = [text for text in warnings if text in warned] if same_stream() else []
    for warning in warnings:
        if warning not in again:
            out.print("warning: " + warning, style="yellow", markup=False)
    if again:
        count = "1 warning" if len(again) == 1 else f"{len(again)} warnings"
        out.print(f"{count} above, also in {artifact.folder / 'reports' / 'summary.md'}", style="yellow", markup=False)
    out.print(f"artifact: {artifact.folder}", markup=False)
    out.print(f"heatmap:  {artifact.folder / 'reports' / 'errors.png'}", markup=False)
