"""A card and a TensorRT made of host memory, so that the runner's own logic is tested where there is no GPU.

``FakeDriver`` stands in for ``pycuda.driver`` and counts what is alive; ``fake_tensorrt`` runs "engines" whose plan is
a line of JSON. What the real ones do is tested on a GPU (``test_gpu_*.py``).
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

MEMORY_BYTES = 1 << 30


class DriverMemoryError(Exception):
    """PyCUDA's name for a failed allocation is MemoryError."""


class FakeDriver:
    """The part of ``pycuda.driver`` that :mod:`pipeline.engine.cuda` uses."""

    MemoryError = DriverMemoryError

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.local = threading.local()
        driver = self

        class Context:
            def push(self) -> None:
                driver.local.depth = driver.depth + 1

            @staticmethod
            def pop() -> None:
                assert driver.depth > 0, "pop without push"
                driver.local.depth = driver.depth - 1

            def detach(self) -> None:
                driver.local.depth = 0

        class Allocation:
            def __init__(self, size: int) -> None:
                driver.need_context()
                if sum(driver.alive.values()) + size > MEMORY_BYTES:
                    raise DriverMemoryError(size)
                self.memory = np.full(size, 0xCD, dtype=np.uint8)
                driver.alive[int(self)] = size

            def __int__(self) -> int:
                return int(self.memory.ctypes.data)

            def free(self) -> None:
                driver.need_context()
                del driver.alive[int(self)]

        class Stream:
            def __init__(self, flags: int) -> None:
                driver.need_context()
                assert flags == 1
                self.handle = id(self)

            def synchronize(self) -> None:
                driver.need_context()

        class Event:
            def record(self, stream: Any) -> None:
                driver.need_context()
                self.seconds = time.perf_counter()

            def time_till(self, other: Any) -> float:
                return 1000 * (other.seconds - self.seconds)

        self.Context, self.Stream, self.Event, self.mem_alloc = Context, Stream, Event, Allocation

    @property
    def depth(self) -> int:
        return getattr(self.local, "depth", 0)

    def need_context(self) -> None:
        assert self.depth > 0, "no context is current in this thread"

    def init(self) -> None:
        """Nothing to start."""

    def Device(self, number: int) -> Any:
        return SimpleNamespace(retain_primary_context=self.Context)

    def pagelocked_empty(self, size: int, dtype: Any) -> np.ndarray:
        self.need_context()
        return np.empty(size, dtype=dtype)

    def mem_get_info(self) -> tuple[int, int]:
        return MEMORY_BYTES - sum(self.alive.values()), MEMORY_BYTES

    def memcpy_htod_async(self, address: int, source: np.ndarray, stream: Any) -> None:
        self.need_context()
        assert source.flags.c_contiguous
        memory(address, source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def memcpy_dtoh(self, target: np.ndarray, address: int) -> None:
        self.need_context()
        target.reshape(-1).view(np.uint8)[:] = memory(address, target.nbytes)

    def memcpy_dtoh_async(self, target: np.ndarray, address: int, stream: Any) -> None:
        self.need_context()
        target.reshape(-1).view(np.uint8)[:] = memory(address, target.nbytes)


def memory(address: int, size: int) -> np.ndarray:
    """The bytes at an address of the fake card."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class FakeGraphs:
    """The driver's calls for graphs: what is enqueued while a stream is capturing is kept and replayed."""

    def __init__(self) -> None:
        self.capturing: list[Any] | None = None
        self.graphs: dict[int, list[Any]] = {}
        self.refuse = False
        self.launches = 0
        self.synchronized: list[int | None] = []

    def cuStreamBeginCapture_v2(self, stream: Any, mode: Any) -> int:
        self.capturing = []
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        work, self.capturing = self.capturing, None
        if self.refuse or work is None:
            return 901
        self.graphs[len(self.graphs) + 1] = work
        graph._obj.value = len(self.graphs)
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        self.synchronized.append(stream.value)
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:
        executable._obj.value = graph.value
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    def cuGraphExecDestroy(self, graph: Any) -> int:
        self.graphs[graph.value] = []
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:
        assert self.graphs[executable.value], "launch of a destroyed graph"
        self.launches += 1
        for work in self.graphs[executable.value]:
            work()
        return 0

    def cuGetErrorName(self, status: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        return 0


def plan(
    operation: str = "double",
    *,
    profiles: Any = (((1, 3), (4, 3), (8, 3)),),
    dtype: str = "float32",
    scratch: int = 4096,
    debug: Any = (),
    marks: Any = (),
) -> bytes:
    """A fake engine from ``x`` to ``y``: ``double``, ``triple`` (same shape) or ``positive`` (data-dependent size).

    ``debug``: name, dtype and factor of each debug tensor, which is ``x`` times the factor. ``marks``: name and factor
    of further outputs.
    """
    spec = {"operation": operation, "profiles": profiles, "dtype": dtype, "scratch": scratch}
    return json.dumps({**spec, "debug": debug, "marks": marks}).encode()


def fake_tensorrt(graphs: FakeGraphs, *, version: str = "8.6.0") -> Any:
    """A module object with the part of TensorRT that loading and running use.

    The calls for debug tensors are those of 10.16; ``version`` decides whether a network can be marked with them.
    """

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

        def __init__(self) -> None:
            """Nothing to set up."""

    class Plain:
        def __init__(self) -> None:
            """Base of a callback."""

    class Marking(Plain):
        def mark_unfused_tensors_as_debug_tensors(self) -> bool:
            return True

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> Any:
            try:
                return Engine(json.loads(data))
            except ValueError:
                self.logger.log(ILogger.ERROR, "Serialization assertion magicTagRead == kMAGIC_TAG failed")
                return None

    class Engine:
        def __init__(self, spec: Any) -> None:
            self.spec = spec
            self.names = ["x", "y", *(name for name, _ in spec["marks"])]
            self.num_io_tensors = len(self.names)
            self.num_optimization_profiles = len(spec["profiles"])
            self.device_memory_size = spec["scratch"]

        def get_tensor_name(self, number: int) -> str:
            return str(self.names[number])

        def get_tensor_mode(self, name: str) -> str:
            return "input" if name == "x" else "output"

        def get_tensor_location(self, name: str) -> str:
            return "device"

        def get_tensor_dtype(self, name: str) -> str:
            return str(self.spec["dtype"])

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            if name == "y" and self.spec["operation"] == "positive":
                return (-1,)
            every = [shape for profile in self.spec["profiles"] for shape in profile]
            return tuple(dims[0] if len(set(dims)) == 1 else -1 for dims in zip(*every, strict=True))

        def get_tensor_profile_shape(self, name: str, number: int) -> Any:
            return self.spec["profiles"][number]

        def create_execution_context_without_device_memory(self) -> Any:
            return Context(self.spec)

        def create_engine_inspector(self) -> Any:
            return Inspector()

    class Inspector:
        """As 8.6: it tells more once it has an execution context, and is mute about some (here: those at batch 2)."""

        execution_context: Any = None

        def get_engine_information(self, form: Any) -> str:
            context = self.execution_context
            if context is not None and context.shape[0] == 2:
                return ""
            names = [] if context is None else [f"{context.shape} on profile {context.profile}"]
            return json.dumps({"Layers": names})

    class Context:
        def __init__(self, spec: Any) -> None:
            self.spec, self.addresses, self.shape = spec, {}, None
            self.device_memory: int | None = None
            self.allocator: Any = None
            self.profiler: Any = None
            self.fail = False
            self.listener: Any = None
            self.unfused_tensors_debug_state = False

        def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
            self.profile = profile
            return True

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            low, _, high = self.spec["profiles"][self.profile]
            self.shape = shape
            return all(a <= dim <= b for a, dim, b in zip(low, shape, high, strict=True))

        def infer_shapes(self) -> list[str]:
            return []

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return (-1,) if self.spec["operation"] == "positive" else self.shape

        def set_tensor_address(self, name: str, address: int) -> bool:
            self.addresses[name] = address
            return True

        def set_output_allocator(self, name: str, allocator: Any) -> bool:
            self.allocator = allocator
            return True

        def set_debug_listener(self, listener: Any) -> bool:
            if self.spec["operation"] == "mute":
                return False
            self.listener = listener
            return True

        def report(self, stream: int) -> None:
            """Hand out the debug tensors; their memory is worth nothing after each call."""
            if self.listener is None or not self.unfused_tensors_debug_state:
                return
            x = memory(self.addresses["x"], int(np.prod(self.shape)) * 4).view(np.float32).reshape(self.shape)
            for name, dtype, factor in self.spec["debug"]:
                values = (x * factor).astype(dtype if dtype != "bfloat16" else np.uint16)
                location = "host" if name.startswith("host") else "device"
                address = values.ctypes.data
                self.listener.process_debug_tensor(address, location, dtype, list(values.shape), name, stream)
                values[:] = 77

        def execute_async_v3(self, stream: int) -> bool:
            assert self.device_memory
            self.report(stream)
            if self.spec["operation"] == "fail":
                return False
            if graphs.capturing is not None:
                graphs.capturing.append(lambda addresses=dict(self.addresses): self.compute(addresses))
                return True
            self.compute(self.addresses)
            if self.profiler is not None:
                self.profiler.report_layer_time("first", 0.5)
                self.profiler.report_layer_time("second", 0.25)
            return not (self.allocator is not None and self.allocator.error)

        def compute(self, addresses: dict[str, int]) -> None:
            dtype = np.dtype(self.spec["dtype"])
            size = int(np.prod(self.shape)) * dtype.itemsize
            values = memory(addresses["x"], size).view(dtype)
            if self.spec["operation"] == "positive":
                values = values[values > 0]
                address = self.allocator.reallocate_output("y", None, values.nbytes, 256)
                if address is None:
                    return
                self.allocator.notify_shape("y", values.shape)
            else:
                factor = 3 if self.spec["operation"] == "triple" else 2
                values, address = values * factor, addresses["y"]
            memory(address, values.nbytes)[:] = values.view(np.uint8)
            for name, factor in self.spec["marks"]:
                marked = memory(addresses["x"], size).view(dtype) * dtype.type(factor)
                memory(addresses[name], size)[:] = marked.view(np.uint8)

    def nptype(dtype: Any) -> Any:
        if dtype == "bfloat16":
            raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
        return np.dtype(dtype).type

    return SimpleNamespace(
        __version__=version,
        __name__=f"fake_tensorrt_{id(graphs)}",
        ILogger=ILogger,
        IProfiler=Plain,
        IOutputAllocator=Plain,
        IDebugListener=Plain,
        INetworkDefinition=Marking if tuple(map(int, version.split(".")[:2])) >= (10, 12) else Plain,
        Runtime=Runtime,
        TensorIOMode=SimpleNamespace(INPUT="input", OUTPUT="output"),
        TensorLocation=SimpleNamespace(HOST="host", DEVICE="device"),
        nptype=nptype,
        LayerInformationFormat=SimpleNamespace(JSON=1),
    )
