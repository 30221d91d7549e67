"""Statistics of activations on a CUDA device: nothing but bins comes back.

onnxruntime's CUDA provider runs with every captured activation bound to a buffer on the device that stays the same
from batch to batch. Model and statistics take turns on one stream: statistics of one batch beside the model's next one
gain at most 0.4 % of the time at batch 64 and lose 3 to 7 % at batch 8 (on an H200:
``scripts/experiments/results-calibration-gpu.md``). Nothing waits for the device: while it is at work on one batch, the
host queues the next.

TF32 is off, so that activations are those of FP32; convolution algorithms are chosen by cuDNN's heuristics and not by
timing, so that they are the same every time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.errors import InputError, ToolError
from pipeline.core.lazy import require
from pipeline.core.ort import make_session
from pipeline.engine.device import no_device_reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from calibrators import TensorStatistics
    from pipeline.data import Batch
    from plugins.statistics import DeviceArray

__all__ = ["Binding", "CudaActivationPass", "check_device"]

_PROVIDER: Final = "CUDAExecutionProvider"
_MEMORY: Final = "cuda"
_ON_CPU: Final = "calibrate with --device cpu"
_KEPT_SHAPES: Final = 2
"""Buffers are kept for so many shapes of a batch: the usual one and the ragged last one."""

Array = np.ndarray[Any, np.dtype[Any]]


def check_device(device: str) -> None:
    """Whether a calibration on ``device`` can start here, asked before the work in front of it.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        InputError: PyCUDA is not installed, or onnxruntime has no CUDA provider.
        ToolError: no device, or no compiler for its kernels.
    """
    if device != "cuda":
        return
    _require_provider()
    require("pycuda.driver", extra="gpu", purpose="calibration on a CUDA device")
    if reason := no_device_reason():
        raise ToolError(f"calibration on a CUDA device needs one: {reason}", remedy=_ON_CPU)
    if shutil.which("nvcc") is None:
        raise ToolError(
            "calibration on a CUDA device compiles its kernels, and there is no nvcc on PATH",
            remedy=f"put the CUDA toolkit's folder bin on PATH, or {_ON_CPU}",
        )


def _require_provider() -> None:
    import onnxruntime

    if _PROVIDER not in onnxruntime.get_available_providers():
        raise InputError(
            "calibration on a CUDA device needs onnxruntime's CUDA provider, this onnxruntime has none",
            remedy=f"pip install 'quantize-trt[gpu]', or {_ON_CPU}",
        )


class CudaActivationPass:
    """The float model on a CUDA device, captured at ``tensors``.

    Args:
        model: an ``.onnx`` file.
        tensors: intermediate tensors, graph outputs or graph inputs; float32 or float16.
        skip_nonfinite: leave batches with a NaN or infinity out of the statistics.
        device: its number.
        proto: ``model`` as an ``onnx.ModelProto``, where it was parsed already; kept until the first batch.

    Raises:
        InputError: PyCUDA is not installed, or onnxruntime has no CUDA provider.
        ToolError: no device.
    """

    def __init__(
        self,
        model: Path,
        tensors: Sequence[str],
        *,
        skip_nonfinite: bool = False,
        device: int = 0,
        proto: Any | None = None,
    ) -> None:
        import onnxruntime

        from plugins.statistics import GpuStatistics

        _require_provider()
        self._model, self._device, self._proto = model, device, proto
        self.statistics = GpuStatistics(tensors, skip_nonfinite=skip_nonfinite, device=device)
        self.stream = self.statistics.stream
        """Of the model, too."""
        self._session: Any = None
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._bindings: dict[tuple[Any, ...], Binding] = {}

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Queue every batch; yields it when that is done, which is before the device is.

        Raises:
            InputError: a tensor that does not exist or is of another type, a batch that comes twice.
            ToolError: onnxruntime refuses the model or fails on a batch.
        """
        for batch in batches:
            binding = self.bind(batch.feeds)
            self.upload(batch.feeds, binding)
            self.forward(binding, batch.index)
            self.take(binding, batch.index)
            yield batch

    def bind(self, feeds: Mapping[str, Array]) -> Binding:
        """Buffers for batches of the shape of ``feeds``, which is run once so that onnxruntime allocates them."""
        key = tuple((name, array.shape, array.dtype.name) for name, array in sorted(feeds.items()))
        if key not in self._bindings:
            if len(self._bindings) >= _KEPT_SHAPES:
                self.stream.synchronize()  # the oldest buffers may still be in use
                del self._bindings[next(iter(self._bindings))]
            self._bindings[key] = self._allocate(feeds)
        return self._bindings[key]

    def _allocate(self, feeds: Mapping[str, Array]) -> Binding:
        import onnxruntime
        import pycuda.driver as cuda

        from plugins.statistics import DeviceArray

        captured = [name for name in self.statistics.tensors if name not in feeds]
        if self._session is None:
            self._session = self._open(captured)
        place = (_MEMORY, self._device)
        inputs = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.array(array, order="C"), *place)
            for name, array in feeds.items()
        }
        io = self._session.io_binding()
        for name, value in inputs.items():
            io.bind_ortvalue_input(name, value)
        names = captured or [self._session.get_outputs()[0].name]
        for name in names:
            io.bind_output(name, *place)
        try:
            self._session.run_with_iobinding(io)
        except Exception as error:
            raise ToolError(f"onnxruntime fails on the first batch of its shape on the CUDA device: {error}") from error
        outputs = dict(zip(names, io.get_outputs(), strict=True))
        for name, value in outputs.items():
            io.bind_ortvalue_output(name, value)
        values = {**inputs, **outputs}
        arrays = tuple(
            DeviceArray(values[name].data_ptr(), int(np.prod(values[name].shape())), _numpy_name(values[name], name))
            for name in self.statistics.tensors
        )
        staged = [
            {name: cuda.pagelocked_empty(array.shape, array.dtype) for name, array in feeds.items()} for _ in range(2)
        ]
        return Binding(io, inputs, outputs, arrays, staged, [None, None])

    def _open(self, captured: Sequence[str]) -> Any:
        options = {
            "device_id": str(self._device),
            "user_compute_stream": str(self.stream.handle),
            "cudnn_conv_algo_search": "HEURISTIC",
            "use_tf32": "0",
        }
        session = make_session(
            self._model if self._proto is None else self._proto,
            capture=captured,
            external_data_dir=self._model.parent,
            providers=[(_PROVIDER, options), "CPUExecutionProvider"],
        )
        self._proto = None
        if session.get_providers()[0] != _PROVIDER:
            raise ToolError(
                "onnxruntime's CUDA provider does not start on this machine", remedy=_ON_CPU
            )
        return session

    def upload(self, feeds: Mapping[str, Array], binding: Binding) -> None:
        """Copy a batch into page-locked memory and queue its way to the device. Two batches can be on their way."""
        import pycuda.driver as cuda

        if binding.passed[0] is not None:
            binding.passed[0].synchronize()
        staged = binding.staged[0]
        for name, value in binding.inputs.items():
            staged[name][...] = feeds[name]
            cuda.memcpy_htod_async(value.data_ptr(), staged[name], self.stream)
        passed = cuda.Event()
        passed.record(self.stream)
        binding.staged.reverse()
        binding.passed[:] = [binding.passed[1], passed]

    def forward(self, binding: Binding, batch_index: int) -> None:
        """Queue a run of the model on what lies in its input buffers."""
        try:
            self._session.run_with_iobinding(binding.io, self._options)
        except Exception as error:
            raise ToolError(f"onnxruntime fails on batch {batch_index} on the CUDA device: {error}") from error

    def take(self, binding: Binding, batch_index: int) -> None:
        """Queue the statistics of what the last run left in ``binding``."""
        self.statistics.update(binding.arrays, batch_index)

    def nonfinite(self) -> list[tuple[int, str, int, int]]:
        """(batch, tensor, NaNs, infinities) of each batch so far that has such values. Waits for the device."""
        return self.statistics.nonfinite()

    def collect(self) -> dict[str, TensorStatistics]:
        """The statistics of all batches so far. Waits for the device."""
        return self.statistics.collect()

    def close(self) -> None:
        """Give the device back. The object is of no use afterwards."""
        self.stream.synchronize()
        self._bindings.clear()
        self._session = None
        self.statistics.close()

    def __enter__(self) -> CudaActivationPass:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Binding:
    """Buffers on the device for batches of one shape."""

    io: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    arrays: tuple[DeviceArray, ...]
    """The tensors asked for, in their order."""
    staged: list[dict[str, Array]]
    """Page-locked memory for two batches; the first one is the next to be used."""
    passed: list[Any]
    """Events after which they are free again."""


def _numpy_name(value: Any, tensor: str) -> str:
    names = {"tensor(float)": "float32", "tensor(float16)": "float16"}
    if value.data_type() not in names:
        raise InputError(
            f"tensor {tensor!r} is of type {value.data_type()}; on a CUDA device float and float16 are calibrated",
            remedy=_ON_CPU,
        )
    return names[value.data_type()]
