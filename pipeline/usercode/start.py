"""Entry of the child process: ``python start.py READ_FD WRITE_FD``.

Started by path; imports nothing of the project but the :mod:`child` package beside it, under a private name that no
user's module has. The first message names the user's code and the task.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PRIVATE_NAME = "_quantize_usercode_child"


def _child_package() -> None:
    folder = Path(__file__).resolve().parent / "child"
    spec = importlib.util.spec_from_file_location(
        PRIVATE_NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not importable")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PRIVATE_NAME] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    # Python has put this file's folder first on the path (unless told not to); the user's directory comes there later.
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]
    _child_package()
    importlib.import_module(f"{PRIVATE_NAME}.main").main(int(sys.argv[1]), int(sys.argv[2]))
