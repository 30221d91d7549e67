"""Which files the user's code reads, by Python's audit events.

Seen are files opened through Python (``open``, ``torch.load``, ``numpy.load``, imports). Libraries that open files in
their own C++ or Rust code, such as ``cv2.imread`` and ``safetensors``, raise no event and are not seen.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

__all__ = ["FileRecorder"]

_READ_ONLY = os.O_RDONLY
_ACCESS_MASK = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_FRAMEWORKS = (
    "google",
    "torch",
    "torchgen",
    "functorch",
    "numpy",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "ml_dtypes",
    "sympy",
    "mpmath",
)
_PSEUDO = ("/proc/", "/sys/", "/dev/")


class FileRecorder:
    """Collects the files opened for reading from its creation on."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        self._packages = tuple({os.path.realpath(paths[key]) + os.sep for key in ("purelib", "platlib")})
        standard = {os.path.realpath(paths[key]) + os.sep for key in ("stdlib", "platstdlib")}
        standard.add(str(Path(os.__file__).resolve().parent) + os.sep)
        self._standard = tuple(standard)
        self._frameworks = tuple(folder + name + os.sep for folder in self._packages for name in _FRAMEWORKS)
        self._own = str(Path(__file__).resolve().parents[1]) + os.sep
        self._seen: set[str] = set()
        self._found: set[str] = set()
        self._told: set[str] = set()
        self._modules = set(sys.modules)
        self._only_user_files = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or len(arguments) < 3:
            return
        path, mode, flags = arguments[:3]
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return
        if isinstance(mode, str):
            reading = "r" in mode
        else:
            reading = isinstance(flags, int) and flags & _ACCESS_MASK == _READ_ONLY
        if reading:
            self._seen.add(os.path.abspath(path))  # noqa: PTH100 - a link stays a link

    def new_files(self) -> list[str]:
        """Files read since the last call, sorted: the user's sources, and whatever else was opened outside the standard
        library and the frameworks. Compiled ``.pyc`` files count as the source they come from."""
        self._collect()
        new = sorted(self._found - self._told)
        self._told |= self._found
        return new

    def packages_loaded(self) -> None:
        """From now on no file of an installed package counts: what follows is the exporter's own loading."""
        self._collect()
        self._only_user_files = True

    def _collect(self) -> None:
        for name in set(sys.modules) - self._modules:
            file = getattr(sys.modules[name], "__file__", None)
            if isinstance(file, str):
                self._seen.add(os.path.abspath(file))  # noqa: PTH100 - as above
        self._modules = set(sys.modules)
        seen, self._seen = self._seen, set()
        self._found.update(path for path in seen if self._counts(path))

    def _counts(self, path: str) -> bool:
        if path.endswith(".pyc") or path.startswith(_PSEUDO) or not Path(path).is_file():
            return False
        real = os.path.realpath(path)
        if real.startswith(self._own):
            return False
        if real.startswith(self._packages):
            return not self._only_user_files and not real.startswith(self._frameworks) and ".dist-info/" not in real
        return not real.startswith(self._standard)
