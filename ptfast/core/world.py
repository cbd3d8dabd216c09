"""This process's place among the ranks that were started, read from the environment."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ParallelError

THREADS_VARIABLE = "PTFAST_THREADS"
"""The user's OMP_NUM_THREADS before ptfast launched its ranks; torchrun sets it to 1 itself."""

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that every rank needs."""


class Starter(NamedTuple):
    """A program that starts processes without setting any of `WORLD`: its variables, and commands instead.

    Args:
        size: variable with the number of processes; `rank` and `local_size` likewise.
        one: the command for a single process here, with the cores of all.
        each: the command for one process on each of several machines.
    """

    size: str
    rank: str
    local_size: str
    one: str
    each: str


STARTERS = {
    "mpirun": Starter(
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("", "mpirun -n {nodes} --map-by ppr:1:node "),
    ),
    # Of the step: a batch script and an interactive shell know the tasks of their job, and are none of them.
    "srun": Starter(
        *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", ""),
        *("srun -n 1 -c {cores} ", "srun -N {nodes} -n {nodes} -c {cores} "),
    ),
    "mpiexec": Starter("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "", "mpiexec -n {nodes} -ppn 1 "),
}
_ALONE = "nobody has told these processes of each other: each would train by itself"
_TORCHRUN = (
    "torchrun --nnodes {} --nproc-per-node {} --rdzv-backend c10d --rdzv-endpoint {}:29500 "
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
    get = os.environ.get
    if "RANK" in os.environ and get("WORLD_SIZE", "1") != "1":
        missing = [name for name in WORLD if not get(name)]
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        rank, key, size = get("RANK", ""), "WORLD_SIZE", get("WORLD_SIZE")
        hint = f"{_TORCHRUN.format('N', 'M', 'HOST')}, or set what is missing"
    else:
        started = (name for name, each in STARTERS.items() if each.rank in os.environ)
        name = next((name for name in started if get(STARTERS[name].size, "1") != "1"), None)
        if name is None:
            return
        starter = STARTERS[name]
        key, size, rank = starter.size, _number(starter.size), get(starter.rank, "")
        what = f"{name} has started {size}"
        nodes = _number("SLURM_STEP_NUM_NODES", "1") if name == "srun" else 1
        local_size = _number(starter.local_size, str(max(1, size // nodes)))
        nodes = -(-size // local_size)
        cores = local_size * _number("SLURM_CPUS_PER_TASK", "1")
        if nodes == 1:
            hint = f"{starter.one.format(cores=cores)}ptfast train ... parallel=ddp parallel.nproc={size}"
        else:
            torchrun = _TORCHRUN.format(nodes, local_size, socket.gethostname())
            hint = starter.each.format(nodes=nodes, cores=cores) + torchrun
    if rank not in ("", "0"):
        raise SystemExit(ParallelError.exit_code)
    raise ParallelError("P002", f"{what}, and {_ALONE}", key=key, value=size, suggestion=f"Run {hint}")
