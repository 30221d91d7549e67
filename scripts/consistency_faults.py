"""Break a calibration over several ranks in many ways: it has to end at once, everywhere, for the right reason.

    python scripts/consistency_faults.py [--trials 60] [--ranks 3] [--seed 0] [--json faults.json]

Every trial forks real processes that calibrate a small network on a folder of images over gloo. A trial passes when all
ranks have ended in time, exactly one of them has given a reason, the reason names the rank and the fault, and no result
was written; or, where the fault came too late or was no more than a delay, when the result has the digest of an
undisturbed single process. Ranks are forked from a process that has imported everything, so that a trial takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.forked_ranks import PRELOADED, fork, free_port, preload, rank_environment

DEADLINE_S = 60.0
AGENT_KILLS_AFTER_S = 30.0
IMAGES, BATCH = 72, 3


@dataclass
class Plan:
    """What one rank is given, and what happens in it."""

    model: Path
    data: Path
    hang_at: int | None = None
    """Batch before which the rank sleeps for ever."""
    delay_at: int | None = None
    delay_s: float = 0.0
    limit_s: float = 6.0
    """--rank-timeout; its default is 25 s."""
    signal_at: tuple[int | str, signal.Signals] | None = None
    """The rank sends itself this signal before a sample, or (``merge``) before it packs its statistics."""


@dataclass
class Trial:
    kind: str
    victim: int
    expected: tuple[str, ...]
    """Patterns; every one has to be found in the reason."""
    plans: list[Plan]
    signal_at: tuple[float, signal.Signals] | None = None
    may_succeed: bool = False
    detail: str = ""
    outcome: str = ""
    seconds: float = 0.0
    said: list[str] = field(default_factory=list)


def make_inputs(folder: Path, seed: int) -> tuple[Path, Path]:
    """A network of five convolutions and a folder of small images."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from PIL import Image

    generator = np.random.default_rng(seed)
    nodes, weights, name = [], [], "x"
    for number in range(5):
        array = generator.standard_normal((32, 3 if number == 0 else 32, 3, 3)) / 10
        weights.append(numpy_helper.from_array(array.astype(np.float32), f"w{number}"))
        nodes.append(helper.make_node("Conv", [name, f"w{number}"], [f"c{number}"], name=f"conv{number}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"], name=f"relu{number}"))
        name = f"r{number}"
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 40, 40])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 32, 40, 40])], weights,
    )  # fmt: skip
    model = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), model)
    data = folder / "images"
    data.mkdir()
    for number in range(IMAGES):
        pixels = generator.integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels // np.uint8(1 + number % 3)).save(data / f"{number:03}.png")
    return model, data


def other_model(model: Path, folder: Path) -> Path:
    """The same network, one weight a little larger."""
    import onnx
    from onnx import numpy_helper

    proto = onnx.load(model)
    array = numpy_helper.to_array(proto.graph.initializer[2]).copy()
    array[0, 0, 0, 0] += 1e-3
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(array, proto.graph.initializer[2].name))
    onnx.save(proto, folder / "other.onnx")
    return folder / "other.onnx"


def other_image(data: Path, folder: Path, number: int) -> Path:
    """The same folder, one pixel of one image changed."""
    from PIL import Image

    copy = folder / "other-image"
    shutil.copytree(data, copy)
    path = sorted(copy.iterdir())[number]
    with Image.open(path) as image:
        pixels = np.array(image)
    pixels[3, 4, 0] ^= 0x40
    Image.fromarray(pixels).save(path)
    return copy


def other_order(data: Path, folder: Path, first: int, second: int) -> Path:
    """The same images, two of them in each other's place."""
    copy = folder / "other-order"
    shutil.copytree(data, copy)
    a, b = (sorted(copy.iterdir())[number] for number in (first, second))
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    return copy


class Disturbed:
    """A data source that hangs or is slow at one sample."""

    def __init__(self, source: Any, plan: Plan) -> None:
        self._source, self._plan = source, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, wanted: Callable[[int], bool]) -> Iterator[Any]:
        for number, sample in self._source.read(wanted):
            if self._plan.hang_at is not None and number >= self._plan.hang_at:
                time.sleep(1e6)
            if self._plan.signal_at is not None and number == self._plan.signal_at[0]:
                os.kill(os.getpid(), self._plan.signal_at[1])
            if self._plan.delay_at is not None and number >= self._plan.delay_at:
                self._plan.delay_at = None
                time.sleep(self._plan.delay_s)
            yield number, sample


