"""A `pycuda` whose device is this CPU: device memory is numpy's, the kernels are statistics.cu compiled by g++."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plugins.statistics import SOURCE

HERE = Path(__file__).parent
MULTIPROCESSORS = 3


def compiler() -> str | None:
    return shutil.which("g++")


def build(folder: Path, definitions: Mapping[str, int]) -> ctypes.CDLL:
    """Compile the kernels with ``definitions`` into a library below ``folder``."""
    library = folder / f"statistics-{'-'.join(map(str, definitions.values()))}.so"
    if not library.exists():
        macros = [f"-D{name}={value}" for name, value in definitions.items()]
        command = [
            str(compiler()), "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w",
            f"-I{HERE}", f'-DKERNELS="{SOURCE}"', *macros, str(HERE / "launchers.cpp"), "-o", str(library),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


class Error(Exception):
    pass


class CompileError(Error):
    pass


class Memory:
    """Device memory: bytes of the host, poisoned so that nothing is read before it is written."""

    def __init__(self, size: int) -> None:
        self.array = np.full(size + 32, 0xA5, np.uint8)
        self.address = (self.array.ctypes.data + 15) // 16 * 16
        self.size = size

    def __int__(self) -> int:
        return self.address

    def free(self) -> None:
        self.array[:] = 0xA5


def _copy(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


class Stream:
    handle = 0

    def synchronize(self) -> None:
        """Everything is done at once."""


class Event:
    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded

    def time_since(self, before: Event) -> float:
        assert self.recorded
        assert before.recorded
        return 1.0


class Context:
    def __init__(self) -> None:
        self.depth = 0

    def push(self) -> None:
        self.depth += 1

    def pop(self) -> None:
        self.depth -= 1


CONTEXT = Context()


class Device:
    MULTIPROCESSOR_COUNT = MULTIPROCESSORS

    def __init__(self, number: int) -> None:
        if number:
            raise Error("invalid device ordinal")

    def retain_primary_context(self) -> Context:
        return CONTEXT


class Function:
    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher
        self.shared = 48 << 10

    def set_attribute(self, attribute: str, value: int) -> None:
        self.shared = value

    def __call__(self, *arguments: Any, block: Sequence[int], grid: Sequence[int], shared: int, stream: Any) -> None:
        assert shared <= self.shared
        values = [
            ctypes.c_int(int(each)) if isinstance(each, np.int32) else ctypes.c_void_p(int(each)) for each in arguments
        ]
        self.launcher(*(ctypes.c_uint(number) for number in (grid[0], block[0], shared)), *values)


def modules(folder: Path) -> dict[str, types.ModuleType]:
    """What to put into ``sys.modules``."""
    driver, source = types.ModuleType("pycuda.driver"), types.ModuleType("pycuda.compiler")

    def to_device(array: np.ndarray) -> Memory:
        memory = Memory(array.nbytes)
        _copy(int(memory), array.ctypes.data, array.nbytes)
        return memory

    class SourceModule:
        def __init__(self, text: str, options: Sequence[str], no_extern_c: bool) -> None:
            if "error" in text:
                raise CompileError("nvcc compilation failed")
            assert no_extern_c
            found = dict(
                re.fullmatch(r"-D(\w+)=(-?\d+)", option).groups() for option in options if option.startswith("-D")
            )  # type: ignore[union-attr]
            self.library = build(folder, {name: int(value) for name, value in found.items()})

        def get_function(self, name: str) -> Function:
            return Function(getattr(self.library, f"launch_{name}"))

    contents: dict[str, Any] = {
        "init": lambda: None,
        "Error": Error,
        "CompileError": CompileError,
        "Device": Device,
        "Stream": Stream,
        "Event": Event,
        "pagelocked_empty": np.empty,
        "mem_alloc": Memory,
        "to_device": to_device,
        "memset_d8": lambda memory, value, size: ctypes.memset(int(memory), value, size),
        "memset_d8_async": lambda memory, value, size, stream: ctypes.memset(int(memory), value, size),
        "memcpy_htod_async": lambda memory, array, stream: _copy(int(memory), array.ctypes.data, array.nbytes),
        "memcpy_dtod_async": lambda target, source, size, stream: _copy(int(target), int(source), size),
        "memcpy_dtoh": lambda array, memory: _copy(array.ctypes.data, int(memory), array.nbytes),
        "memcpy_dtoh_async": lambda array, memory, stream: _copy(array.ctypes.data, int(memory), array.nbytes),
        "function_attribute": types.SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"),
    }
    vars(driver).update(contents)
    source.SourceModule = SourceModule  # type: ignore[attr-defined]
    package = types.ModuleType("pycuda")
    package.driver, package.compiler = driver, source  # type: ignore[attr-defined]
    return {"pycuda": package, "pycuda.driver": driver, "pycuda.compiler": source}
