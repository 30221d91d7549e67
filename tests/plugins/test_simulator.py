"""What runs the CUDA kernels on this CPU: it sees what hardware stops at, and what only luck makes right."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.plugins import fake_cuda

pytestmark = pytest.mark.skipif(fake_cuda.compiler() is None, reason="needs g++ to run the kernels on the CPU")

SEEDS = 60


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return fake_cuda.compiled(tmp_path_factory.mktemp("faults") / "faults.so", fake_cuda.HERE / "faults.cpp")


def launch(library: ctypes.CDLL, kernel: str, seed: int) -> int:
    """What the kernel counts."""
    raised_and_out = np.zeros(2, np.int32)
    fake_cuda.launched(library, kernel, ctypes.c_uint(seed), ctypes.c_void_p(raised_and_out.ctypes.data))
    return int(raised_and_out[1])


@pytest.mark.parametrize("kernel", ["right", "one_reads"])
def test_right_kernels_pass(library: ctypes.CDLL, kernel: str) -> None:
    assert [launch(library, kernel, seed) for seed in range(SEEDS)] == [0] * SEEDS


AT = r"\(faults\.cpp:\d+\)"


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("places", rf"thread \d+ waits at __syncthreads {AT}, thread \d+ waits at __syncthreads {AT}"),
        ("kinds", rf"waits at __syncthreads(_and)? {AT}, thread \d+ waits at __syncthreads(_and)? {AT}"),
        ("leaves", rf"thread 15 is gone, thread \d+ waits at __syncthreads {AT}|waits at .*, thread 15 is gone"),
        ("lanes", rf"waits at __(any_sync|syncthreads) {AT}, thread \d+ waits at __(any_sync|syncthreads) {AT}"),
        ("shuffles", rf"thread 15 is gone, thread \d+ waits at __shfl_xor_sync {AT}|waits at .*, thread 15 is gone"),
        ("loops", rf"thread 15 waits at __syncthreads {AT}, thread \d+ is gone|is gone, thread 15 waits at __sync"),
        ("write_read", "race for a __shared__ variable: thread .* (reads|writes) at faults"),
        ("write_write", r"race for word \d of dynamic .* thread \d+ writes at faults\.cpp:\d+, thread \d+ writes at"),
        ("read_write", r"race for word \d+ of dynamic shared memory: thread .* writes at faults\.cpp"),
        ("atomic_read", r"race for a __shared__ variable: thread .* changes \(atomic\) at faults"),
    ],
)
def test_faults_are_seen_in_every_order(library: ctypes.CDLL, kernel: str, said: str) -> None:
    for seed in range(SEEDS):
        with pytest.raises(fake_cuda.KernelFault, match=f"^{kernel}, block [0-3]: ") as fault:
            launch(library, kernel, seed)
        fault.match(said)
        fault.match(f"; seed {seed}$")


def test_both_places_are_named(library: ctypes.CDLL) -> None:
    lines = (fake_cuda.HERE / "faults.cpp").read_text().splitlines()
    first, second = (1 + next(k for k, line in enumerate(lines) if f"place {name}" in line) for name in "AB")
    with pytest.raises(fake_cuda.KernelFault, match=rf"faults\.cpp:{first}\)") as fault:
        launch(library, "places", 0)
    fault.match(rf"faults\.cpp:{second}\)")


def test_blocks_run_among_each_other(library: ctypes.CDLL) -> None:
    """What threads of a block find in global memory may differ while other blocks write it."""

    def seen(seed: int) -> str:
        try:
            launch(library, "each_reads", seed)
        except fake_cuda.KernelFault as fault:
            return str(fault)
        return ""

    faults = [fault for fault in map(seen, range(SEEDS)) if fault]
    assert len(faults) > SEEDS // 2
    assert all("waits at __syncthreads (faults.cpp:" in fault for fault in faults)


def test_the_same_seed_the_same_order(library: ctypes.CDLL) -> None:
    def said(seed: int) -> str:
        with pytest.raises(fake_cuda.KernelFault) as fault:
            launch(library, "atomic_read", seed)
        return str(fault.value).partition(";")[0]

    assert [said(seed) for seed in range(SEEDS)] == [said(seed) for seed in range(SEEDS)]
    assert len({said(seed) for seed in range(SEEDS)}) > SEEDS // 4
