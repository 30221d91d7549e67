"""Engine records for tests."""

from __future__ import annotations

from typing import Any

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
