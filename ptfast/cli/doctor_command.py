"""`ptfast doctor`: check this machine for training, on one screen, with a remedy for each weakness."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from ptfast.core import machine
from ptfast.core.devices import check_compiler, cpu_facts, multiplies_bf16
from ptfast.core.errors import EXIT_OK
from ptfast.core.units import num_bytes
from ptfast.report.terminal.display import build_display, say, terminal_display
from ptfast.report.terminal.json_lines import emit, lines

WATCHED_S = 0.6
"""Seconds during which other processes are watched."""
BUSY_CORES = 0.25
LEAST_SHARED_BYTES, LEAST_FREE_BYTES = 2**30, 5 * 2**30
LEAST_DESCRIPTORS = 4096
"""Least limit of open files: every batch from a data worker needs file descriptors."""
WRITTEN_BYTES = 64 * 2**20
SLOW_DISK = 50e6
"""Bytes per second."""
EXTRAS = ("torchvision", "timm", "transformers", "onnx", "tensorboard", "wandb", "torchao", "safetensors")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


class Finding(NamedTuple):
    """A line of the report: the subject, the result, and a remedy if the result is a weakness."""

    subject: str
    found: str
    remedy: str = ""


def doctor(args: Namespace) -> int:
    """Print one line for each part of the machine that training depends on."""
    with terminal_display().status("checking this machine"):
        findings = [finding for check in CHECKS for finding in check()]
    if lines() is not None:
        for finding in findings:
            emit("finding", **finding._asdict())
        return EXIT_OK
    build_display().panel("this machine", [finding[:2] for finding in findings])
    remedies = [finding for finding in findings if finding.remedy]
    for finding in remedies:
        say(f"! {finding.subject}: {finding.remedy}.")
    if not remedies:
        say("This machine is ready for training.")
    return EXIT_OK


def _software() -> Iterator[Finding]:
    import torch

    from ptfast import __version__

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    build = build if torch.version.cuda or torch.version.hip else "CPU build"
    yield Finding("ptfast", f"{__version__}, Python {platform.python_version()} on {platform.platform()}")
    yield Finding("torch", f"{torch.__version__}, {build}")
    found: list[str] = []
    for name in EXTRAS:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    remedy = ""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, AttributeError) as error:
        found = [name for name in found if not name.startswith("torchvision")]
        remedy = f"torchvision does not load ({error}): install it together with torch, by one pip command"
    yield Finding("libraries", ", ".join(found) or "no optional ones", remedy)


def _gpus() -> Iterator[Finding]:
    import torch

    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        taken, remedy = total - free, ""
        if taken > total / 10:
            remedy = f"other programs use {num_bytes(taken)} of its memory: nvidia-smi lists them"
        what = f"{facts.name}, {num_bytes(total)}, capability {facts.major}.{facts.minor}"
        yield Finding(f"GPU {number}", f"{what}, {num_bytes(free)} free", remedy)
    if torch.cuda.device_count():
        return
    remedy = ""
    driver = machine.read_setting(machine.ROOT / "proc/driver/nvidia/version")
    if driver and not torch.version.cuda:
        remedy = "a driver is loaded but this torch is built for the CPU: install a CUDA build of torch"
    elif driver and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        remedy = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides the GPUs: unset it"
    elif driver:
        remedy = "a driver is loaded but torch finds no GPU: torch.cuda.init() in Python shows why"
    yield Finding("GPU", "Apple GPU" if torch.backends.mps.is_available() else "none", remedy)


def _cpu() -> Iterator[Finding]:
    import torch

    name = next(iter(cpu_facts("model name", "Model")), platform.processor() or platform.machine())
    flags = set(" ".join(cpu_facts("flags", "Features")[:1]).split())
    usable, whole = machine.usable_cores(), os.cpu_count() or 1
    known = " ".join(each for each in INSTRUCTIONS if each in flags)
    bf16 = "bf16 is faster than fp32" if multiplies_bf16("cpu") else "bf16 is no faster than fp32"
    yield Finding("CPU", f"{name}, {usable} usable cores of {whole} hyper-threads")
    yield Finding("instructions", f"{known or 'unknown'}; {bf16}")
    threads, remedy = torch.get_num_threads(), ""
    if threads > usable:
        remedy = f"more threads than usable cores: unset OMP_NUM_THREADS, or set it to {usable}"
    elif threads < usable and "OMP_NUM_THREADS" in os.environ:
        remedy = f"OMP_NUM_THREADS leaves cores idle: unset it to use all {usable}"
    yield Finding("threads", f"{threads} used by PyTorch", remedy)
    machine.watch_others()
    time.sleep(WATCHED_S)
    others = machine.others_cores()
    remedy = "runs are slower and timings vary until they stop: top lists them" if others > BUSY_CORES else ""
    yield Finding("neighbors", f"other processes keep {others:.1f} cores busy", remedy)


def _memory() -> Iterator[Finding]:
    limit, what = machine.memory_limit("cpu")
    yield Finding("memory", f"{num_bytes(limit)} usable ({what})")
    shared = machine.shared_memory()
    small = shared < LEAST_SHARED_BYTES
    remedy = "worker processes pass batches through it: docker run --shm-size=8g, or --ipc=host"
    yield Finding("shared memory", f"{num_bytes(shared)} free in /dev/shm", remedy if small else "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = 65536 if hard == unlimited else min(65536, hard)
    few = soft != unlimited and soft < min(LEAST_DESCRIPTORS, most)
    remedy = f"loaders with many workers use them up: ulimit -n {most}" if few else ""
    yield Finding("open files", "unlimited" if soft == unlimited else f"{soft:,} at most", remedy)


def _compilers() -> Iterator[Finding]:
    import torch

    device = "cuda" if torch.cuda.device_count() else "cpu"
    lack = check_compiler(device)
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), "none")
    yield Finding("compiler", found, f"torch.compile cannot run here. {lack.remedy}" if lack else "")


def _disks() -> Iterator[Finding]:
    for subject, folder in (("runs", Path()), ("cache", machine.cache_folder())):
        folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(folder).free
        try:
            speed = _bytes_per_s(folder)
        except OSError as error:
            yield Finding(subject, f"{folder}: {error.strerror}", "choose a writable folder with free space")
            continue
        remedy = ""
        if free < LEAST_FREE_BYTES:
            remedy = f"only {num_bytes(free)} are free: checkpoints may not fit"
        elif speed < SLOW_DISK:
            remedy = "saving will stall training on this disk: set run.root to a faster one"
        found = f"{folder}: {num_bytes(free)} free, writes {num_bytes(int(speed))}/s"
        yield Finding(subject, found, remedy)


def _bytes_per_s(folder: Path) -> float:
    """Return the speed of writing a file, including the wait until it is on the disk."""
    block, start_s = os.urandom(2**20), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, prefix=".ptfast-doctor-") as file:
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - start_s)


def _network() -> Iterator[Finding]:
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
    chosen = {
        key: os.environ[key] for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if key in os.environ
    }
    unknown = [name for name in chosen.values() if name.strip("^=").split(",")[0] not in (*interfaces, "lo")]
    remedy = f"this machine has no interface {unknown[0]}: ip link lists them" if unknown else ""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "not known"
        remedy = remedy or f"{host} has no address for ranks on other machines: add it to /etc/hosts"
    words = [f"{host} ({address})", f"interfaces {', '.join(interfaces) or 'none'}"]
    yield Finding(
        "network", "; ".join([*words, *(f"{key}={value}" for key, value in chosen.items())]), remedy
    )


CHECKS = (_software, _gpus, _cpu, _memory, _compilers, _disks, _network)
