"""`quantize consistency`: the same scales everywhere, or who differs and why."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.calibrator_options import calibrator_options, parameters_from
from pipeline.cli.common import JsonCommand, make_progress, output_options, print_json, user_errors
from pipeline.cli.idle import RANK_OPTIONS, refuse_idle
from pipeline.cli.numbers import POSITIVE, FiniteFloat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from calibrators import Calibrator
    from pipeline.consistency import Comparison
    from pipeline.consistency.opening import Opened
    from pipeline.consistency.ranks import RanksReport
    from pipeline.core.progress import Progress

_SHOWN_ROWS = 20
_GRAPH = ("inputs", "profiles", "opset", "equalise")
_CALIBRATING = (
    "data", "preprocess", *_GRAPH, "samples", "batch_size", "calibrator", "percentile", "ema_alpha", "ema_decay",
    "quantile", "cutoff",
)  # fmt: skip
_FOLDER = Path("consistency")
"""Where a snapshot goes when scales differ and --out is not given."""


@click.command(cls=JsonCommand)
@click.argument("sources", nargs=-1)
@click.option(
    "--atol",
    type=FiniteFloat(min=0),
    default=1e-5,
    show_default=True,
    help="Absolute tolerance (at most 1 % of a scale).",
)
@click.option("--rtol", type=FiniteFloat(min=0), help="Relative tolerance [0; --across-batches 0.1; --on-device 1e-5].")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for table, JSON, heatmap [./consistency on a mismatch]."
)
@click.option(
    "--save", type=click.Path(path_type=Path), help="Save the first (or merged) context as JSON, to compare elsewhere."
)
@click.option("--across-batches", is_flag=True, help="The scale that each batch of --data alone would give.")
@click.option("--on-device", is_flag=True, help="Run the artifact's engine here, compare with what was recorded.")
@click.option(
    "--target", type=click.Choice(["tensorrt", "rtx"]), default="tensorrt", show_default=True, help="For --on-device."
)
@click.option(
    "--probe", type=click.Path(path_type=Path), help="Plan of the engine that shows every scale; built if missing."
)
@click.option("--data", help="Calibration data, as for `quantize build`.")
@click.option("--preprocess", help="As for `quantize build`.")
@click.option("--input", "inputs", multiple=True, metavar="NAME:SHAPE:DTYPE", help="As for `quantize build`.")
@click.option("--profile", "profiles", multiple=True, metavar="NAME=MIN,OPT,MAX[;...]", help="As for `quantize build`.")
@click.option("--opset", type=int, help="As for `quantize build` [17].")
@click.option("--equalise", is_flag=True, help="As for `quantize build`.")
@click.option("--samples", type=int, help="Samples to calibrate on [the artifact's, or 128].")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Samples per batch.")
@calibrator_options("the artifact's, or mse")
@click.option("--shards", default="cyclic", show_default=True, help="Who takes which batch: cyclic, blocks, scattered.")
@click.option(
    "--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True, help="Between ranks."
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where ranks run the model."
)
@click.option(
    "--rank-timeout", type=POSITIVE, default=25.0, show_default=True, help="Seconds a rank may go without progress."
)
@output_options
@user_errors
def command(
    sources: tuple[str, ...],
    atol: float,
    rtol: float | None,
    out: Path | None,
    save: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Compare the scales of SOURCES: artifacts, Q/DQ .onnx files, calibration caches or saved contexts.

    With --across-batches, SOURCES is one model or artifact, calibrated batch by batch on --data. With --on-device it is
    one artifact, whose engine runs here. Started by torchrun, it is one model or artifact, calibrated over all ranks:

    \b
      torchrun --nproc-per-node 4 -m pipeline.consistency MODEL --data DATA

    Exit code 1 when scales differ; a snapshot then shows every tensor.
    """
    from pipeline.cli.places import check_out_file, check_out_folder
    from pipeline.consistency.launch import launched
    from pipeline.core.errors import InputError

    if flags["across_batches"] and flags["on_device"]:
        raise InputError("--across-batches and --on-device are two checks", remedy="ask for one at a time")
    over_ranks = launched() and not (flags["across_batches"] or flags["on_device"])
    if flags["device"] != "cpu" and not over_ranks:
        raise InputError("--device cuda is for the check over ranks", remedy="start it with torchrun, also for one GPU")
    _refuse_idle(flags, over_ranks=over_ranks)
    if not over_ranks or os.environ.get("RANK") == "0":  # which writes; the others' check would be in its way
        if out is not None:
            check_out_folder(out)
        if save is not None:
            check_out_file(save, inputs=sources)
    progress = make_progress(quiet=quiet, verbose=verbose)
    if flags["on_device"]:
        _on_device(_single(sources, "--on-device"), flags, rtol, save, progress, as_json=as_json)
    elif flags["across_batches"]:
        _across_batches(_single(sources, "--across-batches"), flags, rtol, out, progress, as_json=as_json)
    elif over_ranks:
        model = _single(sources, "a run over several ranks")
        report = _across_ranks(model, flags, atol, rtol, progress, verbose=verbose, as_json=as_json)
        if report is not None:
            _print_ranks(report, out, save, as_json=as_json)
    else:
        _across_files(sources, atol, rtol, out, save, as_json=as_json)


