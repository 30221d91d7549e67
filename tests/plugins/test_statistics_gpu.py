"""The CUDA kernels on a GPU against the CPU's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.engine.device import no_device_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_device_reason() is not None, reason=str(no_device_reason())),
]


@pytest.mark.parametrize("seed", range(3))
def test_same_bits(seed: int) -> None:
    cuda = pytest.importorskip("pycuda.driver")
    pytest.importorskip("numba")
    from plugins.statistics import DeviceArray, GpuStatistics
    from tests.plugins.batches import activations, on_cpu

    large = [[np.tile(x, 400) for x in arrays] for arrays in activations(seed + 10)]
    batches = activations(seed) + large
    names = [f"t{k}" for k in range(len(batches[0]))]
    with GpuStatistics(names) as statistics:
        for index, arrays in enumerate(batches):
            held = [cuda.to_device(array if array.size else np.zeros(1, array.dtype)) for array in arrays]
            placed = [DeviceArray(int(m), a.size, a.dtype.name) for m, a in zip(held, arrays, strict=True)]
            statistics.update(placed, index)
            statistics.stream.synchronize()  # before what `held` holds is freed
        found = statistics.collect()
    for name, expected in zip(names, on_cpu(batches), strict=True):
        assert found[name] == expected, name


def test_other_layouts_give_the_same_bits() -> None:
    cuda = pytest.importorskip("pycuda.driver")
    pytest.importorskip("numba")
    from plugins.layout import Tuning
    from plugins.statistics import DeviceArray, GpuStatistics
    from tests.plugins.batches import on_cpu

    x = np.maximum(np.random.default_rng(0).standard_normal(3_000_001), 0.0).astype(np.float32)
    for tuning in (
        Tuning(),
        Tuning(blocks_per_sm=1, pieces=1),
        Tuning(threads=256, per_thread=8, blocks_per_sm=4),
        Tuning(threads=1024, blocks_per_sm=1),
        Tuning(finish_threads=256, slices=16),
    ):
        with GpuStatistics(["x"], tuning=tuning) as statistics:
            held = cuda.to_device(x)
            statistics.update([DeviceArray(int(held), x.size)], 0)
            assert statistics.collect()["x"] == on_cpu([[x]])[0]
