"""Process-wide switches of torch: threads, cuDNN's search for kernels, deterministic algorithms."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from ptfast.devices import device_type, lack_of_device
from ptfast.distributed import Ranks, under_torchrun
from ptfast.errors import ConfigError, MachineError
from ptfast.machine import usable_cores


def apply_backend(
    threads: int | Literal["auto"],
    *,
    cudnn_benchmark: bool,
    deterministic: bool,
    device: torch.device,
    num_local_ranks: int = 1,
) -> dict[str, Any]:
    """Set torch's process-wide switches and say what `auto` became.

    Call it before anything runs on the device. The number of threads changes the order of sums, so the result
    is recorded and given back as `threads` when the run resumes.

    Args:
        threads: CPU threads of this process; `auto`: an equal share of the usable cores for each local rank.
        cudnn_benchmark: let cuDNN time its kernels on each new shape and keep the fastest.
        deterministic: refuse operations whose result depends on timing; slower, bit-identical from run to
            run.
        device: where the model will be.
        num_local_ranks: processes of this run on this machine.

    Returns:
        `threads`, `interop_threads`, `cudnn_benchmark` and `deterministic`, JSON-serialisable.

    Raises:
        ConfigError: C011 where `cudnn_benchmark` and `deterministic` are both on.
    """
    if deterministic and cudnn_benchmark:
        what = "kernels chosen by timing differ from run to run; backend.deterministic forbids that"
        raise ConfigError("C011", what, key="backend.cudnn_benchmark", value="true")
    num_threads = resolve_threads(num_local_ranks) if threads == "auto" else threads
    torch.set_num_threads(num_threads)
    if deterministic:
        # cuBLAS reads this when it first makes a handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():
        # Asked first because the call imports the compiler, which takes seconds.
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark and device.type == "cuda"
    return {
        "threads": num_threads,
        "interop_threads": torch.get_num_interop_threads(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": deterministic,
    }


def resolve_threads(num_local_ranks: int) -> int:
    """Threads for each of `num_local_ranks` processes; the user's OMP_NUM_THREADS wins where there is one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets the variable to 1 itself, which would leave all other cores idle.
    if asked.isdigit() and int(asked) > 0 and not under_torchrun():
        return int(asked)
    return max(usable_cores() // num_local_ranks, 1)


def resolve_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this rank; `auto` takes a GPU where there is one.

    Raises:
        MachineError: E005 when the device asked for is not there.
        ConfigError: C012 when there are fewer GPUs than ranks.
    """
    lack = lack_of_device(name)
    if lack is not None:
        raise MachineError("E005", lack.what, key="device", value=name, suggestion=lack.remedy)
    name = device_type(name)
    if name == "cuda":
        count = torch.cuda.device_count()
        if ranks.local_rank >= count:
            what = f"{ranks.num_local_ranks} ranks need as many GPUs and {count} are visible"
            raise ConfigError("C012", what, key="parallel.nproc", suggestion=f"Use parallel.nproc={count}")
        return torch.device("cuda", ranks.local_rank)
    return torch.device(name)
