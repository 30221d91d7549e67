"""The CUDA kernels against the CPU's, bit for bit: on this CPU through a shim, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrators import TensorStatistics
from calibrators.accumulate import add_batch
from pipeline.core.errors import InputError, ToolError
from plugins import statistics as module
from plugins.layout import PARTIAL_BYTES, RECORD, SEGMENT, TUNING, Tuning, cut, macros
from plugins.statistics import SOURCE, DeviceArray, GpuStatistics
from tests.plugins import fake_cuda
from tests.plugins.batches import activations, on_cpu, views

Array = np.ndarray
SMALL = Tuning(threads=16, per_thread=8, blocks_per_sm=1, pieces=2, finish_threads=32)
"""Tiles of 256 elements, so that small arrays have many."""

needs_compiler = pytest.mark.skipif(fake_cuda.compiler() is None, reason="needs g++ to run the kernels on the CPU")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def cuda(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, fake in fake_cuda.modules(libraries).items():
        monkeypatch.setitem(sys.modules, name, fake)
    yield
    assert fake_cuda.CONTEXT.depth == 0, "the context was given back"


def on_device(
    batches: Sequence[Sequence[Array]], *, tuning: Tuning = SMALL, skip: bool = False
) -> list[TensorStatistics]:
    names = [f"t{k}" for k in range(len(batches[0]))]
    with GpuStatistics(names, tuning=tuning, skip_nonfinite=skip) as statistics:
        for index, arrays in enumerate(batches):
            statistics.update(views(arrays), index)
        return list(statistics.collect().values())


@needs_compiler
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "tuning",
    [
        SMALL,
        Tuning(threads=32, per_thread=16, blocks_per_sm=2, pieces=3, finish_threads=64, slices=2),
        replace(SMALL, slices=1),
        replace(SMALL, finish_threads=64, slices=128),
    ],
    ids=["small", "wide", "one slice", "more threads than columns"],
)
def test_same_bits_as_the_cpu(seed: int, tuning: Tuning) -> None:
    batches = activations(seed)
    for number, (found, expected) in enumerate(zip(on_device(batches, tuning=tuning), on_cpu(batches), strict=True)):
        assert found == expected, f"tensor {number}"


@needs_compiler
@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_same_bits_in_any_order(seed: int, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and blocks run in other orders, while blocks raise the width of one tensor's bins."""
    for name, fake in fake_cuda.modules(libraries, seed).items():
        monkeypatch.setitem(sys.modules, name, fake)
    growth = np.random.default_rng(seed).standard_normal(2400) * 2.0 ** (np.arange(2400) // 150)
    tuning = replace(SMALL, blocks_per_sm=2, pieces=4)
    positive: Array = np.clip(growth, 0, 6e4).astype(np.float16)
    batch: list[Array] = [growth.astype(np.float32), growth[::-1].astype(np.float32), positive]
    assert on_device([batch], tuning=tuning) == on_cpu([batch])


floats = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 1.0]),
)


