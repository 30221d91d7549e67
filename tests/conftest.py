"""Set before anything loads OpenMP."""

from __future__ import annotations

import os

# PyTorch's idle threads wait in a loop otherwise, and take the core from the other worker of xdist. The number of
# threads, and with it every result, stays the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
