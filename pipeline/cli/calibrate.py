"""`quantize calibrate`: the calibrate stage alone, or passes of several machines joined."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import JsonCommand, make_progress, output_options, preprocess_option, print_json, user_errors
from pipeline.cli.idle import RANK_OPTIONS, refuse_idle
from pipeline.cli.numbers import POSITIVE, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.calibrate import CalibrationResult
    from pipeline.consistency.opening import Opened
    from pipeline.core.progress import Progress

_OUT = Path("calibration.npz")
_PLACEMENT = ("include", "exclude", "rules_off")
_GRAPH = ("inputs", "profiles", "opset", "equalise")
_OF_A_MODEL = (*_GRAPH, *_PLACEMENT)
"""Options that decide which graph is calibrated, and where."""


@click.command(cls=JsonCommand)
@click.argument("sources", nargs=-1, metavar="MODEL | --merge FILE FILE...")
@click.option("--data", help="Folder of images, .npy, .npz, or file.py:callable yielding arrays.")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=_OUT, show_default=True, help="File to write.")
@click.option("--merge", is_flag=True, help="Join calibration files of passes over different batches, exactly.")
@click.option("--samples", type=int, help="Samples to calibrate on [128, or as in the artifact].")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Samples per batch.")
@preprocess_option
@click.option("--input", "inputs", multiple=True, metavar="NAME:SHAPE:DTYPE", help="As for `quantize build`.")
@click.option("--profile", "profiles", multiple=True, metavar="NAME=MIN,OPT,MAX[;...]", help="As for `quantize build`.")
@click.option("--opset", type=int, help="As for `quantize build` [17].")
@click.option("--equalise", is_flag=True, help="As for `quantize build`, which then needs it too.")
@click.option("--shard", metavar="I/N", help="Only the I-th of N parts of the batches (0/2 and 1/2), to merge later.")
@click.option("--shards", default="cyclic", help="Under torchrun, who takes which batch: cyclic, blocks, scattered.")
@click.option(
    "--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", help="Under torchrun, between ranks."
)
@click.option("--rank-timeout", type=POSITIVE, default=25.0, help="Under torchrun, seconds a rank may go on silently.")
@click.option(
    "--on-nonfinite",
    type=click.Choice(["error", "skip"]),
    default="error",
    show_default=True,
    help="What a NaN or Inf in an activation does.",
)
@click.option("--include", multiple=True, help="As for `quantize build` (repeatable).")
@click.option("--exclude", multiple=True, help="As for `quantize build` (repeatable).")
@click.option("--rule-off", "rules_off", multiple=True, help="As for `quantize build` (repeatable).")
@click.option("--checkpoint-every", type=click.IntRange(min=1), default=32, show_default=True, help="Batches.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the model runs."
)
@click.option("--fresh", is_flag=True, help="Start again even where an unfinished pass is found.")
@output_options
@user_errors
def command(
    sources: tuple[str, ...],
    out: Path,
    merge: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Gather the statistics of MODEL (an artifact, .onnx file or callable) on --data, for every calibrator at once.

    The file goes into `quantize build --calibration FILE --calibrator NAME`, which then needs no pass over the data; it
    refuses the file where --opset, --input, --profile, --equalise or the placement make another graph of MODEL. A
    killed pass goes on where it was when the same command is given again. On several machines, give each its
    --shard I/N and join the files:

    \b
      quantize calibrate --merge part0.npz part1.npz -o calibration.npz

    On one machine or cluster, torchrun does both: torchrun --nproc-per-node 4 -m pipeline.cli calibrate MODEL ...
    """
    from pipeline.cli.places import check_out_file
    from pipeline.consistency.launch import launched
    from pipeline.core.errors import InputError
    from pipeline.core.files import explain_os_errors

    progress = make_progress(quiet=quiet, verbose=verbose)
    if merge:
        refuse_idle(
            flags, "a pass over data; --merge joins finished ones", "leave --merge out"
        )
        check_out_file(out)
        from pipeline.calibrate import merge_passes

        _show(merge_passes([Path(source) for source in sources], out, progress=progress), out, as_json, quiet)
        return
    if launched():
        refuse_idle(("checkpoint_every", "fresh"), "a pass of one process", "start it without torchrun")
    else:
        refuse_idle(RANK_OPTIONS, "a pass over several ranks", "start it with torchrun")
    if len(sources) != 1:
        raise InputError(
            f"`quantize calibrate` takes one model, got {len(sources)}", remedy="--merge joins several files"
        )
    if not flags["data"]:
        raise InputError(
            "no calibration data is given (--data)",
            remedy="give a folder of images, .npy, .npz or file.py:callable; random data is never used",
        )
    if Path(sources[0]).is_dir():
        refuse_idle(_OF_A_MODEL, "a model that is prepared here; an artifact's graph is taken as it is", "give a model")
    with explain_os_errors(out):
        taken = out.is_dir()
    if taken:
        raise InputError(f"--out {out} is a folder", remedy=f"name the file: --out {out / _OUT}")
    with explain_os_errors(out):  # every rank makes it, so that none takes it away from another
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    check_out_file(out, inputs=(sources[0], flags["data"]))
    result = (
        _over_ranks(sources[0], out, flags, progress, verbose=verbose, as_json=as_json)
        if launched()
        else _alone(sources[0], out, flags, progress)
    )
    if result is not None:
        _show(result, out, as_json, quiet)


