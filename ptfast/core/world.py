"""This process's place among the ranks that were started, read from the environment."""

from __future__ import annotations

import os

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ParallelError

THREADS_VARIABLE = "PTFAST_THREADS"
"""The user's OMP_NUM_THREADS before ptfast launched its ranks; torchrun sets it to 1 itself."""

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that every rank needs."""


# SLURM's are those of the step: a batch script and an interactive shell know the tasks of their job.
STARTERS = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables of engines, mpirun, srun and mpiexec: the number of processes started, and which one this is."""
_TORCHRUN = (
    "torchrun --nnodes N --nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "-m ptfast train ... parallel=ddp"
)


def under_torchrun() -> bool:
    """Return True if torchrun (the user's, or the one ptfast launched) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def world(*, meets: bool = False) -> Ranks | None:
    """This process's place among the ranks that were started; None if it is not one of them.

    It is read from `WORLD`, set by torchrun or by any engine that sets all of it.

    Args:
        meets: this process knows how to find processes on other machines, if there are any.

    Raises:
        ParallelError: P002 for variables that make no sense, and for several processes that do not know of
            each other and would each train alone. The first says so; the others exit.
    """
    if not under_torchrun() and not all(map(os.environ.get, WORLD)):
        if not (meets or nodes_from_environment()):
            _refuse_several()
        return None
    rank, size, local_rank = map(_number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if rank >= size:
        raise ParallelError("P002", f"WORLD_SIZE is {size}", key="RANK", value=rank)
    if not under_torchrun():
        _number("MASTER_PORT")
    return Ranks(rank, local_rank, size, _number("LOCAL_WORLD_SIZE", "1"))


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise ParallelError("P002", "no whole number", key=name, value=text)
    return int(text)


def nodes_from_environment() -> bool:
    """Return True if torchrun's variables (`PET_*`) make this one of several machines, as Kubeflow's do."""
    return os.environ.get("PET_NNODES", "1") not in ("1", "1:1")


def _refuse_several() -> None:
    """Refuse to be one of several processes that do not know of each other."""
    for size_variable, rank_variable in STARTERS.items():
        rank, size = os.environ.get(rank_variable), os.environ.get(size_variable, "1")
        if rank is None or size == "1":
            continue
        if rank not in ("", "0"):
            raise SystemExit(ParallelError.exit_code)
        missing = ", ".join(name for name in WORLD if not os.environ.get(name))
        what = f"without {missing}, each of these processes would train by itself"
        hint = (
            f"Start one process here, with parallel=ddp parallel.nproc={size}, or one a machine: {_TORCHRUN}"
        )
        raise ParallelError("P002", what, key=size_variable, value=size, suggestion=hint)
