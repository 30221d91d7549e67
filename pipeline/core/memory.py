"""How much memory this process has used."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["peak_resident_bytes"]


def peak_resident_bytes() -> int:
    """Largest resident set of this program so far, in bytes (Linux ``VmHWM``).

    ``ru_maxrss`` would be wrong for a child process: Linux carries over what the parent had at the fork.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
