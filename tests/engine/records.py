"""Engine records and measurements for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.engine.bench import Measurement
from pipeline.engine.records import BuildOptions, DeviceInfo, EngineRecord
from tests.engine.conftest import CARD

OTHER = DeviceInfo(name="Other card", compute_capability="8.6", driver="1.2.3", memory_bytes=1 << 30)


def record(**fields: Any) -> EngineRecord:
    """A TensorRT 8.6.0 engine of the fake card."""
    values: dict[str, Any] = {
        "target": "tensorrt",
        "tensorrt": "8.6.0",
        "plan_sha256": "0" * 64,
        "plan_bytes": 10,
        "build_seconds": 1.5,
        "peak_memory_bytes": 1 << 20,
        "peak_gpu_memory_bytes": None,
        "device": CARD,
        "profiles": (),
        "options": BuildOptions(),
        "timing_cache": "new",
        "layers": None,
        "messages": (),
        **fields,
    }
    return EngineRecord(**values)


def measurement(name: str, *rounds_ms: float, batch: int = 8, graph: bool = False) -> Measurement:
    """Of one engine, whose rounds took so long."""
    middle = float(np.median(rounds_ms))
    return Measurement(
        name=name,
        batch=batch,
        shapes={"x": (batch, 3)},
        cuda_graph=graph,
        profile=0,
        p50_ms=middle,
        p90_ms=middle,
        p99_ms=middle,
        throughput=1000 * batch / middle,
        latency_p50_ms=middle,
        latency_p99_ms=middle,
        launch_us=1,
        runs=10,
        rounds_ms=rounds_ms,
        captured=graph,
    )
