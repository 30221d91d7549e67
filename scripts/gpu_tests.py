#!/usr/bin/env python3
"""Run the tests that need a GPU, several at a time: most of their time is TensorRT's start in a child process.

    gpu_tests.py --out OUT [--limit-s SECONDS] FILE... [-- pytest arguments]

The tests of a file go, in order, to a few pytest processes; engines of fixtures and the timing cache are shared between
them. Tests marked `alone` (they watch the card's memory) run after all others. Writes OUT/gpu-tests.log and .xml, and
prints each process's output when it ends. Exit status: 0, or the first that is not; 124 when --limit-s was reached.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS_A_PROCESS = 3
PROCESSES = 12
NOTHING_RUN = 5  # pytest's exit status
OUT_OF_TIME = 124


@dataclass(frozen=True)
class Found:
    node: str
    alone: bool


class Collector:
    """A pytest plugin that keeps what was collected."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = [Found(item.nodeid, item.get_closest_marker("alone") is not None) for item in session.items]


def shards(found: Sequence[Found], size: int = TESTS_A_PROCESS) -> tuple[list[list[str]], list[str]]:
    """Node ids for each process, and those that run alone afterwards. No process gets tests of two files."""
    files: dict[str, list[str]] = {}
    for test in found:
        if not test.alone:
            files.setdefault(test.node.partition("::")[0], []).append(test.node)
    parts = [nodes[start : start + size] for nodes in files.values() for start in range(0, len(nodes), size)]
    return parts, [test.node for test in found if test.alone]


def merged(paths: Sequence[Path]) -> ElementTree.Element:
    """The test suites of several JUnit files in one."""
    root = ElementTree.Element("testsuites")
    for path in paths:
        if path.exists():
            root.extend(ElementTree.parse(path).getroot().iter("testsuite"))
    return root


def run(
    nodes: Sequence[str], xml: Path, arguments: Sequence[str], environment: dict[str, str], limit_s: float | None
) -> tuple[int, str]:
    """One pytest process; its exit status and what it printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", "--durations=6", f"--junitxml={xml}"]
    try:
        done = subprocess.run(
            [*command, *arguments, *nodes],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        return OUT_OF_TIME, f"{said}\nstopped, out of time: {' '.join(nodes)}"
    return done.returncode, done.stdout.decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=None)
    given, arguments = sys.argv[1:], []
    if "--" in given:
        split = given.index("--")
        given, arguments = given[:split], given[split + 1 :]
    options = parser.parse_args(given)
    collector = Collector()
    status = pytest.main(
        ["--collect-only", "-qq", "-m", "gpu", "-p", "no:cacheprovider", *arguments, *options.files],
        plugins=[collector],
    )
    if status:
        return int(status)
    parts, alone = shards(collector.found)
    start, statuses = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="quantize-gpu-tests-") as scratch:
        environment = {**os.environ, "QUANTIZE_GPU_TESTS": scratch}
        paths = [Path(scratch) / f"{number}.xml" for number in range(len(parts) + 1)]

        def start_one(nodes: list[str], xml: Path) -> tuple[int, str]:
            left = None if options.limit_s is None else max(1.0, options.limit_s - (time.monotonic() - start))
            return run(nodes, xml, arguments, environment, left)

        def report(result: tuple[int, str]) -> None:
            statuses.append(result[0])
            text = f"[{time.monotonic() - start:.1f} s]\n{result[1]}"
            print(text, flush=True)
            with (options.out / "gpu-tests.log").open("a" if len(statuses) > 1 else "w") as log:
                log.write(text)

        with ThreadPoolExecutor(PROCESSES) as pool:
            for future in as_completed([pool.submit(start_one, *job) for job in zip(parts, paths, strict=False)]):
                report(future.result())
        if alone:
            report(start_one(alone, paths[-1]))
        summary = merged(paths)
        ElementTree.ElementTree(summary).write(options.out / "gpu-tests.xml")
    cases = [(case, {child.tag for child in case}) for case in summary.iter("testcase")]
    bad = [f"{case.get('classname')}::{case.get('name')}" for case, tags in cases if tags & {"failure", "error"}]
    skipped = sum("skipped" in tags for _, tags in cases)
    passed, unknown = len(cases) - len(bad) - skipped, len(collector.found) - len(cases)
    text = f"{passed} passed, {skipped} skipped, {len(bad)} failed, {unknown} without a result"
    print(f"{text}, of {len(collector.found)} in {time.monotonic() - start:.1f} s", *bad, sep="\n  ")
    return next((code for code in statuses if code not in (0, NOTHING_RUN)), 0)


if __name__ == "__main__":
    sys.exit(main())
