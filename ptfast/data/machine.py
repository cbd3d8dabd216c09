"""What this machine has to spare: cores and memory."""

from __future__ import annotations

import os
from pathlib import Path


def spare_cores(most: int = 8) -> int:
    """Cores that this process may use, shared by the ranks of the machine; 1 to `most`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(most, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def available_memory() -> int:
    """Bytes of memory that this rank can take without swapping; 4 GiB where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 2**30
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
