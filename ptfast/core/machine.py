"""This process's share of the machine: cores, memory, processor time, and its end with its parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ptfast.core.errors import EXIT_BUG, text_of

ROOT = Path("/")
"""The root of the file system; tests replace it."""
_NO_MEMORY = (
    *("can't allocate memory", "out of memory", "cannot allocate memory", "std::bad_alloc"),
    "_status_alloc_failed",  # cuBLAS and cuDNN, for their own memory
)
_NO_ENGINE = "unable to find an engine"
"""cuDNN's message both for lack of memory and for an unsupported operation."""
_FULL = 0.9
"""A GPU counts as full above this fraction of used memory."""
_NETWORK = (
    *("urllib", "http", "socket", "ssl", "requests", "urllib3"),
    *("httpx", "httpx2", "httpcore", "httpcore2"),
)
"""Packages whose errors are download errors."""
_HUB = "huggingface_hub"
"""A package that also downloads files. Only its OSErrors are download errors."""
_UNKNOWN_MEMORY = 4 * 2**30
_STEAL, _IDLE = 7, (3, 4)
"""Fields of a CPU in /proc/stat, by proc(5)."""
_LEAST_WATCHED_S = 0.5
_watched: tuple[float, float | None, float]


def usable_cores(*, hyperthreads: bool = False) -> int:
    """Return the cores (or `hyperthreads`) that affinity, container quota and SLURM job allow."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = cpus if hyperthreads else {read_setting(ROOT / siblings.format(cpu)) or str(cpu) for cpu in cpus}
    limits = [len(cores)]
    if (asked := os.environ.get("SLURM_CPUS_ON_NODE", "")).isdigit():
        limits.append(int(asked))
    for group in _control_groups("cpu"):
        quota, _, period = read_setting(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = (read_setting(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) // int(period))
    return max(min(limits), 1)


def spare_cores(most: int = 8) -> int:
    """Return this rank's share of the machine's hyperthreads, from 1 to `most`."""
    return max(1, min(most, usable_cores(hyperthreads=True) // _num_local_ranks()))


def available_memory() -> int:
    """Return the bytes that this rank can allocate without swapping or being killed; 4 GiB if unknown.

    This is the minimum of the machine's free memory and of the limits of the container and the SLURM job.
    """
    lines = read_setting(ROOT / "proc/meminfo").splitlines()
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    names = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    texts = (os.environ.get(name, "") for name in names)
    per_node, per_cpu, num_cpus = (int(text) if text.isdigit() else 0 for text in texts)
    # SLURM uses 0 for all memory of the node.
    if megabytes := per_node or per_cpu * num_cpus:
        limits.append(megabytes * 2**20)
    for group in _control_groups("memory"):
        limit = read_setting(group / "memory.max") or read_setting(group / "memory.limit_in_bytes")
        used = read_setting(group / "memory.current") or read_setting(group / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            # Cached files count as used, but the kernel frees them on demand.
            words = read_setting(group / "memory.stat").split()
            facts = dict(zip(words[::2], words[1::2], strict=False))
            files = facts.get("total_inactive_file") or facts.get("inactive_file", "0")
            limits.append(max(int(limit) - int(used) + int(files), 0))
    return min(limits, default=_UNKNOWN_MEMORY) // _num_local_ranks()


def shared_memory() -> int:
    """Return the free bytes of shared memory, which containers may limit; all memory without /dev/shm."""
    try:
        found = os.statvfs(ROOT / "dev/shm")
    except (OSError, AttributeError):
        return available_memory()
    return found.f_bavail * found.f_frsize // _num_local_ranks()


def memory_limit(device: str = "auto") -> tuple[int, str]:
    """Return the most bytes that this process may allocate, and the source of that limit."""
    if device != "cpu" and "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, "the GPU"
    limits = [(available_memory(), "the memory that is free")]
    for name, what in (("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            limits.append((soft, what))
    return min(limits)


def memory_of(pids: Iterable[int]) -> tuple[int, str]:
    """Return the total bytes of processes, and how they are counted; processes that have ended count as 0.

    `PSS` counts a page once that several processes share, such as a forked worker and its parent. `RSS`,
    used where the system has no PSS, counts it in each of them.
    """
    pids = list(pids)
    shares = [_kilobytes(pid, "smaps_rollup", "Pss:") for pid in pids]
    if any(shares):
        return sum(shares), "PSS"
    whole = sum(_kilobytes(pid, "status", "VmRSS:") for pid in pids)
    if not whole:
        whole = peak_memory_bytes("cpu")  # without /proc, only this process can be measured
    return whole, "RSS"


def peak_memory_bytes(device_type: str) -> int:
    """Return the peak memory so far, of the GPU or of this process on the host."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    # ru_maxrss is inherited: it starts at the memory of the parent process.
    if peak := _kilobytes(os.getpid(), "status", "VmHWM:"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reserved_memory_bytes(device_type: str) -> int:
    """Return the bytes in use: by torch on the GPU, or by this process on the host (0 if unknown)."""
    if device_type == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return _kilobytes(os.getpid(), "status", "VmRSS:")


def processor_time_s() -> float:
    """Return the processor seconds of this process and its children, such as loader workers."""
    children = [child.pid for child in multiprocessing.active_children() if child.pid]
    return time.process_time() + sum(map(processor_time_of, children))


def processor_time_of(pid: int) -> float:
    """Return the processor seconds of another process; 0 if it has ended or they are unknown."""
    fields = read_setting(ROOT / f"proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def machine_times() -> tuple[float, float] | tuple[None, None]:
    """Return the busy and stolen seconds of this process's CPUs; None if unknown. Cost: about 0.1 ms."""
    try:
        cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None, None
    lines = read_setting(ROOT / "proc/stat").splitlines()
    rows = [list(map(int, line.split()[1:9])) for line in lines if line.split(" ")[0] in cpus]
    if not rows:
        return None, None
    steal = sum(row[_STEAL] for row in rows)
    busy = sum(map(sum, rows)) - steal - sum(row[field] for row in rows for field in _IDLE)
    return busy / tick, steal / tick


def watch_others() -> None:
    """Restart the measurement of `others_cores`."""
    global _watched
    _watched = time.perf_counter(), machine_times()[0], processor_time_s()


def others_cores(local_world_size: int = 1) -> float:
    """Return the cores that processes outside this run kept busy since `watch_others`; 0 if unknown."""
    start_s, busy_before_s, own_before_s = _watched
    busy_s, elapsed_s = machine_times()[0], time.perf_counter() - start_s
    if busy_s is None or busy_before_s is None or elapsed_s < _LEAST_WATCHED_S:
        return 0.0
    others_s = busy_s - busy_before_s - (processor_time_s() - own_before_s)
    return max(others_s / elapsed_s - (local_world_size - 1), 0.0)


def _kilobytes(pid: int, name: str, row: str) -> int:
    """Return the bytes in a row of a process's file in /proc; 0 if there is none."""
    lines = read_setting(ROOT / "proc" / str(pid) / name).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(row)), 0)


