"""Calibrate over 1, 2 and 4 ranks in several shard orders: the same bits as one process, and the time it takes.

    python scripts/consistency_scaling.py MODEL --data DATA --preprocess SPEC [--rounds 3] [--json out.json]

Each rank is bound to one core. The runs are interleaved, so that what else the machine does falls on all of them alike;
the least of each figure is shown, and the processor time of a rank's share says how the work divides also where there
are fewer cores than ranks. Then the statistics of one pass, cut into 64 parts, are merged in trees of several shapes,
and the cost of a merge is measured and carried on to 1,000 ranks on paper.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

RUNS = ((1, "cyclic"), (2, "cyclic"), (2, "blocks"), (2, "scattered"), (4, "cyclic"), (4, "blocks"), (4, "scattered"))
PARTS = 64


def torchrun(ranks: int, module: list[str], *, cores: list[int]) -> tuple[str, float]:
    """Standard output and wall seconds of a run over ``ranks`` processes on these cores."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    start = time.perf_counter()
    done = subprocess.run(
        [*launcher, *module],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(module)}: {done.stderr}")
    return done.stdout, time.perf_counter() - start


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same_file(model: str, arguments: list[str], folder: Path) -> dict[str, bool]:
    """`quantize calibrate` in one process and under torchrun: is the file the same, byte for byte?"""
    alone = folder / "alone.npz"
    subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "calibrate", model, *arguments, "-o", str(alone), "-q"], check=True
    )
    expected = sha256(alone)
    cores = sorted(os.sched_getaffinity(0))
    same = {}
    for ranks, shard in RUNS[1:]:
        path = folder / f"{ranks}-{shard}.npz"
        torchrun(
            ranks,
            ["pipeline.cli", "calibrate", model, *arguments, "-o", str(path), "-q", "--shards", shard],
            cores=cores,
        )
        same[f"{ranks} ranks, {shard}"] = sha256(path) == expected
    return same


def scaling(model: str, arguments: list[str], rounds: int) -> list[dict[str, Any]]:
    """Every run of RUNS, ``rounds`` times, interleaved."""
    cores = sorted(os.sched_getaffinity(0))
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for _ in range(rounds):
        for ranks, shard in RUNS:
            command = ["pipeline.consistency", model, *arguments, "--shards", shard, "--json", "-q"]
            text, wall = torchrun(ranks, command, cores=cores[:ranks] if ranks <= len(cores) else cores)
            report = json.loads(text)
            row = rows.setdefault(
                (ranks, shard),
                {"ranks": ranks, "shard": shard, "digests": set(), "wall": [], "share": [], "cpu": [], "merge": []},
            )
            row["digests"].add((report["statistics"], report["digest"]))
            row["wall"].append(wall)
            row["share"].append(max(report["seconds"]))
            row["cpu"].append(max(report["cpu_seconds"]))
            row["merge"].append(report["merge_seconds"])
            row["scenarios"] = report["scenarios"]
    return list(rows.values())


def merging(model: str, data: str, preprocess: str | None, samples: int, folder: Path) -> dict[str, Any]:
    """64 parts of one pass: trees of several shapes, message sizes and merge times."""
    from pipeline.config import BuildConfig, validated
    from pipeline.consistency.batches import statistics_by_batch
    from pipeline.consistency.exchange import merge_all, merge_pair
    from pipeline.consistency.opening import open_work
    from pipeline.consistency.shares import rank_batches
    from pipeline.consistency.wire import digest_statistics, pack, unpack

    given = {"model": model, "data": data, "preprocess": preprocess, "samples": samples, "out": folder}
    config = validated(BuildConfig, given, origin="options")
    opened = open_work(model, data, folder=folder, preprocess=config.preprocess, samples=samples, batch_size=2)
    work = opened.work
    batches = rank_batches(work.source, work.samples, 2, work.inputs, rank=0, size=1)
    by_batch = statistics_by_batch(work.model, work.tensors, batches)
    indices = sorted(by_batch)
    groups = [indices[part::PARTS] for part in range(PARTS)]
    parts = [functools.reduce(merge_pair, (by_batch[index] for index in group)) for group in groups if group]
    names = work.tensors
    whole = functools.reduce(merge_pair, (by_batch[index] for index in indices))

    def shuffled(seed: int) -> dict[str, Any]:
        generator = random.Random(seed)
        pool = list(parts)
        while len(pool) > 1:
            first, second = (pool.pop(generator.randrange(len(pool))) for _ in range(2))
            pool.append(merge_pair(first, second))
        return pool[0]

    shapes = {
        "binomial tree": merge_all(parts, merge_pair),
        "chain": functools.reduce(merge_pair, parts),
        "chain from the end": functools.reduce(merge_pair, reversed(parts)),
        "random tree 1": shuffled(1),
        "random tree 2": shuffled(2),
        "random tree 3": shuffled(3),
    }
    messages = [pack(part, names) for part in parts]
    total = pack(whole, names)
    timed: dict[str, float] = {}
    for what, action in {
        "pack": lambda: pack(whole, names),
        "unpack": lambda: unpack(total, names),
        "merge": lambda: merge_pair(parts[0], parts[1]),
        "digest": lambda: digest_statistics(whole),
    }.items():
        samples = []
        for _ in range(9):
            start = time.perf_counter()
            action()
            samples.append(time.perf_counter() - start)
        timed[what] = min(samples) / len(names)
    return {
        "parts": len(parts),
        "tensors": len(names),
        "batches": len(indices),
        "same": {name: digest_statistics(result) == digest_statistics(whole) for name, result in shapes.items()},
        "digest": digest_statistics(whole),
        "bytes_per_tensor_part": statistics.median(len(message) for message in messages) / len(names),
        "bytes_per_tensor_whole": len(total) / len(names),
        "raw_bytes_per_tensor": 8 * 8192,
        "seconds_per_tensor": timed,
    }


