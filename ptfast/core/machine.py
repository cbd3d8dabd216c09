"""Resources that the system grants this process: cores, memory, and an end together with its parent."""

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
"""Root of the system's files."""
_NO_MEMORY = (
    *("can't allocate memory", "out of memory", "cannot allocate memory", "std::bad_alloc"),
    "_status_alloc_failed",  # cuBLAS and cuDNN, for their own memory
)
_NO_ENGINE = "unable to find an engine"
"""What cuDNN says for lack of memory, and of what it cannot compute."""
_FULL = 0.9
"""Share of a GPU's memory in use from which it counts as full."""
_NETWORK = (
    *("urllib", "http", "socket", "ssl", "requests", "urllib3"),
    *("httpx", "httpx2", "httpcore", "httpcore2"),
)
"""Packages whose errors come from fetching files."""
_HUB = "huggingface_hub"
"""Fetches files as well, and raises an OSError if that fails; its other errors have other causes."""
_UNKNOWN_MEMORY = 4 * 2**30
_STEAL, _IDLE = 7, (3, 4)
"""Fields of a CPU in /proc/stat, by proc(5)."""
_LEAST_WATCHED_S = 0.5
_watched: tuple[float, float | None, float]


def usable_cores(*, hyperthreads: bool = False) -> int:
    """Cores (or `hyperthreads`) within this process's affinity, its container's quota and its SLURM job."""
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
    """This rank's share of the machine's hyper-threads, 1 to `most`."""
    return max(1, min(most, usable_cores(hyperthreads=True) // _num_local_ranks()))


def available_memory() -> int:
    """Bytes of memory that this rank can take without swapping or being killed; 4 GiB if unknown.

    The least of what the machine has, and of what the limits of its container and its SLURM job leave.
    """
    lines = read_setting(ROOT / "proc/meminfo").splitlines()
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    names = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    texts = (os.environ.get(name, "") for name in names)
    per_node, per_cpu, num_cpus = (int(text) if text.isdigit() else 0 for text in texts)
    # 0 stands for all that the node has.
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
    """Free bytes of shared memory, which containers may limit; without /dev/shm, all memory."""
    try:
        found = os.statvfs(ROOT / "dev/shm")
    except (OSError, AttributeError):
        return available_memory()
    return found.f_bavail * found.f_frsize // _num_local_ranks()


def memory_limit(device: str = "auto") -> tuple[int, str]:
    """Bytes that this process may take at most, and what sets that limit."""
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
    """Bytes that processes take together, and how they are counted; processes that have ended count nothing.

    By `PSS` a page that several share, such as a forked worker and its parent, counts once; by `RSS`, if the
    system has no PSS, in each of them.
    """
    pids = list(pids)
    shares = [_kilobytes(pid, "smaps_rollup", "Pss:") for pid in pids]
    if any(shares):
        return sum(shares), "PSS"
    whole = sum(_kilobytes(pid, "status", "VmRSS:") for pid in pids)
    if not whole:
        whole = peak_memory_bytes("cpu")  # without /proc only this very process is known
    return whole, "RSS"


def peak_memory_bytes(device_type: str) -> int:
    """Most memory taken so far: on the GPU if there is one, of this process otherwise."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    # ru_maxrss starts at the memory of the parent when it started this process.
    if peak := _kilobytes(os.getpid(), "status", "VmHWM:"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reserved_memory_bytes(device_type: str) -> int:
    """Memory in use now: by torch on the GPU, or by this process on the host (0 if unknown)."""
    if device_type == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return _kilobytes(os.getpid(), "status", "VmRSS:")


def processor_time_s() -> float:
    """Processor seconds so far of this process and of its children, such as loader workers."""
    children = [child.pid for child in multiprocessing.active_children() if child.pid]
    return time.process_time() + sum(map(processor_time_of, children))


def processor_time_of(pid: int) -> float:
    """Processor seconds of another process; 0 if it has ended or the system does not say."""
    fields = read_setting(ROOT / f"proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def machine_times() -> tuple[float, float] | tuple[None, None]:
    """Busy and stolen seconds so far of this process's CPUs; None if unknown. Cost: about 0.1 ms."""
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
    """Cores that others have kept busy since `watch_others`, besides this run's own ranks; 0 if unknown."""
    start_s, busy_before_s, own_before_s = _watched
    busy_s, elapsed_s = machine_times()[0], time.perf_counter() - start_s
    if busy_s is None or busy_before_s is None or elapsed_s < _LEAST_WATCHED_S:
        return 0.0
    others_s = busy_s - busy_before_s - (processor_time_s() - own_before_s)
    return max(others_s / elapsed_s - (local_world_size - 1), 0.0)


def _kilobytes(pid: int, name: str, row: str) -> int:
    """Bytes in a row of a process's file; 0 if there is none."""
    lines = read_setting(ROOT / "proc" / str(pid) / name).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(row)), 0)


def is_memory_error(error: BaseException) -> bool:
    """Return True if `error` says that no memory is left, on the host or on the device."""
    text = text_of(error).lower()
    says_so = any(words in text for words in _NO_MEMORY) or (_NO_ENGINE in text and _gpu_is_full())
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_so)


def _gpu_is_full() -> bool:
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # there is none, or it has failed
        return False
    return free < (1 - _FULL) * total


def network_error(error: BaseException | None) -> BaseException | None:
    """The innermost error, of `error` and its causes, about something that could not be fetched; or None."""
    found = None
    while error is not None:
        package = type(error).__module__.partition(".")[0]
        fetches = package in _NETWORK or (package == _HUB and isinstance(error, OSError))
        if isinstance(error, (ConnectionError, TimeoutError)) or fetches:
            found = error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def on_main_thread() -> bool:
    """Return True if Python delivers signals to this thread; it does so to a program's main thread alone."""
    return threading.current_thread() is threading.main_thread()


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies; at once, if that is not `parent` any more."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(EXIT_BUG)


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _control_groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those around it, of either version of the interface."""
    for line in read_setting(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = ROOT / "sys/fs/cgroup" / (controller if controllers else "")
            # A container may see its own group as the root, while /proc names the path outside.
            group = root / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def read_setting(path: Path) -> str:
    """What a file of the kernel's says, such as one of /proc; "" if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def cache_folder() -> Path:
    """The folder of downloads and computed facts; without a home folder, one that cannot be written."""
    if named := os.environ.get("PTFAST_CACHE"):
        return Path(named).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptfast"
    except RuntimeError:
        return Path(os.devnull) / "ptfast"


watch_others()