def is_memory_error(error: BaseException) -> bool:
    """Return True if `error` is an out-of-memory error of the host or the device."""
    text = text_of(error).lower()
    says_so = any(words in text for words in _NO_MEMORY) or (_NO_ENGINE in text and _gpu_is_full())
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_so)


def _gpu_is_full() -> bool:
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # no GPU, or it has failed
        return False
    return free < (1 - _FULL) * total


def network_error(error: BaseException | None) -> BaseException | None:
    """Return the innermost download error among `error` and its causes; None if there is none."""
    found = None
    while error is not None:
        package = type(error).__module__.partition(".")[0]
        fetches = package in _NETWORK or (package == _HUB and isinstance(error, OSError))
        if isinstance(error, (ConnectionError, TimeoutError)) or fetches:
            found = error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def on_main_thread() -> bool:
    """Return True on the main thread, the only thread to which Python delivers signals."""
    return threading.current_thread() is threading.main_thread()


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies; exit now if `parent` is dead already."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(EXIT_BUG)


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents, of cgroup v1 or v2."""
    for line in read_setting(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = ROOT / "sys/fs/cgroup" / (controller if controllers else "")
            # A container may see its own group as the root, although /proc names the host's path.
            group = root / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def read_setting(path: Path) -> str:
    """Return the text of a kernel file, such as one in /proc; "" if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def cache_folder() -> Path:
    """Return the folder for downloads and cached facts; without a home folder, an unwritable path."""
    if named := os.environ.get("PTFAST_CACHE"):
        return Path(named).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptfast"
    except RuntimeError:
        return Path(os.devnull) / "ptfast"


watch_others()
