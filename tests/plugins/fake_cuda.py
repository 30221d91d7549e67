"""A `pycuda` whose device is this CPU: device memory is numpy's, the kernels are statistics.cu compiled by g++.

Their threads run in random orders, and what they must not do is seen: see simulator.cpp."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import re
import shutil
import subprocess
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from plugins.statistics import SOURCE

HERE = Path(__file__).parent
MULTIPROCESSORS = 3


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def _simulator() -> Path:
    """What runs the threads, without the calls that go into the kernels."""
    folder = Path(tempfile.mkdtemp(prefix="simulator-"))
    atexit.register(shutil.rmtree, folder)
    _run("-O2", "-c", HERE / "simulator.cpp", "-o", folder / "simulator.o")
    return folder / "simulator.o"


def _run(*arguments: str | Path) -> None:
    command = [str(compiler()), "-std=c++20", "-g1", "-fPIC", "-w", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def compiled(library: Path, source: Path, *options: str) -> ctypes.CDLL:
    """``source``, whose accesses to memory are seen by the simulator, as ``library`` unless that is there already."""
    if not library.exists():
        made = library.with_suffix(".o")
        seen = ("-fsanitize=thread", "--param=tsan-distinguish-volatile=1")
        _run("-O1", "-ffp-contract=off", *seen, *options, "-c", source, "-o", made)
        _run("-shared", made, _simulator(), "-o", library)
    return ctypes.CDLL(str(library))


def build(folder: Path, definitions: Mapping[str, int]) -> ctypes.CDLL:
    """Compile the kernels with ``definitions`` into a library below ``folder``."""
    library = folder / f"statistics-{'-'.join(map(str, definitions.values()))}.so"
    macros = [f"-D{name}={value}" for name, value in definitions.items()]
    return compiled(library, HERE / "launchers.cpp", f'-DKERNELS="{SOURCE}"', *macros)


class KernelFault(AssertionError):
    """A kernel did what hardware stops at, or what only luck makes right."""


def launched(library: ctypes.CDLL, kernel: str, *arguments: Any) -> None:
    """Call ``launch_<kernel>``.

    Raises:
        KernelFault: with the places in the source.
    """
    launcher = getattr(library, f"launch_{kernel}")
    launcher.restype = ctypes.c_char_p
    fault = launcher(*arguments)
    if fault is not None:
        raise KernelFault(f"{kernel}, {re.sub('@{(.*?)}', partial(_place, library), fault.decode())}")


def _place(library: ctypes.CDLL, code: re.Match[str]) -> str:
    """File and line of a return address."""
    command = ["addr2line", "-e", library._name, hex(int(code[1], 16) - 1)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    return Path(found).name


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
    def __init__(self, library: ctypes.CDLL, name: str, seeds: Iterator[int]) -> None:
        self.library, self.name, self.seeds = library, name, seeds
        self.shared = 48 << 10

    def set_attribute(self, attribute: str, value: int) -> None:
        self.shared = value

    def __call__(self, *arguments: Any, block: Sequence[int], grid: Sequence[int], shared: int, stream: Any) -> None:
        assert shared <= self.shared
        values = [
            ctypes.c_int(int(each)) if isinstance(each, np.int32) else ctypes.c_void_p(int(each)) for each in arguments
        ]
        numbers = (grid[0], block[0], shared, next(self.seeds))
        launched(self.library, self.name, *(ctypes.c_uint(number) for number in numbers), *values)


def modules(folder: Path, seed: int = 0) -> dict[str, types.ModuleType]:
    """What to put into ``sys.modules``. The first kernel runs in the order of ``seed``, the next in that of another."""
    seeds = itertools.count(seed)
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
            return Function(self.library, name, seeds)

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
