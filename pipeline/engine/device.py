"""The NVIDIA driver and its cards, asked through the driver's own C libraries: no TensorRT, no PyCUDA, no crash.

TensorRT 8.6 ends the process when it meets no driver, so this is asked first.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pipeline.core.errors import ToolError
from pipeline.engine.records import DeviceInfo

__all__ = ["MemoryMeter", "describe_device", "device_count", "driver_version", "no_device_reason"]

_CUDA_LIBRARY = "libcuda.so.1"
_NVML_LIBRARY = "libnvidia-ml.so.1"
_CUDA_ERROR_NO_DEVICE = 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NAME_BYTES = 256


def _library(name: str) -> Any | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def no_device_reason() -> str | None:
    """Why no CUDA device can be used here, or None when one can."""
    cuda = _library(_CUDA_LIBRARY)
    if cuda is None:
        return f"no NVIDIA driver: {_CUDA_LIBRARY} cannot be loaded"
    if status := cuda.cuInit(0):
        if status == _CUDA_ERROR_NO_DEVICE:
            return "the NVIDIA driver finds no device"
        return f"the NVIDIA driver does not start: cuInit returns {status}"
    return None if device_count() else "the NVIDIA driver finds no device"


def device_count() -> int:
    cuda = _library(_CUDA_LIBRARY)
    count = ctypes.c_int(0)
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def driver_version() -> str | None:
    """Such as ``580.159.04``; None without a driver."""
    nvml = _library(_NVML_LIBRARY)
    if nvml is None or nvml.nvmlInit_v2():
        return None
    text = ctypes.create_string_buffer(_NAME_BYTES)
    status = nvml.nvmlSystemGetDriverVersion(text, _NAME_BYTES)
    nvml.nvmlShutdown()
    return None if status else text.value.decode()


def describe_device(number: int = 0) -> DeviceInfo | None:
    """Card ``number``, or None where there is none."""
    if no_device_reason() or number >= device_count():
        return None
    cuda: Any = _library(_CUDA_LIBRARY)
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, total = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    calls = (
        cuda.cuDeviceGet(ctypes.byref(handle), number),
        cuda.cuDeviceGetName(name, _NAME_BYTES, handle),
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle),
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle),
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle),
    )
    if any(calls):
        raise ToolError(f"the NVIDIA driver does not describe device {number}: status codes {calls}")
    return DeviceInfo(
        name=name.value.decode(),
        compute_capability=f"{major.value}.{minor.value}",
        driver=driver_version() or "unknown",
        memory_bytes=total.value,
    )


class MemoryMeter:
    """Asks NVML how many bytes of a card's memory all processes use together."""

    def __init__(self, number: int = 0) -> None:
        self._nvml, self._handle = _library(_NVML_LIBRARY), ctypes.c_void_p()
        bus = _pci_bus_id(number)
        if self._nvml is not None and (
            bus is None
            or self._nvml.nvmlInit_v2()
            or self._nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(self._handle))
        ):
            self._nvml = None

    def used_bytes(self) -> int | None:
        """None where NVML is missing or does not say."""
        memory = _NvmlMemory()
        if self._nvml is None or self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            return None
        return int(memory.used)


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _pci_bus_id(number: int) -> bytes | None:
    """CUDA numbers the cards it may see, NVML all of them: the bus address is the same in both."""
    cuda, handle, text = _library(_CUDA_LIBRARY), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), number):
        return None
    return None if cuda.cuDeviceGetPCIBusId(text, _NAME_BYTES, handle) else text.value