def rank_main(plan: Plan, out: Path) -> None:
    """What a rank does: the way of `quantize calibrate`, on this trial's inputs."""
    from dataclasses import replace

    from pipeline.cli.ranks import rank_session
    from pipeline.config import Preprocess
    from pipeline.consistency import exchange
    from pipeline.consistency.distributed import calibrate_share, check_agreement
    from pipeline.consistency.group import PREPARING
    from pipeline.consistency.opening import open_work
    from pipeline.consistency.wire import digest_statistics

    if plan.signal_at is not None and plan.signal_at[0] == "merge":
        number = plan.signal_at[1]
        exchange.pack = lambda *_: os.kill(os.getpid(), number)  # type: ignore[assignment]
    with rank_session(backend="gloo", limit_s=plan.limit_s) as group:
        group.phase("preparing the model", patience=PREPARING)
        with tempfile.TemporaryDirectory() as folder:
            opened = open_work(
                str(plan.model), str(plan.data), folder=Path(folder), preprocess=Preprocess(), samples=IMAGES,
                batch_size=BATCH,
            )  # fmt: skip
            check_agreement(group, opened.work, model_sha256=opened.model_sha256)
            work = replace(opened.work, source=Disturbed(opened.work.source, plan))
            share = calibrate_share(group, work)
        if group.rank == 0:
            (out / "result.json").write_text(json.dumps({"digest": digest_statistics(share.merged)}))


