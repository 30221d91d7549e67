"""Tables at 80 columns: figures and headers whole, names folded, whatever their length."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.cli import bench, coverage, drift, inspect, mixed_options
from pipeline.cli.common import console
from pipeline.cli.engine_view import print_view
from pipeline.cli.tables import add_row, new_table, print_table
from pipeline.compare.drift import DriftReport, TensorDrift
from pipeline.engine.bench import Overlap
from pipeline.engine.coverage import Coverage, ProfileUse
from pipeline.engine.inspect import EngineLayer
from pipeline.engine.suite import EngineUse, Load, SuiteResult
from pipeline.engine.view import EngineView
from tests.engine.artifacts import manifest
from tests.engine.conftest import CARD
from tests.engine.records import measurement

NAME = "/encoder/layers.11/attention/self/query/MatMul[1]_output_0_QuantizeLinear"
CLI = Path(bench.__file__).parent


def plain(width: int = 80) -> tuple[Console, Callable[[], str]]:
    """As :func:`pipeline.cli.common.console`, and what it has printed."""
    stream = io.StringIO()
    return Console(file=stream, width=width, highlight=False, markup=False), stream.getvalue


def check(text: str, *cells: str, width: int = 80) -> None:
    """Nothing is cut, every cell stands in one line, and the long name is all there, over several."""
    assert "…" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= width, text
    for cell in cells:
        assert any(re.search(rf"(^|\s){re.escape(cell)}(\s|$)", line) for line in lines), f"{cell} in\n{text}"
    if "/encoder" in text:
        assert NAME in "".join(line.split()[0] for line in lines if line.strip())


def drift_report() -> DriftReport:
    row = TensorDrift(
        tensor=NAME, calibrated=12345.0, recent=0.0001234, change=-1.0, flagged=True, amax=1.234e-05,
        error_calibrated=0.0123, error_recent=12.3456, error_recalibrated=0.0042, clipped_recent=0.98765,
    )  # fmt: skip
    return DriftReport(
        artifact="artifacts/net", data="d", samples=1000, calibration_samples=128, calibrator="mse", limit=0.15,
        measure="percentile", tensors=(row, row.model_copy(update={"tensor": "x", "flagged": False})),
    )  # fmt: skip


def mixed_entry(*, labels: bool = True) -> dict[str, Any]:
    top1 = 0.7654 if labels else None
    points = [
        {
            "number": number, "int8_share": 0.98765, "lost": 1.234e8 * number, "restored": 11 * number,
            "meets": number > 1, "best": True,
            "figures": {"sqnr_db": 23.456, "agreement": 0.9912, "top1": top1, "top1_fp32": 0.77 if labels else None},
        }
        for number in range(12)
    ]  # fmt: skip
    return {
        "text": "top-1 drop of at most 0.5 points", "point": 11, "points": points, "unit": "MACs", "check_samples": 186,
    }  # fmt: skip


def test_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    out, printed = plain()
    monkeypatch.setattr(drift, "console", lambda: out)
    drift.print_report(drift_report())
    figures = ("1.234e+04", "0.0001234", "-100.0", "1.234e-05", "98.765", "0.0123", "12.3456", "0.0042")
    headers = ("tensor", "range", "then", "now", "change", "amax", "clipped", "error", "renewed")
    check(printed(), *figures, *headers)


def test_the_points_of_a_search() -> None:
    for labels in (True, False):
        out, printed = plain()
        print_table(out, mixed_options.mixed_table(mixed_entry(labels=labels)))
        headers = ("point", "MACs", "lost", "nodes", "SQNR", "agreement", "meets")
        check(printed(), "11 built", "98.8 %", "1.357e+09", "121", "23.46 dB", "99.12 %", "yes *", *headers)
        assert ("76.54 %" in printed()) == labels


def test_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "efficientnet-lite0 fastest"
    more = {"plan": "float", "launch_us": 123}
    warm = [
        measurement(name, 12.3456, 13.34, batch=128, graph=graph).model_copy(update=more)
        for graph in (True, False)
    ]  # fmt: skip
    overlap = Overlap(
        name=name, batch=128, cuda_graph=True, compute_alone=123456.0, one_at_a_time=61234.0, overlapped=119876.0,
        copy_in_alone=234567.0, in_flight=2,
    )  # fmt: skip
    load = Load(
        name=name, batches=(1, 8, 64), in_flight=8, throughput=123456.0, latency_p50_ms=12.34, latency_p90_ms=23.45,
        latency_p99_ms=123.45,
    )  # fmt: skip
    engine = EngineUse(name=name, plan_bytes=123_400_000, device_bytes=1_234_000_000, build_seconds=123.4)
    out, printed = plain()
    monkeypatch.setattr(bench, "console", lambda: out)
    parts: dict[str, Any] = {"engines": (engine,), "warm": tuple(warm), "load": (load,), "overlap": (overlap,)}
    bench.show(SuiteResult(device=CARD, tensorrt="8.6.0", **parts))
    check(
        printed().partition("\n")[2], "128", "12.843", "P90", "P99", "123", "8.1 %", "123,456", "119,876", "234,567",
        "97.1 %", "12.34", "123.45", "123.4 MB", "1234 MB", "123.4 s",
    )  # fmt: skip


def test_coverage_and_files() -> None:
    profile = "x=1x3x224x224,8x3x224x224,64x3x224x224;mask=1x16,8x16,64x16;positions=1x512,8x512,64x512"
    use = ProfileUse(profile=profile, requests=1_234_567, share=0.98765, mean_distance=12.34)
    found = Coverage(requests=1_234_567, covered=1.0, mean_distance=12.34, uses=(use,), uncovered=())
    out, printed = plain()
    print_table(out, coverage._table("profiles of the artifact", found))
    check(
        printed(), "1234567", "98.8 %", "12.34", "requests", "share", "distance",
        "(sum of |log2(dimension / optimum)|, 1: twice or half the optimum)",
    )  # fmt: skip
    target = {
        "version": "10.13.3.9", "plan_bytes": 123_400_000, "build_seconds": 1234.5, "peak_memory_bytes": 12_345_000_000,
        "built_on": "NVIDIA H200 (compute capability 9.0, driver 580.159.04)",
    }  # fmt: skip
    out, printed = plain()
    made = manifest((profile,), shape=("N", 3, 224, 224), targets={"tensorrt": target})
    for table in (inspect.summary_table(made), inspect.targets_table(made)):
        print_table(out, table)
    check(printed(), "10.13.3.9", "123.4 MB", "1234.5 s", "12345 MB")


def test_layers_of_an_engine_keep_their_brackets() -> None:
    tactic = "sm80_xmma_fprop_implicit_gemm_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32"
    layer = EngineLayer(name=NAME, kind="Conv", operation="Convolution", tactic=tactic)
    view = EngineView(
        target="tensorrt", tensorrt="8.6.0", built_on="a card", layers=(layer,), times_ms={NAME: 1.2345}, shapes={},
        findings=(),
    )  # fmt: skip
    out, printed = plain()
    print_view(out, view)
    assert "1.2345" in printed()
    assert "…" not in printed()
    assert "\\" not in printed()


@pytest.mark.parametrize("width", [20, 40, 80])
def test_figures_are_whole_where_the_terminal_is_too_narrow(width: int) -> None:
    table = new_table("title", ("name", "text"), *((f"figure {n}", "figure") for n in range(8)))
    add_row(table, NAME, *(f"{n}.2345678" for n in range(8)))
    out, printed = plain(width)
    print_table(out, table)
    needed = max(map(len, printed().splitlines()))
    check(printed(), *(f"{n}.2345678" for n in range(8)), width=needed)
    assert needed <= max(width, 110)


@pytest.mark.parametrize(("terminal", "columns", "width"), [(False, None, 160), (False, "90", 90), (True, None, 80)])
def test_what_goes_into_a_pipe_is_not_broken_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, columns: str | None, width: int
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((80, 25)))
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    out = console()
    assert out.width == width
    out.print(f"{NAME} {NAME}")
    assert len(stream.getvalue().splitlines()) == (1 if width == 160 else 2)


def test_every_table_of_the_command_line_is_made_here() -> None:
    """A table made elsewhere would cut its figures again."""
    own = [path.name for path in CLI.glob("*.py") if re.search(r"\bTable\(|\.add_column\(", path.read_text())]
    assert own == ["tables.py"]
    direct = [path.name for path in CLI.glob("*.py") if re.search(r"\.print\([a-z_.]*table", path.read_text())]
    assert direct == ["tables.py"]
