"""Memory of the CPU that is freed in a step, held for the next one."""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`, as in malloc.h."""


def hold_memory() -> bool:
    """Keep what this process frees for its next allocation; return True if its C library can.

    glibc gives the end of its heap back to the system once enough of it is free, and every block of more than
    32 MiB at once, so that each step has the kernel find, clear and map the pages of its activations anew.
    Here neither is done. The process stays as large as it has been at its peak.

    Source: mallopt(3), `M_TRIM_THRESHOLD` and `M_MMAP_MAX`.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, -1))
