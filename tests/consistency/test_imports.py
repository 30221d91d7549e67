from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "numba", "pandas", "seaborn", "matplotlib", "click", "rich")


@pytest.mark.parametrize("module", ["pipeline.consistency", "pipeline.consistency.device"])
def test_a_serving_machine_needs_numpy_and_pydantic_alone(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.split() == []
