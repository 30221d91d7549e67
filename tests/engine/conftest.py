"""The fake card for tests of the runner's own logic."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from pipeline.engine import cuda, device, runner
from pipeline.engine.compat import Api
from pipeline.engine.records import DeviceInfo
from tests.engine.fakes import FakeDriver, FakeGraphs, fake_tensorrt

CARD = DeviceInfo(name="Fake card", compute_capability="9.0", driver="1.2.3", memory_bytes=1 << 30)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine with a fake card: ``driver``, ``graphs`` and ``api`` (TensorRT 8.6.0). Nothing may be left on it."""
    driver, graphs = FakeDriver(), FakeGraphs()
    api = Api(trt=fake_tensorrt(graphs), rtx=False, version="8.6.0")
    package = ModuleType("pycuda")
    package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "no_device_reason", lambda: None)
    monkeypatch.setattr(cuda, "_libcuda", lambda: graphs)
    monkeypatch.setattr(cuda.atexit, "register", lambda function: function)
    monkeypatch.setattr(cuda, "describe_device", lambda number=0: CARD)
    monkeypatch.setattr(device, "describe_device", lambda number=0: CARD)
    monkeypatch.setattr(runner, "load_api", lambda target: api)
    cuda.open_device.cache_clear()
    yield SimpleNamespace(driver=driver, graphs=graphs, api=api)
    cuda.open_device.cache_clear()
    gc.collect()
    assert driver.alive == {}, "memory was left on the card"
    assert all(not work for work in graphs.graphs.values()), "a graph was left"
