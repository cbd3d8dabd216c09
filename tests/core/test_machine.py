"""Cores and memory that a container, a SLURM job and the machine itself leave to this process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ptfast.core import machine
from ptfast.core.machine import available_memory, memory_of, shared_memory, spare_cores, usable_cores
from ptfast.techniques.backend.torch_settings import resolve_threads

GIB = 2**30


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 hyper-threads on 8 cores with 32 GiB, without limits."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", *filter(lambda n: "SLURM" in n, os.environ)):
        monkeypatch.delenv(name, raising=False)
    for cpu in range(16):
        place = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(tmp_path, {place: f"{cpu % 8},{cpu % 8 + 8}"})
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {32 * 2**20} kB\n"})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_a_machine_without_limits() -> None:
    assert (usable_cores(), usable_cores(hyperthreads=True), spare_cores()) == (8, 16, 8)
    assert available_memory() == 32 * GIB


def test_pages_that_processes_share_count_once_where_that_is_known(system: Path) -> None:
    whole, shares = "Name: x\nVmRSS:\t 300 kB", "00-ff ---p [rollup]\nRss: 300 kB\nPss: 200 kB"
    write(system, {f"proc/{pid}/status": whole for pid in (7, 8)})
    assert memory_of([7, 8, 9]) == (600 * 1024, "RSS")
    write(system, {f"proc/{pid}/smaps_rollup": shares for pid in (7, 8)})
    assert memory_of([7, 8, 9]) == (400 * 1024, "PSS")


VERSION_2 = {
    "proc/self/cgroup": "0::/user/job",
    "sys/fs/cgroup/user/job/cpu.max": "max 100000",
    "sys/fs/cgroup/user/cpu.max": "300000 100000",
    "sys/fs/cgroup/user/job/memory.max": str(4 * GIB),
    "sys/fs/cgroup/user/job/memory.current": str(3 * GIB),
    "sys/fs/cgroup/user/job/memory.stat": f"anon {GIB}\ninactive_file {GIB}",
    "sys/fs/cgroup/user/memory.max": "max",
    "sys/fs/cgroup/user/memory.current": str(9 * GIB),
}
# The path in /proc is the one outside of the container: only its root is there inside.
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
}


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1], ids=["version 2", "version 1"])
def test_a_container_has_what_its_limits_leave(system: Path, files: dict[str, str]) -> None:
    write(system, files)
    assert (usable_cores(), spare_cores(), resolve_threads(1)) == (3, 3, 3)
    assert available_memory() == 2 * GIB


def test_a_container_without_limits_has_the_machine(system: Path) -> None:
    write(system, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"})
    write(system, {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"})
    assert (usable_cores(), available_memory()) == (8, 32 * GIB)


def test_a_slurm_job_has_what_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "2048")
    assert (usable_cores(), spare_cores(), available_memory()) == (4, 4, 8 * GIB)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1024")
    assert available_memory() == GIB


def test_what_processes_may_share(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without such a place, as on a Mac, it is all memory.
    assert shared_memory() == 32 * GIB
    (system / "dev/shm").mkdir(parents=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    facts = SimpleNamespace(f_bavail=1000, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: facts if path == system / "dev/shm" else None)
    assert shared_memory() == 500 * 4096


def test_ranks_share_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (spare_cores(), resolve_threads(4), available_memory()) == (4, 2, 8 * GIB)


def test_a_rank_is_limited_by_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    sizes = [SimpleNamespace(total_memory=GIB * index) for index in range(4)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    assert machine.memory_limit("cuda") == (3 * GIB, "the GPU")


@pytest.mark.parametrize(
    ("said", "is_one"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", False),
    ],
)
def test_libraries_run_out_of_memory_in_words_of_their_own(said: str, is_one: bool) -> None:
    assert machine.is_memory_error(RuntimeError(said)) is is_one


@pytest.mark.parametrize(("free", "is_one"), [(0.5, True), (8, False)])
def test_cudnn_without_an_engine_lacks_memory_only_on_a_full_gpu(
    free: float, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert not machine.is_memory_error(error), "without a GPU"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * GIB), 10 * GIB))
    assert machine.is_memory_error(error) is is_one


def test_what_others_keep_busy_is_told_from_what_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir(exist_ok=True)
    clock = {"now": 0.0, "own": 0.0}

    def at(now: float, busy: float, own: float) -> None:
        ticks = round(busy * os.sysconf("SC_CLK_TCK"))
        (tmp_path / "proc/stat").write_text(f"cpu {ticks} 0 0 0 0 0 0 0\ncpu0 {ticks} 0 0 99 9 0 0 0\n")
        clock.update(now=now, own=own)

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(machine, "processor_time_s", lambda: clock["own"])
    monkeypatch.setattr(machine, "_watched", (0.0, None, 0.0))
    at(10.0, 100.0, 5.0)
    machine.watch_others()
    at(10.2, 100.4, 5.2)
    assert machine.others_cores() == 0.0  # too short to say
    at(12.0, 105.0, 7.0)
    assert machine.others_cores() == pytest.approx((5 - 2) / 2)
    assert machine.others_cores(local_world_size=2) == pytest.approx(0.5)
    assert machine.others_cores(local_world_size=8) == 0.0


def test_errors_of_the_hub_count_as_network_errors_only_where_it_fails_to_fetch() -> None:
    errors = pytest.importorskip("huggingface_hub.errors", reason="needs the package huggingface_hub")
    for error, fetching in (
        (errors.LocalEntryNotFoundError("not in the cache"), True),
        (errors.OfflineModeIsEnabled("offline"), True),
        (errors.HFValidationError("Repo id must use alphanumeric chars"), False),
        (errors.SafetensorsParsingError("not a safetensors file"), False),
    ):
        assert (machine.network_error(error) is error) == fetching
        wrapped = OSError("cannot load")
        wrapped.__cause__ = error
        assert (machine.network_error(wrapped) is error) == fetching
