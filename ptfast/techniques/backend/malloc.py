"""Memory of the CPU that is freed in a step, held for the next one."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from ptfast.core.machine import read_setting

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`, as in malloc.h."""
MADV_HUGEPAGE = 14
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
"""2 where the system lends no more memory than it has."""


def hold_memory() -> bool:
    """Keep what this process frees for its next allocation; return True if its C library can.

    glibc gives the end of its heap back to the system once enough of it is free, and every block of more than
    32 MiB at once, so that each step has the kernel find, clear and map the pages of its activations anew.
    Here neither is done. The process stays as large as it has been at its peak. Where the system allows it,
    the heap lies in pages of 2 MiB, which are mapped at once in place of 512 and take one entry of the TLB.

    Source: mallopt(3), `M_TRIM_THRESHOLD` and `M_MMAP_MAX`; madvise(2), `MADV_HUGEPAGE`.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and libc.mallopt(MMAP_MAX, 0) and libc.mallopt(TRIM_THRESHOLD, -1)):
        return False
    _use_huge_pages(libc)
    return True


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Ask for huge pages for what the heap will grow to: half of the memory, of which none is taken.

    The system is advised on addresses, which the heap has to have: it is grown by one block, that is freed.
    Where addresses are limited (`ulimit -v`) or counted as memory (`vm.overcommit_memory=2`), they are left
    to others.
    """
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits) or read_setting(OVERCOMMIT) == "2":
        return
    page = os.sysconf("SC_PAGE_SIZE")
    size = os.sysconf("SC_PHYS_PAGES") // 2 * page
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := libc.malloc(size):
        libc.madvise(-(-block // page) * page, size - page, MADV_HUGEPAGE)
        libc.free(block)