def on_paper(found: dict[str, Any], ranks: int, megabit_s: float) -> dict[str, float]:
    """What the merge costs on the longest path: log2 N receptions with a merge, and a broadcast of as many steps."""
    steps = (ranks - 1).bit_length()
    each = found["seconds_per_tensor"]
    compute = steps * (each["pack"] + each["unpack"] + each["merge"]) + each["pack"] + each["unpack"] + each["digest"]
    size = found["bytes_per_tensor_whole"]
    return {
        "ranks": ranks,
        "steps": steps,
        "compute_s": compute * found["tensors"],
        "bytes_received": steps * size * found["tensors"],
        "network_s": 2 * steps * size * found["tensors"] * 8 / (megabit_s * 1e6),
    }


@click.command()
@click.argument("model")
@click.option("--data", required=True)
@click.option("--preprocess")
@click.option("--samples", type=int, default=128, show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(model: str, data: str, preprocess: str | None, samples: int, rounds: int, json_path: Path | None) -> None:
    """Print the tables; exit code 1 when any two results differ."""
    arguments = [
        "--data",
        data,
        "--rank-timeout",
        "120",
        "--samples",
        str(samples),
        *(["--preprocess", preprocess] if preprocess else []),
    ]
    with tempfile.TemporaryDirectory(prefix="quantize-scaling-") as name:
        folder = Path(name)
        same = same_file(model, arguments, folder)
        rows = scaling(model, arguments, rounds)
        merged = merging(model, data, preprocess, samples, folder / "merging")
    print_scaling(rows, same)
    print_scenarios(rows)
    for row in rows:
        row["digests"] = sorted(row["digests"])
    paper = [on_paper(merged, ranks, 10_000) for ranks in (2, 8, 64, 1000)]
    print_merging(merged, paper)
    if json_path is not None:
        json_path.write_text(
            json.dumps({"rows": rows, "file": same, "merging": merged, "paper": paper}, indent=1) + "\n"
        )
    different = any(row["digests"] != rows[0]["digests"] for row in rows)
    if different or not all(same.values()) or not all(merged["same"].values()):
        raise SystemExit(1)


def print_scaling(rows: list[dict[str, Any]], same: dict[str, bool]) -> None:
    click.echo("| ranks | shards | consistency | digests | file | share, wall | share, CPU | merge |")
    click.echo("|---|---|---|---|---|---|---|---|")
    first = rows[0]
    for row in rows:
        exact = next(s for s in row["scenarios"] if "exact merge" in s["name"] or s["name"] == "one device")
        alone = row["ranks"] == 1
        file = "-" if alone else "equal" if same[f"{row['ranks']} ranks, {row['shard']}"] else "DIFFERENT"
        cells = [
            str(row["ranks"]),
            row["shard"],
            f"{exact['within']}/{exact['tensors']}",
            "equal" if row["digests"] == first["digests"] else "DIFFERENT",
            file,
            *(f"{min(row[key]):.2f} s ({min(row[key]) / min(first[key]):.2f}x)" for key in ("share", "cpu")),
            f"{min(row['merge']):.2f} s",
        ]
        click.echo(f"| {' | '.join(cells)} |")


def print_scenarios(rows: list[dict[str, Any]]) -> None:
    click.echo("\n| scenario | within tolerance | same bits | largest difference | in tensor | source |")
    click.echo("|---" * 6 + "|")
    for row in rows:
        for found in row["scenarios"] if row["shard"] == "cyclic" else ():
            cells = [
                found["name"],
                f"{found['within']}/{found['tensors']} ({100 * found['within'] / found['tensors']:.1f} %)",
                "yes" if found["identical"] else "no",
                f"{100 * found['largest']:.3g} %",
                found["worst"] if found["largest"] else "-",
                found["source"],
            ]
            click.echo(f"| {' | '.join(cells)} |")


def print_merging(merged: dict[str, Any], paper: list[dict[str, float]]) -> None:
    click.echo(f"\n{merged['parts']} parts, {merged['tensors']} tensors: {merged['same']}")
    click.echo(
        f"message: {merged['bytes_per_tensor_part']:.0f} bytes a tensor for one part, "
        f"{merged['bytes_per_tensor_whole']:.0f} for the whole ({merged['raw_bytes_per_tensor']} raw)"
    )
    click.echo("per tensor: " + ", ".join(f"{k} {1e6 * v:.0f} us" for k, v in merged["seconds_per_tensor"].items()))
    click.echo("\n| ranks | steps up | compute on the longest path | received by a rank | 10 Gbit/s network |")
    click.echo("|---|---|---|---|---|")
    for line in paper:
        cells = [
            f"{line['ranks']:.0f}",
            f"{line['steps']:.0f}",
            f"{1e3 * line['compute_s']:.0f} ms",
            f"{line['bytes_received'] / 1e6:.2f} MB",
            f"{1e3 * line['network_s']:.1f} ms",
        ]
        click.echo(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
