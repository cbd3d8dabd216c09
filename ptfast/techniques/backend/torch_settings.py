"""Set process-wide switches of torch: threads, cuDNN's kernel search, deterministic algorithms."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ptfast.core.auto_choices import AutoChoices
from ptfast.core.devices import cannot_run, check_device, device_type
from ptfast.core.distributed import THREADS_VARIABLE, Ranks, under_torchrun
from ptfast.core.machine import others_cores, usable_cores
from ptfast.core.protocols import StepBatch
from ptfast.core.tensors.torch_internals import set_allocator
from ptfast.core.tensors.trees import tensors_in
from ptfast.techniques.backend import Backend

MOST_SHAPES = 8
"""Most input shapes for which a kernel search pays off: full and last batches, a few image sizes."""


def apply_backend(
    backend: Backend,
    *,
    device: torch.device,
    local_world_size: int = 1,
    choices: AutoChoices | None = None,
) -> None:
    """Set torch's process-wide switches, before anything runs on the device.

    `threads=auto` divides the usable cores equally among local ranks, without the cores that other
    processes keep busy: a thread that waits for a core delays all others. The number of threads changes the
    order of sums, so a resumed run keeps it. `cudnn_benchmark=auto` lets cuDNN time its kernels until
    `watch_shapes` has seen too many shapes.

    Args:
        choices: records the values chosen for `auto`.
    """
    choices, deterministic = choices or AutoChoices(), backend.deterministic

    def choose_threads() -> tuple[int, str]:
        busy = others_cores(local_world_size) if device.type == "cpu" else 0.0
        count = resolve_threads(local_world_size, busy)
        crowded = count < resolve_threads(local_world_size)
        return count, f"others keep {busy:.1f} of {usable_cores()} cores busy" if crowded else ""

    torch.set_num_threads(choices.resolve("backend.threads", backend.threads, int, choose_threads))
    # An earlier part of this run, on a GPU, has seen too many shapes.
    began_on = choices.began_with("device", str)
    had_many = began_on == "cuda" and choices.began_with("backend.cudnn_benchmark", bool) is False
    benchmark = not had_many if backend.cudnn_benchmark == "auto" else backend.cudnn_benchmark
    if deterministic:
        # cuBLAS reads this when it creates its first handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():
        # Checked first because the call imports the compiler, which takes seconds.
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    # Kernels chosen by timing differ from run to run.
    torch.backends.cudnn.benchmark = benchmark and not deterministic and device.type == "cuda"
    searches = backend.cudnn_benchmark == "auto" and torch.backends.cudnn.benchmark
    reason = "inputs have had few shapes so far" if searches else ""
    choices.choose("backend.cudnn_benchmark", torch.backends.cudnn.benchmark, reason)
    before = bool(choices.began_with("backend.flush_denormals", bool))
    flush = device.type == "cpu" and (before if began_on == "cpu" else backend.flush_denormals)
    choices.choose("backend.flush_denormals", torch.set_flush_denormal(flush) and flush)
    choices.choose("backend.reuse_memory", backend.reuse_memory and device.type == "cpu" and reuse_memory())


def watch_shapes(
    batches: Iterator[StepBatch], turn_off: Callable[[], None], most: int = MOST_SHAPES
) -> Iterator[StepBatch]:
    """Yield the same batches, and call `turn_off` once inputs have had more than `most` shapes.

    cuDNN's search runs every kernel on every new shape, which takes as long as tens of steps.

    Cost: a lookup on the host per micro-batch until then; nothing is read from the device.
    """
    seen: set[Any] = set()
    for batch in batches:
        for data, _ in batch.micro_batches:
            inputs = data[:1] if isinstance(data, (tuple, list)) else data
            seen.add(tuple(tensor.shape for tensor in tensors_in(inputs)))
        if len(seen) > most:
            turn_off()
            yield batch
            break
        yield batch
    yield from batches


def resolve_threads(local_world_size: int, busy_cores: float = 0.0) -> int:
    """Return the threads for each of `local_world_size` processes; the user's OMP_NUM_THREADS wins if set."""
    # torchrun sets the variable to 1, which would leave all other cores idle.
    asked = os.environ.get(THREADS_VARIABLE if under_torchrun() else "OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max((usable_cores() - round(busy_cores)) // local_world_size, 1)


def resolve_device(name: str, ranks: Ranks) -> torch.device:
    """Return the device of this rank; `auto` uses a GPU if there is one. E005 if there is no such device."""
    if problem := cannot_run(check_device(name), "device", name):
        raise problem
    name = device_type(name)
    if name == "cuda":
        # A launcher may show each rank only its own GPU.
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return torch.device(name)


def expand_segments(
    backend: Backend, device: torch.device, choices: AutoChoices, *, many_lengths: bool, captures: bool
) -> None:
    """Switch growing segments of GPU memory on or off.

    Batches of many lengths need blocks of new sizes all the time, which do not fit into fixed segments. With
    `auto`, a run that `captures` CUDA graphs keeps fixed ones. A user's PYTORCH_ALLOC_CONF is not changed.

    Source: PyTorch notes, "CUDA semantics", `expandable_segments`.
    """
    has_own = any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")))
    if device.type != "cuda" or sys.platform != "linux" or torch.version.hip is not None or has_own:
        return
    pays, key = many_lengths and not captures, "backend.expandable_segments"
    reason = "batches come in many lengths" if pays else ""
    expands = choices.resolve(key, backend.expandable_segments, bool, lambda: (pays, reason))
    set_allocator(f"expandable_segments:{expands}")


def allow_cudnn_attention(
    backend: Backend, device: torch.device, choices: AutoChoices, *, many_lengths: bool
) -> None:
    """Allow or forbid cuDNN's attention on a GPU.

    On new GPUs torch prefers cuDNN's attention, which takes a tenth of a second to plan for each new shape.
    """
    if device.type != "cuda":
        return
    reason, key = "cuDNN plans anew for every length" if many_lengths else "", "backend.cudnn_attention"
    may = choices.resolve(key, backend.cudnn_attention, bool, lambda: (not many_lengths, reason))
    torch.backends.cuda.enable_cudnn_sdp(may)


def reuse_memory() -> bool:
    """Keep memory that this process frees for its next allocation; return True if its C library can do so.

    glibc returns freed memory to the system, which clears and maps the pages of activations again in each
    step. With this setting it keeps that memory, so the process stays at its peak size.

    Source: mallopt(3), `M_TRIM_THRESHOLD` and `M_MMAP_MAX`.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc, mmap_max, trim_threshold = ctypes.CDLL(None), -4, -1  # options as in malloc.h
    return bool(hasattr(libc, "mallopt") and libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, -1))