@needs_compiler
@pytest.mark.usefixtures("cuda")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(hnp.arrays(np.float32, st.integers(0, 600), elements=floats), min_size=1, max_size=3))
def test_same_bits_for_any_values(arrays: list[Array]) -> None:
    assert on_device([arrays]) == on_cpu([arrays])


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_unaligned_arrays() -> None:
    x = np.random.default_rng(0).standard_normal(2001).astype(np.float32)
    arrays = [x[1:], x[3:2000], x.astype(np.float16)[1:]]
    assert on_device([arrays]) == on_cpu([arrays])


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_the_same_buffers_with_other_values() -> None:
    buffer = np.ones(500, np.float32)
    bound = tuple(views([buffer]))
    with GpuStatistics(["a"], tuning=SMALL) as statistics:
        statistics.update(bound, 0)
        buffer *= 3.0
        statistics.update(bound, 1)
        statistics.update(tuple(views([buffer[:7]])), 2)
        found = statistics.collect()["a"]
    assert found == on_cpu([[np.ones(500, np.float32)], [buffer], [buffer[:7]]])[0]


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_skipping_leaves_a_batch_out_of_every_tensor() -> None:
    good, bad = np.ones(700, np.float32), np.ones(700, np.float32)
    bad[600] = np.nan
    batches = [[good, good], [good, bad], [2 * good, good]]
    found = on_device(batches, skip=True)
    expected = [TensorStatistics() for _ in range(2)]
    for index in (0, 2):
        for stats, array in zip(expected, batches[index], strict=True):
            add_batch(stats, array, index)
    assert found == expected


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_nonfinite_batches_are_named_and_more_batches_may_follow() -> None:
    x = np.ones(300, np.float32)
    bad, doubled = np.array([np.nan, np.inf, np.inf, 1.0], np.float32), 2 * x  # kept while they are looked at
    with GpuStatistics(["a", "b"], tuning=SMALL) as statistics:
        statistics.update(views([x, x]), 0)
        assert statistics.nonfinite() == []
        statistics.update(views([x, bad]), 1)
        assert statistics.nonfinite() == [(1, "b", 1, 2)]
        first = statistics.collect()
        statistics.update(views([doubled, x]), 2)
        second = statistics.collect()
    assert first["a"].elements == 600
    assert second["a"].elements == 900
    assert second["b"].infs == 2


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_records_are_fetched_when_they_fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HISTORY", 2)
    batches = [[np.full(10, float(index), np.float32)] for index in range(5)]
    assert on_device(batches) == on_cpu(batches)


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_no_tensor_and_no_batch() -> None:
    with GpuStatistics([], tuning=SMALL) as statistics:
        statistics.update([], 0)
        assert statistics.collect() == {}
    with GpuStatistics(["a"], tuning=SMALL) as statistics:
        assert statistics.collect() == {"a": TensorStatistics()}


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_what_is_refused() -> None:
    x = np.ones(4, np.float32)
    with GpuStatistics(["a"], tuning=SMALL) as statistics:
        statistics.update(views([x]), 3)
        for arrays, index, message in (
            (views([x]), 3, "batch 3 comes twice"),
            (views([x]), -1, "batch index -1 is negative"),
            (views([x, x]), 4, "batch 4 has 2 arrays, 1 tensors are calibrated"),
            ([DeviceArray(0, 4, "int8")], 4, "tensor 'a' is int8; on a CUDA device float32 and float16 are calibrated"),
            ([DeviceArray(0, 1 << 32)], 4, "tensor 'a' has 4294967296 values in batch 4"),
        ):
            with pytest.raises(InputError, match=message):
                statistics.update(arrays, index)
        assert statistics.collect()["a"].batch_index.tolist() == [3]
    with pytest.raises(ToolError, match="no CUDA device 1 can be used: invalid device ordinal"):
        GpuStatistics(["a"], device=1)


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "statistics.cu"
    source.write_text("error")
    monkeypatch.setattr(module, "SOURCE", source)
    with pytest.raises(ToolError, match=r"statistics\.cu cannot be compiled: nvcc compilation failed"):
        GpuStatistics(["a"], tuning=SMALL)


def test_without_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(InputError, match="calibration on a CUDA device needs the package 'pycuda\\.driver'"):
        GpuStatistics(["a"])


@needs_compiler
def test_records_have_the_kernels_layout(libraries: Path) -> None:
    sizes = fake_cuda.build(libraries, macros(SMALL)).sizes
    assert [sizes(which) for which in range(3)] == [SEGMENT.itemsize, PARTIAL_BYTES, RECORD.itemsize]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 20), st.sampled_from([1, 7, 256]))
def test_cut_deals_every_element_out_once(sizes: list[int], pieces: int, tile: int) -> None:
    segments, of_tensor = cut(sizes, pieces, tile)
    seen = [np.zeros(size, np.int64) for size in sizes]
    for segment in segments:
        assert segment["first"] % tile == 0
        assert segment["count"] > 0
        seen[segment["tensor"]][segment["first"] : segment["first"] + segment["count"]] += 1
    assert all((each == 1).all() for each in seen)
    assert (np.diff(segments["count"].astype(np.int64)) <= 0).all(), "the largest first"
    assert of_tensor[-1] == len(segments) <= pieces + len(sizes)
    by_slot = segments[np.argsort(segments["slot"])]
    assert (by_slot["slot"] == np.arange(len(segments))).all()
    for tensor in range(len(sizes)):
        assert (by_slot["tensor"][of_tensor[tensor] : of_tensor[tensor + 1]] == tensor).all()
    tiles = sum(-(-size // tile) for size in sizes)
    assert all(-(-int(segment["count"]) // tile) <= max(1, -(-tiles // pieces)) for segment in segments)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_compiles_without_a_warning(tmp_path: Path) -> None:
    options = [f"-D{name}={value}" for name, value in macros(TUNING).items()]
    command = ["nvcc", "-arch=sm_80", "-cubin", "-o", str(tmp_path / "s.cubin"), *options, str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_shim_is_a_fake() -> None:
    memory = fake_cuda.Memory(8)
    assert int(memory) % 16 == 0
    assert ctypes.string_at(int(memory), 8) == b"\xa5" * 8