def keep_store(port: int, ranks: int) -> None:
    """Stand in for torchrun's agent, which keeps the ranks' store."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=30), wait_for_workers=False)
    while store:
        time.sleep(1)


def run(trial: Trial, folder: Path, *, agent: bool) -> tuple[dict[int, int], Path]:
    """Start the ranks, do the harm, wait; exit status of each rank (negative: signal; absent: still running)."""
    port, size = free_port(), len(trial.plans)
    keeper = fork(lambda: keep_store(port, size), {}, folder / "store.log") if agent else None
    pids = {}
    start = time.monotonic()
    for rank, plan in enumerate(trial.plans):
        environment = rank_environment(rank, size, port) | {"TORCHELASTIC_USE_AGENT_STORE": str(agent)}
        pids[fork(lambda plan=plan: rank_main(plan, folder), environment, folder / f"rank{rank}.log")] = rank
    pending: dict[int, int] = dict(pids)
    codes: dict[int, int] = {}
    failed_at: float | None = None
    while pending and time.monotonic() - start < DEADLINE_S:
        now = time.monotonic()
        if trial.signal_at is not None and now - start >= trial.signal_at[0]:
            victim = next(pid for pid, rank in pids.items() if rank == trial.victim)
            if victim in pending:
                os.kill(victim, trial.signal_at[1])
            trial.signal_at = None
        for pid in list(pending):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pending.pop(pid)] = os.waitstatus_to_exitcode(status)
        if failed_at is None and any(codes.values()):  # what torchrun's agent does then
            failed_at = now
            for pid in pending:
                os.kill(pid, signal.SIGTERM)
        if failed_at is not None and now - failed_at > AGENT_KILLS_AFTER_S:
            for pid in pending:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    trial.seconds = time.monotonic() - start
    for pid in [*pending, *([keeper] if keeper else [])]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes, folder


def judge(trial: Trial, codes: dict[int, int], folder: Path, digest: str) -> str:
    """ok, late (the fault came after the end), or what is wrong."""
    result = folder / "result.json"
    logs = [(folder / f"rank{rank}.log").read_text() for rank in range(len(trial.plans))]
    trial.said = [
        line.removeprefix("error: ") for text in logs for line in text.splitlines() if line.startswith("error: ")
    ]
    if len(codes) < len(trial.plans):
        return "HANG"
    if any("Traceback" in text for text in logs):
        return "TRACEBACK"
    if result.exists():
        if json.loads(result.read_text())["digest"] != digest:
            return "WRONG RESULT"
        if trial.said and not trial.may_succeed:
            return "RESULT AND ERROR"
        return "ok, right result" if trial.kind == "delay" else "too late" if trial.may_succeed else "WRONG PASS"
    survivors = [code for rank, code in codes.items() if not (code < 0 and rank == trial.victim)]
    if not all(survivors):
        return "A RANK SAYS SUCCESS"
    if len(trial.said) != 1:
        return f"{len(trial.said)} REASONS"
    missing = [pattern for pattern in trial.expected if not re.search(pattern, trial.said[0])]
    return "ok, named" if not missing else f"NOT NAMED: {missing[0]}"


def make_trial(
    kind: str, ranks: int, limit_s: float, model: Path, data: Path, folder: Path, healthy_s: float, rng: random.Random
) -> Trial:
    victim = rng.randrange(ranks)
    plans = [Plan(model, data, limit_s=limit_s) for _ in range(ranks)]
    mine, rank = plans[victim], f"rank {victim}"
    own = [index * BATCH for index in range(IMAGES // BATCH) if index % ranks == victim]
    name, _, where = kind.partition("-")
    if name in ("kill", "stop"):
        number = signal.SIGKILL if name == "kill" else signal.SIGSTOP
        words = "died" if name == "kill" else "no sign of life"
        expected = (rank, f"{words}|did not come|not answer|cannot be reached")
        if not where:
            at = rng.uniform(0.02, healthy_s)
            return Trial(kind, victim, expected, plans, (at, number), True, f"rank {victim} after {at:.2f} s")
        mine.signal_at = ("merge" if where == "merge" else rng.choice(own), number)
        return Trial(kind, victim, expected, plans, detail=f"rank {victim} at {mine.signal_at[0]}")
    if kind == "hang":
        mine.hang_at = rng.choice(own)
        return Trial(kind, victim, (rank, "stalls"), plans, detail=f"rank {victim} before sample {mine.hang_at}")
    if kind == "delay":
        mine.delay_at, mine.delay_s = rng.choice(own), rng.uniform(0.5, 0.6 * mine.limit_s)
        return Trial(kind, victim, (), plans, may_succeed=True, detail=f"rank {victim} by {mine.delay_s:.1f} s")
    if kind == "image":
        number = rng.randrange(IMAGES)
        mine.data = other_image(data, folder, number)
        return Trial(
            kind, victim, ("another data", f"{number:03}.png"), plans, detail=f"rank {victim}, image {number:03}.png"
        )
    if kind == "model":
        mine.model = other_model(model, folder)
        return Trial(kind, victim, ("another model", rank if ranks > 2 else "rank"), plans, detail=f"rank {victim}")
    if kind == "order":
        first, second = rng.sample(range(IMAGES), 2)
        mine.data = other_order(data, folder, first, second)
        words = ("another data", "another order")
        return Trial(kind, victim, words, plans, detail=f"rank {victim}, images {first} and {second} exchanged")
    raise ValueError(kind)


GOOD = ("ok, named", "ok, right result", "too late")

KINDS = {
    "kill": 12, "kill-batch": 10, "kill-merge": 6, "stop": 5, "stop-merge": 3, "hang": 6, "delay": 6, "image": 6,
    "model": 4, "order": 4,
}  # fmt: skip
"""Shares of the kinds."""


@click.command()
@click.option("--trials", default=60, show_default=True)
@click.option("--kinds", help="One trial of each of these kinds instead: kill,image,...")
@click.option("--ranks", default=3, show_default=True)
@click.option("--limit", "limit_s", default=6.0, show_default=True, help="--rank-timeout of the trials.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(trials: int, kinds: str | None, ranks: int, limit_s: float, seed: int, json_path: Path | None) -> None:
    """Run the trials and print a line for each kind; exit code 1 when one of them failed."""
    preload(PRELOADED)
    rng = random.Random(seed)
    done: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="quantize-faults-") as name:
        root = Path(name)
        model, data = make_inputs(root, seed)
        healthy = []
        for size in (1, ranks):
            folder = root / f"healthy{size}"
            folder.mkdir()
            trial = Trial("none", 0, (), [Plan(model, data, limit_s=limit_s) for _ in range(size)], may_succeed=True)
            codes, _ = run(trial, folder, agent=size > 1)
            if set(codes.values()) != {0}:
                raise click.ClickException((folder / "rank0.log").read_text())
            healthy.append((json.loads((folder / "result.json").read_text())["digest"], trial.seconds))
        (digest, _), (together, healthy_s) = healthy
        if together != digest:
            raise click.ClickException(f"{ranks} ranks give {together}, one process gives {digest}")
        click.echo(f"undisturbed: {ranks} ranks give the digest of one process ({digest[:16]}), {healthy_s:.1f} s")
        whole = sum(KINDS.values())
        order = [kind for kind, share in KINDS.items() for _ in range(max(1, round(share * trials / whole)))]
        for number, kind in enumerate(kinds.split(",") if kinds else order):
            folder = root / f"trial{number}"
            folder.mkdir()
            trial = make_trial(kind, ranks, limit_s, model, data, folder, healthy_s, rng)
            codes, _ = run(trial, folder, agent=rng.random() < 0.5)
            trial.outcome = judge(trial, codes, folder, digest)
            done.append(trial)
            said = " | ".join(trial.said)
            line = f"{number + 1:3} {kind:10} {trial.detail:40} {trial.seconds:5.1f} s  {trial.outcome:16} {said}"
            click.echo(line.rstrip())
            if trial.outcome not in GOOD:
                for log in sorted(folder.glob("*.log")):
                    click.echo(f"--- {log.name}\n{log.read_text()}")
            shutil.rmtree(folder)
    print_table(done)
    if json_path is not None:
        rows = [
            {"kind": t.kind, "detail": t.detail, "seconds": round(t.seconds, 2), "outcome": t.outcome, "said": t.said}
            for t in done
        ]
        json_path.write_text(json.dumps(rows, indent=1) + "\n")
    if not all(trial.outcome in GOOD for trial in done):
        raise SystemExit(1)


def print_table(done: list[Trial]) -> None:
    click.echo(
        "\n| fault | trials | named | right result | too late | wrong | longest |\n|---|---|---|---|---|---|---|"
    )
    for kind in [*KINDS, "all"]:
        rows = [trial for trial in done if kind in (trial.kind, "all")]
        named, right, late = (
            sum(t.outcome == text for t in rows) for text in ("ok, named", "ok, right result", "too late")
        )
        wrong = len(rows) - named - right - late
        longest = max((t.seconds for t in rows), default=0.0)
        click.echo(f"| {kind} | {len(rows)} | {named} | {right} | {late} | {wrong} | {longest:.1f} s |")


if __name__ == "__main__":
    main()
