"""One request's place on the card: stream, buffers, scratch memory and the execution contexts that share them."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError, ToolError, did_you_mean
from pipeline.engine.cuda import DeviceBuffer, Graph, PinnedBuffer
from pipeline.engine.messages import worst_words
from pipeline.engine.profiles import choose_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.engine.cuda import Device
    from pipeline.engine.loading import LoadedEngine
    from pipeline.engine.profiles import Shape
    from pipeline.engine.tensors import EngineIO

__all__ = ["Slot"]


class Slot:
    """Used by one request at a time, inside ``device.active()``.

    Args:
        graphs_kept: 0: no CUDA graphs.
        uncaptured: gets an entry for each shape whose graph could not be made.
    """

    def __init__(
        self, device: Device, loaded: LoadedEngine, io: EngineIO, graphs_kept: int, uncaptured: dict[str, str]
    ) -> None:
        self._device, self._loaded, self._io = device, loaded, io
        self._graphs_kept, self._uncaptured = graphs_kept, uncaptured
        self.stream = device.stream()
        self._scratch_bytes = loaded.api.device_memory_bytes(loaded.engine)
        self._scratch = device.allocate(self._scratch_bytes)
        self._device_buffers: dict[str, DeviceBuffer] = {}
        self._host_buffers: dict[str, PinnedBuffer] = {}
        self._generation = 0  # counts changes of buffer addresses: graphs made before are void
        self._executions: OrderedDict[Any, _Execution] = OrderedDict()
        self._current: _Execution | None = None
        self._busy = False  # something was put on the stream that nobody has waited for

    def prepare(self, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        """Make ready for inputs of ``shapes``; the pinned arrays to fill.

        Raises:
            InputError: an input is unknown or missing, or no profile allows the shapes.
            ToolError: no memory, or TensorRT refuses the shapes.
        """
        names = [spec.name for spec in self._io.inputs]
        for name in shapes:
            if name not in names:
                raise InputError(f"the engine has no input {name!r}; {did_you_mean(name, names)}")
        if missing := [name for name in names if name not in shapes]:
            raise InputError(f"input {missing[0]!r} is missing")
        wanted = {name: tuple(int(dim) for dim in shapes[name]) for name in names}
        self._settle()
        profile = choose_profile(self._io.profiles, wanted)
        key = tuple(wanted.values()) if self._graphs_kept else profile
        execution = self._executions.get(key)
        if execution is None:
            while self._graphs_kept and len(self._executions) >= self._graphs_kept:
                self._executions.popitem(last=False)[1].free()
            execution = self._executions[key] = _Execution(self, profile)
        self._executions.move_to_end(key)
        inputs = {name: self._host_view(name, shape) for name, shape in wanted.items()}
        execution.configure(wanted)
        self._current = execution
        return inputs

    def _settle(self) -> None:
        """Wait before memory changes hands that the stream may still use."""
        if self._busy:
            self.stream.synchronize()
            self._busy = False

    def _host_view(self, name: str, shape: Shape) -> np.ndarray:
        dtype = self._io.dtypes[name]
        size = _bytes(shape, dtype)
        buffer = self._host_buffers.get(name)
        if buffer is None or buffer.size < size:
            self._host_buffers[name] = buffer = self._device.allocate_pinned(size)
            if name in self._io.on_host:
                self._generation += 1
        return buffer.view(shape, dtype)

    def address(self, name: str, shape: Shape) -> int:
        """Where TensorRT reads or writes ``name``; grows the buffer."""
        if name in self._io.on_host:
            self._host_view(name, shape)
            return self._host_buffers[name].address
        size = _bytes(shape, self._io.dtypes[name])
        buffer = self._device_buffers.get(name)
        if buffer is None or buffer.size < size:
            if buffer is not None:
                self._settle()
                buffer.free()
            self._device_buffers[name] = buffer = self._device.allocate(size)
            self._generation += 1
        return buffer.address

    def copy_in(self) -> None:
        self._busy = True
        for name, shape in self._ready().shapes.items():
            if name not in self._io.on_host:
                self.stream.copy_in(self._device_buffers[name], self._host_view(name, shape))

    def execute(self) -> None:
        execution = self._ready()
        self._busy = True
        if self._graphs_kept and execution.graph is None and not execution.uncapturable:
            self._capture(execution)
        if execution.graph is not None:
            execution.graph.launch(self.stream)
        else:
            execution.enqueue()

    def copy_out(self) -> None:
        self._busy = True
        for name, shape in self._ready().output_shapes.items():
            if name not in self._io.on_host and shape is not None:
                self.stream.copy_out(self._host_view(name, shape), self._device_buffers[name].address)

    def finish(self) -> dict[str, np.ndarray]:
        """Wait for the stream; the outputs, those of data-dependent size too."""
        execution = self._ready()
        self.stream.synchronize()
        outputs = {}
        for name, shape in execution.output_shapes.items():
            if shape is None:
                allocator = execution.allocators[name]
                values = self._host_view(name, allocator.shape)
                if name not in self._io.on_host:
                    self.stream.copy_out(values, allocator.address)
                outputs[name] = values
            else:
                outputs[name] = self._host_view(name, shape)
        if any(shape is None for shape in execution.output_shapes.values()):
            self.stream.synchronize()
        self._busy = False
        return outputs

    def layer_times(self, runs: int) -> dict[str, float]:
        """Median milliseconds per layer of the prepared request."""
        ready = self._ready()
        self.copy_in()
        reports: dict[str, list[float]] = {}

        class Profiler(self._loaded.api.trt.IProfiler):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                reports.setdefault(layer_name, []).append(ms)

        profiled = _Execution(self, choose_profile(self._io.profiles, ready.shapes))
        try:  # a context of its own: the profiler cannot be taken out of one again
            profiled.configure(ready.shapes)
            profiled.enqueue()
            self.stream.synchronize()
            profiled.profile_layers(Profiler(), runs)
        finally:
            profiled.free()
        return {name: statistics.median(times) for name, times in reports.items()}

    @property
    def context(self) -> Any:
        """The execution context of the prepared request."""
        return self._ready().context

    def _ready(self) -> _Execution:
        if self._current is None:
            raise InputError("the request was not prepared")
        return self._current

    def _capture(self, execution: _Execution) -> None:
        if execution.allocators:
            self._without_graph(execution, "an output's size depends on the data")
            return
        execution.enqueue()  # the first run after a change of shapes does work that a graph must not hold
        self.stream.synchronize()
        Graph.begin(self.stream)
        try:
            execution.enqueue()
            execution.graph = Graph.end(self.stream)
        except ToolError as error:
            Graph.abandon(self.stream)
            self._without_graph(execution, error.message)

    def _without_graph(self, execution: _Execution, reason: str) -> None:
        execution.uncapturable = True
        self._uncaptured[str(execution.shapes)] = reason

    def free(self) -> None:
        """Wait for the stream and give everything back."""
        self.stream.synchronize()
        for execution in self._executions.values():
            execution.free()
        self._executions.clear()
        self._current = None
        for buffer in self._device_buffers.values():
            buffer.free()
        self._device_buffers.clear()
        self._host_buffers.clear()
        self._scratch.free()
        self.stream.close()


class _Execution:
    """An execution context that stands on one profile, and the CUDA graph of its present shapes."""

    def __init__(self, slot: Slot, profile: int) -> None:
        self._slot = slot
        loaded = slot._loaded
        self.context: Any = loaded.api.create_context(loaded.engine)
        if self.context is None:
            raise ToolError(f"{loaded.api.title} creates no execution context" + self._words())
        loaded.api.set_device_memory(self.context, slot._scratch.address, slot._scratch_bytes)
        if not self.context.set_optimization_profile_async(profile, slot.stream.handle):
            raise ToolError(
                f"{loaded.api.title} refuses a second context on profile {profile}" + self._words(),
                remedy="TensorRT 8.6 shares a profile only if the engine was built so: build it with `quantize build`",
            )
        slot.stream.synchronize()
        self.shapes: dict[str, Shape] = {}
        self.output_shapes: dict[str, Shape | None] = {}
        """None: known only after a run."""
        self.allocators: dict[str, Any] = {}
        self.graph: Graph | None = None
        self.uncapturable = False
        self._generation = -1

    def _words(self) -> str:
        words = worst_words(self._slot._loaded.messages)
        return f":\n  {words}" if words else ""

    def configure(self, shapes: dict[str, Shape]) -> None:
        """Set shapes and addresses where they changed."""
        slot, context = self._slot, self.context
        title = slot._loaded.api.title
        if shapes != self.shapes:
            self.shapes = {}  # not valid until all are set
            self._drop_graph()
            for name, shape in shapes.items():
                if name in slot._io.on_host and not context.set_tensor_address(name, slot.address(name, shape)):
                    raise ToolError(f"{title} refuses the address of input {name!r}" + self._words())
                if not context.set_input_shape(name, shape):
                    raise ToolError(f"{title} refuses shape {shape} of input {name!r}" + self._words())
            try:
                missing = context.infer_shapes()
            except RuntimeError as error:
                raise ToolError(f"{title} cannot infer shapes: {error}" + self._words()) from error
            if missing:
                raise ToolError(f"{title} lacks the shapes or values of {', '.join(missing)}" + self._words())
            self.output_shapes = {}
            for spec in slot._io.outputs:
                found = tuple(int(dim) for dim in context.get_tensor_shape(spec.name))
                self.output_shapes[spec.name] = None if any(dim < 0 for dim in found) else found
            self.shapes = dict(shapes)
            self._generation = -1
        known = {**self.shapes, **{name: shape for name, shape in self.output_shapes.items() if shape is not None}}
        addresses = {name: slot.address(name, shape) for name, shape in known.items()}
        if self._generation != slot._generation:
            self._drop_graph()
            for name, address in addresses.items():
                if not context.set_tensor_address(name, address):
                    raise ToolError(f"{title} refuses the address of {name!r}" + self._words())
            for name, known_shape in self.output_shapes.items():
                if known_shape is None and name not in self.allocators:
                    self.allocators[name] = make_allocator(slot._loaded.api.trt, slot._device)
                    if not context.set_output_allocator(name, self.allocators[name]):
                        raise ToolError(f"{title} takes no allocator for output {name!r}" + self._words())
            self._generation = slot._generation

    def enqueue(self) -> None:
        """Put the kernels on the slot's stream."""
        if not self.context.execute_async_v3(self._slot.stream.handle):
            for allocator in self.allocators.values():
                if allocator.error is not None:
                    raise allocator.error
            raise ToolError(f"{self._slot._loaded.api.title} cannot run the engine" + self._words())

    def profile_layers(self, profiler: Any, runs: int) -> None:
        """Run under TensorRT's profiler."""
        self.context.profiler = profiler
        for _ in range(runs):
            self.enqueue()
            self._slot.stream.synchronize()

    def _drop_graph(self) -> None:
        if self.graph is not None:
            self.graph.free()
            self.graph = None

    def free(self) -> None:
        self._drop_graph()
        self.context = None
        for allocator in self.allocators.values():
            allocator.free()
        self.allocators = {}


def _bytes(shape: Shape, dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def make_allocator(trt: Any, device: Device) -> Any:
    """An ``IOutputAllocator`` whose memory grows with the largest output so far."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shape: Shape = ()
            self.error: Exception | None = None
            self._buffer: DeviceBuffer | None = None

        @property
        def address(self) -> int:
            return self._buffer.address if self._buffer is not None else 0

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int | None:
            try:
                if self._buffer is None or self._buffer.size < size:
                    self.free()
                    self._buffer = device.allocate(size)
            except ToolError as error:  # an exception must not pass through TensorRT: it is raised after the call
                self.error = error
                return None
            return self.address

        def reallocate_output_async(
            self, tensor_name: str, memory: Any, size: int, alignment: int, stream: int
        ) -> int | None:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shape = tuple(int(dim) for dim in shape)

        def free(self) -> None:
            if self._buffer is not None:
                self._buffer.free()
                self._buffer = None

    return Allocator()