def _alone(model: str, out: Path, flags: Mapping[str, Any], progress: Progress) -> CalibrationResult:
    from pipeline import calibrate
    from pipeline.activations_cuda import check_device
    from pipeline.consistency.shares import rank_batches
    from pipeline.core.files import link_or_copy, sha256_json
    from pipeline.runner import StageRunner

    rank, size = _part(flags["shard"])
    check_device(flags["device"])
    folder = out.absolute().with_name(f".{out.name}.{rank}-of-{size}.work")
    with StageRunner(folder, progress).locked():
        opened = _open(model, flags, folder, progress)
        work = opened.work
        if flags["fresh"]:
            (folder / calibrate.CHECKPOINT).unlink(missing_ok=True)
        result = calibrate.run(
            work.model,
            work.tensors,
            rank_batches(work.source, work.samples, work.batch_size, work.inputs, rank=rank, size=size),
            folder=folder,
            on_nonfinite=work.on_nonfinite,
            checkpoint_every=flags["checkpoint_every"],
            progress=progress,
            total=len(work.samples) if size == 1 else None,
            device=flags["device"],
            data_key=work.source.key(),
            layout=sha256_json([list(work.samples), work.batch_size, work.shard, rank, size]),
        )
        link_or_copy(result.statistics_path, out.absolute())
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _over_ranks(
    model: str, out: Path, flags: Mapping[str, Any], progress: Progress, *, verbose: bool, as_json: bool
) -> CalibrationResult | None:
    """The result in rank 0, None in the others."""
    import tempfile

    from pipeline.cli.ranks import rank_session
    from pipeline.core.errors import InputError
    from pipeline.core.files import link_or_copy
    from pipeline.core.progress import SILENT

    if flags["shard"]:
        raise InputError("--shard is for passes that are merged later; torchrun shares the batches out by itself")
    limit_s = flags["rank_timeout"]
    with rank_session(backend=flags["backend"], limit_s=limit_s, verbose=verbose, as_json=as_json) as group:
        from pipeline.activations_cuda import check_device
        from pipeline.consistency.distributed import calibrate_ranks, check_agreement
        from pipeline.consistency.group import PREPARING
        from pipeline.consistency.measure import measure_on

        check_device(flags["device"])
        group.phase("preparing the model", patience=PREPARING)
        shown = progress if group.rank == 0 else SILENT
        with tempfile.TemporaryDirectory(prefix="quantize-calibrate-") as name:
            folder = Path(name)
            opened = _open(model, flags, folder, shown)
            check_agreement(group, opened.work, model_sha256=opened.model_sha256)
            result = calibrate_ranks(
                group, opened.work, folder=folder, measure=measure_on(flags["device"]), progress=shown
            )
            if group.rank == 0:
                link_or_copy(result.statistics_path, out.absolute())
    return result if group.rank == 0 else None


def _open(model: str, flags: Mapping[str, Any], folder: Path, progress: Progress) -> Opened:
    from pipeline.config import BuildConfig, validated
    from pipeline.consistency.opening import open_configured

    keys = ("data", "preprocess", "samples", "batch_size", "on_nonfinite", *_GRAPH)
    given = {key: flags[key] for key in keys if flags[key] is not None}
    placement = {key: flags[key] for key in _PLACEMENT}
    config = validated(BuildConfig, {**given, "model": model, "out": folder, "placement": placement}, origin="options")
    return open_configured(config, folder=folder, shard=flags["shards"], progress=progress)


def _part(text: str | None) -> tuple[int, int]:
    """``1/4`` as (1, 4); nothing as (0, 1)."""
    from pipeline.core.errors import InputError

    if text is None:
        return 0, 1
    part, _, parts = text.partition("/")
    rank, size = whole_number(part), whole_number(parts)
    if rank is None or size is None or not rank < size:
        raise InputError(
            f"--shard {text!r} is not I/N with I below N", remedy="for two machines: 0/2 on one, 1/2 on the other"
        )
    return rank, size


def _show(result: CalibrationResult, out: Path, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json({"file": str(out), **result.model_dump(mode="json", exclude={"dependencies"})})
    elif not quiet:
        skipped = f", {result.skipped_batches} batches skipped" if result.skipped_batches else ""
        click.echo(f"{out}: {result.tensors} tensors, {result.samples} samples in {result.batches} batches{skipped}")
