"""Set process-wide switches of torch: threads, cuDNN's kernel search, deterministic algorithms."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ptfast.core.devices import cannot_run, device_type, lack_of_device
from ptfast.core.distributed import Ranks
from ptfast.core.machine import others_cores, usable_cores
from ptfast.core.protocols import StepBatch
from ptfast.core.resolved import Resolved, resolved_or
from ptfast.core.tensors.torch_internals import set_allocator
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.world import THREADS_VARIABLE, under_torchrun
from ptfast.techniques.backend import Backend

MOST_SHAPES = 8
"""Number of input shapes up to which a kernel search pays: full and last batches, a few image sizes."""


def apply_backend(
    backend: Backend,
    *,
    device: torch.device,
    num_local_ranks: int = 1,
    before: Resolved | None = None,
) -> dict[str, Any]:
    """Set torch's process-wide switches, before anything runs on the device; return fields of `Resolved`.

    `threads=auto` takes an equal share of the usable cores for each local rank, without those that other
    processes keep busy: a thread that waits for a core delays all others. Their number
    changes the order of sums, so a resumed run keeps it. `cudnn_benchmark=auto` lets cuDNN time its kernels
    until `watch_shapes` has seen too many shapes.

    Args:
        before: values that `auto` had when the run began; None for a new run.
    """
    before = before or Resolved()
    threads, deterministic = resolved_or(backend.threads, before.threads), backend.deterministic
    reason = before.threads_reason if before.threads else ""
    if threads == "auto":
        busy = others_cores(num_local_ranks) if device.type == "cpu" else 0.0
        num_threads = resolve_threads(num_local_ranks, busy)
        if num_threads < resolve_threads(num_local_ranks):
            reason = f"others keep {busy:.1f} of {usable_cores()} cores busy"
    else:
        num_threads = threads
    # On a GPU there were already too many shapes.
    had_many = (before.device, before.cudnn_benchmark) == ("cuda", False)
    benchmark = not had_many if backend.cudnn_benchmark == "auto" else backend.cudnn_benchmark
    torch.set_num_threads(num_threads)
    if deterministic:
        # cuBLAS reads this when it first makes a handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():
        # Checked first because the call imports the compiler, which takes seconds.
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    # Kernels chosen by timing differ from run to run.
    torch.backends.cudnn.benchmark = benchmark and not deterministic and device.type == "cuda"
    wanted = before.flushes_denormals if before.device == device.type else backend.flush_denormals
    flush = wanted and device.type == "cpu"
    can_flush = torch.set_flush_denormal(flush)
    return {
        "threads": num_threads,
        "threads_reason": reason,
        "interop_threads": torch.get_num_interop_threads(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": deterministic,
        "holds_memory": backend.hold_memory and device.type == "cpu" and hold_memory(),
        "flushes_denormals": flush and can_flush,
    }


def watch_shapes(
    batches: Iterator[StepBatch], turn_off: Callable[[], None], most: int = MOST_SHAPES
) -> Iterator[StepBatch]:
    """Yield the same batches; call `turn_off` once, when inputs have had more than `most` shapes.

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


def resolve_threads(num_local_ranks: int, busy_cores: float = 0.0) -> int:
    """Return the threads for each of `num_local_ranks` processes; the user's OMP_NUM_THREADS wins if set."""
    # torchrun sets the variable to 1, which would leave all other cores idle.
    asked = os.environ.get(THREADS_VARIABLE if under_torchrun() else "OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max((usable_cores() - round(busy_cores)) // num_local_ranks, 1)


def resolve_device(name: str, ranks: Ranks) -> torch.device:
    """Return the device of this rank; `auto` uses a GPU if there is one. E005 if there is no such device."""
    if problem := cannot_run(lack_of_device(name), "device", name):
        raise problem
    name = device_type(name)
    if name == "cuda":
        # A launcher may show each rank only its own GPU.
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return torch.device(name)


def expand_segments(backend: Backend, device: torch.device, *, many_lengths: bool, captures: bool) -> bool:
    """Switch growing segments of GPU memory on or off; return True if they are on.

    Batches of many lengths need blocks of new sizes all the time, which do not fit into fixed segments. With
    `auto`, a run that `captures` CUDA graphs keeps fixed ones. A user's PYTORCH_ALLOC_CONF is not changed.

    Source: PyTorch notes, "CUDA semantics", `expandable_segments`.
    """
    has_own = any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")))
    if device.type != "cuda" or sys.platform != "linux" or torch.version.hip is not None or has_own:
        return False
    expands = backend.expandable_segments
    expands = many_lengths and not captures if expands == "auto" else expands
    set_allocator(f"expandable_segments:{expands}")
    return expands


def allow_cudnn_attention(backend: Backend, device: torch.device, *, many_lengths: bool) -> bool | None:
    """Allow or forbid cuDNN's attention; return True if it is allowed, None without a GPU.

    On new GPUs torch prefers cuDNN's attention, which plans for every new shape: a tenth of a second each.
    """
    if device.type != "cuda":
        return None
    may = not many_lengths if backend.cudnn_attention == "auto" else backend.cudnn_attention
    torch.backends.cuda.enable_cudnn_sdp(may)
    return may


def hold_memory() -> bool:
    """Keep memory that this process frees for its next allocation; return True if its C library can do so.

    glibc returns freed memory to the system, which clears and maps the pages of activations again in each
    step. With this setting it does not, and the process stays as large as at its peak.

    Source: mallopt(3), `M_TRIM_THRESHOLD` and `M_MMAP_MAX`.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc, mmap_max, trim_threshold = ctypes.CDLL(None), -4, -1  # options as in malloc.h
    return bool(hasattr(libc, "mallopt") and libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, -1))