def _refuse_idle(flags: Mapping[str, Any], *, over_ranks: bool) -> None:
    """Options of the modes that were not asked for."""
    calibrating = over_ranks or flags["across_batches"]
    if not flags["on_device"]:
        refuse_idle(("target", "probe"), "the check of an engine", "give --on-device as well")
    if not calibrating:
        refuse_idle(_CALIBRATING, "calibrating here", "give --across-batches or start it with torchrun")
    if not over_ranks:
        refuse_idle(RANK_OPTIONS, "the check over ranks", "start it with torchrun")
    if flags["across_batches"]:
        refuse_idle(("atol", "save"), "comparing contexts", "leave --across-batches out")
    if flags["on_device"]:
        refuse_idle(("atol", "out"), "comparing contexts", "leave --on-device out")


def _single(sources: tuple[str, ...], mode: str) -> str:
    from pipeline.core.errors import InputError

    if len(sources) != 1:
        raise InputError(f"{mode} takes one model or artifact, got {len(sources)}")
    return sources[0]


def _across_files(
    sources: tuple[str, ...], atol: float, rtol: float | None, out: Path | None, save: Path | None, *, as_json: bool
) -> None:
    from pipeline.consistency import Tolerance, compare, load_context, save_context
    from pipeline.consistency.comparison import describe

    contexts = [load_context(Path(source)) for source in sources]
    if save is not None and contexts:
        save_context(save, contexts[0])
        if len(contexts) == 1:
            if as_json:
                print_json({"saved": str(save), "digest": contexts[0].digest})
            else:
                click.echo(f"{save} written: {len(contexts[0].tensors)} tensors, digest {contexts[0].digest}")
            return
    comparison = compare(contexts, Tolerance(atol=atol, rtol=rtol or 0.0))
    files = _snapshot(comparison, out)
    from pipeline.consistency.report import table

    figures = {**comparison.model_dump(mode="json"), "consistent": comparison.consistent, "rate": comparison.rate}
    failure = None if comparison.consistent else describe(comparison, most=0)
    _finish(figures, lambda: table(comparison, most=_SHOWN_ROWS), failure, files, as_json=as_json)


def _snapshot(comparison: Comparison, out: Path | None) -> list[Path]:
    from pipeline.consistency.report import write_snapshot

    return [] if out is None and comparison.consistent else write_snapshot(out or _FOLDER, comparison)


def _finish(
    figures: dict[str, Any], text: Callable[[], str], failure: str | None, files: list[Path], *, as_json: bool
) -> None:
    """Print the result; where the check failed raise :class:`CheckFailed`, which shows the figures with ``--json``."""
    from pipeline.core.errors import CheckFailed

    figures = {**figures, "files": [str(path) for path in files]}
    if not as_json:
        click.echo(text(), nl=False)
    if failure is not None:
        shown = f"{', '.join(path.name for path in files)} in {files[0].parent} show every tensor" if files else None
        raise CheckFailed(failure, remedy=shown, figures=figures)
    if as_json:
        print_json(figures)


def _open(model: str, flags: Mapping[str, Any], folder: Path, progress: Progress) -> tuple[Opened, Calibrator]:
    """The work, and the calibrator that the flags name; else the artifact's own, else the default."""
    import calibrators
    from pipeline.artifact import Artifact
    from pipeline.config import BuildConfig, validated
    from pipeline.consistency.opening import open_configured
    from pipeline.core.errors import InputError

    if not flags["data"]:
        raise InputError(
            "no calibration data is given (--data)",
            remedy="give a folder of images, .npy, .npz or file.py:callable; random data is never used",
        )
    if Path(model).is_dir():
        need = "a model that is prepared here; an artifact's graph is taken as it is"
        refuse_idle(_GRAPH, need, "give a model")
    params = parameters_from(dict(flags))
    name = flags["calibrator"]
    if name is None and Path(model).is_dir():
        record = Artifact.open(Path(model)).manifest.calibration
        name, params = record.calibrator, {**record.params, **params}
    keys = ("data", "preprocess", "samples", "batch_size", *_GRAPH)
    given = {key: flags[key] for key in keys if flags[key] is not None}
    config = validated(
        BuildConfig,
        {**given, "model": model, "out": folder, "calibrator": {**({"name": name} if name else {}), "params": params}},
        origin="options",
    )
    opened = open_configured(config, folder=folder, shard=flags["shards"], progress=progress)
    return opened, calibrators.get(config.calibrator.name, config.calibrator.params)


