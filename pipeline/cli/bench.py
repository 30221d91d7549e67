"""`quantize bench`: engines against each other on the card in this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.choices import choices_table
from pipeline.cli.common import JsonCommand, console, make_progress, output_options, print_json, user_errors
from pipeline.cli.numbers import list_of_whole
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipeline.engine.bench import Measurement
    from pipeline.engine.suite import SuiteResult

_FEW = 4
"""Figures in a row, beyond which a table is set dense."""


def _words(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in value.split(",") if word.strip())


@click.command(cls=JsonCommand)
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--batch", "batches", default="1,8,64", callback=list_of_whole, help="Batch sizes [1,8,64].")
@click.option("--against", default="", callback=_words, help="Baselines built from the FP32 model: fp32,fp16,implicit.")
@click.option("--set", "sets", default="warm", callback=_words, help="Input sets: warm,load,edge [warm].")
@click.option("--target", type=click.Choice(["tensorrt", "rtx"]), default="tensorrt", help="[tensorrt]")
@click.option(
    "--rounds", type=click.IntRange(2), default=5, help="Rounds over all engines; their spread is the noise [5]."
)
@click.option("--in-flight", type=click.IntRange(1), default=3, help="Requests at a time for load and overlap [3].")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for bench.json and bench.png.")
@output_options
@user_errors
def command(
    artifacts: tuple[Path, ...],
    batches: tuple[int, ...],
    against: tuple[str, ...],
    sets: tuple[str, ...],
    target: str,
    rounds: int,
    in_flight: int,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Measure the engines of ARTIFACTS: time, launch overhead, throughput with copies, with and without CUDA graphs.

    An artifact built with --fastest is measured as it serves: each shape by the plan that was chosen for it.
    """
    from pipeline.cli.places import check_out_folder
    from pipeline.engine.suite import run_suite

    if out is not None:
        check_out_folder(out)
    result = run_suite(
        artifacts,
        batches=batches,
        against=against,
        sets=sets,
        target=target,
        rounds=rounds,
        in_flight=in_flight,
        progress=make_progress(quiet=quiet, verbose=verbose),
    )
    if out is not None:
        _write(out, result)
    if as_json:
        print_json(result.model_dump(mode="json"))
    elif not quiet:
        show(result)


def _write(folder: Path, result: SuiteResult) -> None:
    from pipeline.core.files import write_text
    from pipeline.engine.plot import plot_throughput

    write_text(folder / "bench.json", result.model_dump_json(indent=2) + "\n")
    if result.warm:
        plot_throughput(folder / "bench.png", result.warm, title=f"{result.device.name}, TensorRT {result.tensorrt}")


def show(result: SuiteResult) -> None:
    """The result as tables."""
    out = console()
    out.print(f"{result.device}, TensorRT {result.tensorrt}", markup=False)
    for title, found in (("warm", result.warm), ("edge", result.edge)):
        if found:
            print_table(out, _measurements(title, found))
    if result.load:
        print_table(out, _load(result))
        print_table(out, _overlap(result))
    if result.engines:
        print_table(out, _engines(result))
    for engine in result.engines:
        if engine.choices:
            print_table(out, choices_table(f"{engine.name}: which plan serves which profile", engine.choices))
    for verdict in result.verdicts:
        graph = "with" if verdict.cuda_graph else "without"
        claim = (
            f"is {verdict.verdict} ({verdict.ratio:.2f} times the throughput)"
            if verdict.ratio is not None
            else "cannot be ranked: the difference is within the noise"
        )
        out.print(
            f"batch {verdict.batch}, {graph} graph: {verdict.first} against {verdict.second} {claim}", markup=False
        )


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    return new_table(
        title, *((name, "text") for name in left), *((name, "figure") for name in right), dense=len(right) > _FEW
    )


def _measurements(title: str, found: Sequence[Measurement]) -> Table:
    columns = ("batch", "P50\nms", "\nP90", "\nP99", "samples\n/s", "latency\nP50 ms", "launch\nus", "noise")
    plans = ("plan",) if any(m.plan for m in found) else ()
    table = _table(title, ("engine", *plans, "graph"), columns)
    for m in sorted(found, key=lambda m: (m.batch, m.name, m.cuda_graph)):
        noise = (max(m.rounds_ms) - min(m.rounds_ms)) / min(m.rounds_ms)
        graph = ("yes" if m.captured else "not captured") if m.cuda_graph else "no"
        times = (f"{value:.3f}" for value in (m.p50_ms, m.p90_ms, m.p99_ms))
        add_row(
            table,
            m.name,
            *((m.plan or "",) if plans else ()),
            graph,
            str(m.batch),
            *times,
            f"{m.throughput:,.0f}",
            f"{m.latency_p50_ms:.3f}",
            f"{m.launch_us:.0f}",
            f"{100 * noise:.1f} %",
        )
    return table


def _load(result: SuiteResult) -> Table:
    table = _table("load", ("engine", "batches"), ("in\nflight", "samples/s", "latency\nP50 ms", "\nP90", "\nP99"))
    for load in result.load:
        times = (f"{value:.2f}" for value in (load.latency_p50_ms, load.latency_p90_ms, load.latency_p99_ms))
        mix = ",".join(map(str, load.batches))
        add_row(table, load.name, mix, str(load.in_flight), f"{load.throughput:,.0f}", *times)
    return table


def _overlap(result: SuiteResult) -> Table:
    columns = ("batch", "compute\nalone", "one at\na time", "over-\nlapped", "share", "copies\nalone")
    table = _table("throughput with host copies, samples/s", ("engine", "graph"), columns)
    for o in result.overlap:
        rates = (f"{rate:,.0f}" for rate in (o.compute_alone, o.one_at_a_time, o.overlapped))
        graph = "yes" if o.cuda_graph else "no"
        add_row(table, o.name, graph, str(o.batch), *rates, f"{100 * o.share:.1f} %", f"{o.copy_in_alone:,.0f}")
    return table


def _engines(result: SuiteResult) -> Table:
    table = _table("engines", ("engine",), ("plan", "memory on\nthe card", "build"))
    for engine in result.engines:
        add_row(
            table,
            engine.name,
            f"{engine.plan_bytes / 1e6:.1f} MB",
            f"{engine.device_bytes / 1e6:.0f} MB",
            f"{engine.build_seconds:.1f} s",
        )
    return table
