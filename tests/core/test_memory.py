"""Peak memory of a child process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np


def test_a_child_does_not_count_its_parents_memory() -> None:
    held = np.ones(400 << 17)  # 400 MiB
    code = "from pipeline.core.memory import peak_resident_bytes; print(peak_resident_bytes())"
    peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 1 << 20 < peak < held.nbytes // 2