def _across_batches(
    model: str, flags: Mapping[str, Any], rtol: float | None, out: Path | None, progress: Progress, *, as_json: bool
) -> None:
    from pipeline.consistency.batches import DEFAULT_BATCH_RTOL, spread, statistics_by_batch
    from pipeline.consistency.report import batches_text, write_batches
    from pipeline.consistency.shares import rank_batches

    with tempfile.TemporaryDirectory(prefix="quantize-consistency-") as folder:
        opened, calibrator = _open(model, flags, Path(folder), progress)
        work = opened.work
        batches = rank_batches(work.source, work.samples, work.batch_size, work.inputs, rank=0, size=1)
        found = statistics_by_batch(work.model, work.tensors, batches, progress=progress, total=len(work.samples))
    report = spread(opened.plan, found, calibrator, rtol=DEFAULT_BATCH_RTOL if rtol is None else rtol)
    files = [] if out is None else write_batches(out, report)
    figures = {**report.model_dump(mode="json"), "rate": report.rate}
    _finish(figures, lambda: batches_text(report, most=_SHOWN_ROWS), None, files, as_json=as_json)


def _across_ranks(
    model: str,
    flags: Mapping[str, Any],
    atol: float,
    rtol: float | None,
    progress: Progress,
    *,
    verbose: bool,
    as_json: bool,
) -> RanksReport | None:
    """The report in rank 0, None in the others."""
    from pipeline.cli.ranks import rank_session
    from pipeline.consistency.comparison import Tolerance
    from pipeline.core.progress import SILENT

    limit_s = flags["rank_timeout"]
    with rank_session(backend=flags["backend"], limit_s=limit_s, verbose=verbose, as_json=as_json) as group:
        from pipeline.activations_cuda import check_device
        from pipeline.consistency.group import PREPARING
        from pipeline.consistency.measure import measure_on
        from pipeline.consistency.ranks import check_ranks

        check_device(flags["device"])
        group.phase("preparing the model", patience=PREPARING)
        shown = progress if group.rank == 0 else SILENT
        with tempfile.TemporaryDirectory(prefix="quantize-consistency-") as folder:
            opened, calibrator = _open(model, flags, Path(folder), shown)
            report = check_ranks(
                group,
                opened,
                calibrator,
                tolerance=Tolerance(atol=atol, rtol=rtol or 0.0),
                measure=measure_on(flags["device"]),
                progress=shown,
            )
    return report if group.rank == 0 else None


def _print_ranks(report: RanksReport, out: Path | None, save: Path | None, *, as_json: bool) -> None:
    from pipeline.consistency import save_context
    from pipeline.consistency.comparison import describe
    from pipeline.consistency.report import ranks_text

    if save is not None:
        save_context(save, report.merged)
    files = [] if report.same_batch is None else _snapshot(report.same_batch, out)
    figures = {**report.model_dump(mode="json"), "passed": report.passed}
    failure = None if report.passed or report.same_batch is None else describe(report.same_batch, most=0)
    _finish(figures, lambda: ranks_text(report), failure, files, as_json=as_json)


def _on_device(
    folder: str, flags: Mapping[str, Any], rtol: float | None, save: Path | None, progress: Progress, *, as_json: bool
) -> None:
    from pipeline.consistency import save_context
    from pipeline.consistency.device import DEFAULT_RTOL, check_on_device, device_text

    check = check_on_device(
        Path(folder),
        target=flags["target"],
        probe=flags["probe"],
        rtol=DEFAULT_RTOL if rtol is None else rtol,
        progress=progress,
    )
    if save is not None:
        save_context(save, check.context)
    wrong = [f"output {output.output}" for output in check.outputs if not output.passed]
    wrong += [f"{len(check.wrong)} scales"] if check.wrong else []
    failure = f"the {check.target} engine does not compute what was recorded: {', '.join(wrong)}" if wrong else None
    figures = {**check.model_dump(mode="json"), "passed": check.passed}
    _finish(figures, lambda: device_text(check), failure, [], as_json=as_json)
