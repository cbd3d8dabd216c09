"""The ranks of a run: this process's rank, the store that ranks share, and their collectives."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ptfast.core.errors import ConfigError, ParallelError, text_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
AGENT_SERVES = "TORCHELASTIC_USE_AGENT_STORE"
"""`True` if torchrun's agent serves the store, which then outlives the ranks."""
MEET_S = 600.0
"""How long ranks wait for each other's notes in their store."""
THREADS_VARIABLE = "PTFAST_THREADS"
"""The user's OMP_NUM_THREADS before ptfast launched its ranks, because torchrun sets it to 1."""

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that every rank needs."""

# SLURM's variables are those of the step: job-wide counts are set in batch scripts and shells, too.
STARTERS = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables of engines, mpirun, srun and mpiexec: the number of processes, and the rank of this one."""
_TORCHRUN = (
    "torchrun --nnodes N --nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "-m ptfast train ... parallel=ddp"
)
_stores: list[Any] = []
"""The ranks' store, once it is open. The first rank must keep it open, because it serves the others."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the number of ranks, in total and on this machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    grouped: bool = False
    """True if a process group is created even for one rank."""

    @property
    def is_first(self) -> bool:
        """Return True on the rank that writes files and reports to the user."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Return True if ranks use a process group: there are several, or a group of one was requested."""
        return self.world_size > 1 or self.grouped


def under_torchrun() -> bool:
    """Return True if torchrun (the user's, or the one ptfast launched) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def world(*, meets: bool = False) -> Ranks | None:
    """Return this process's `Ranks`; None if no launcher started it as a rank.

    They are read from the variables in `WORLD`, which torchrun sets, and other launchers may set.

    Args:
        meets: this process can find the processes on other machines, if there are any.

    Raises:
        ParallelError: P002 for invalid variables, and for several processes that were started without
            `WORLD`, so that each would train alone. The first raises; the others exit.
    """
    if not under_torchrun() and not all(map(os.environ.get, WORLD)):
        if not (meets or nodes_from_environment()):
            _reject_several()
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
    """Return True if torchrun's variables (`PET_*`, set by Kubeflow) name more than one machine."""
    return os.environ.get("PET_NNODES", "1") not in ("1", "1:1")


def _reject_several() -> None:
    """Reject a start of several processes without the variables that would connect them."""
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


def init_process_group(device: torch.device, ranks: Ranks, timeout_s: float) -> None:
    """Initialize the process group: NCCL for GPUs (C012 if ranks would share a GPU), gloo for CPUs."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        dist.init_process_group("gloo", timeout=timeout)
        return
    if ranks.local_world_size > torch.cuda.device_count():
        # Each rank sees only some of this machine's GPUs: compare their UUIDs through the store.
        first = ranks.rank - ranks.local_rank
        with _meeting(timeout_s) as store:
            store.set(_place(f"gpu/{ranks.rank}"), str(torch.cuda.get_device_properties(device).uuid))
            places = [_place(f"gpu/{first + number}") for number in range(ranks.local_world_size)]
            num_gpus = len({store.get(place) for place in places})
        if num_gpus < ranks.local_world_size:
            what = f"{ranks.local_world_size} ranks need as many GPUs, and they see {num_gpus}"
            hint = f"Use parallel.nproc={num_gpus}"
            raise ConfigError("C012", what, key="parallel.nproc", suggestion=hint)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)


def joined() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def destroy_process_group() -> None:
    if joined():
        import torch.distributed as dist

        dist.destroy_process_group()


def abort_process_group() -> None:
    """Abort all collectives, in any thread: nothing else ends a wait of NCCL."""
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        dist.distributed_c10d._abort_process_group()


def collectives_of_gpus() -> bytes | None:
    """Return the latest NCCL collectives in the format of `torchfrtrace`; None without NCCL."""
    import torch.distributed as dist

    if not joined() or dist.get_backend() != "nccl":
        return None
    from ptfast.core.tensors.torch_internals import dump_nccl_trace

    return dump_nccl_trace()


def sum_over_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Sum `tensor` over all ranks in place, and return it; a single rank does nothing."""
    if ranks.distributed:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def gathered(own: Tensor, world_size: int) -> Tensor:
    """Gather every rank's flat tensor `own` on all ranks: (world_size, values)."""
    import torch.distributed as dist

    # torch 2.14 renames this function and deprecates the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    of_all = own.new_empty(world_size * len(own))
    gather(of_all, own)
    return of_all.view(world_size, -1)


def host_sums(world_size: int) -> Callable[[Sequence[int]], Callable[[], list[int]]]:
    """Return a function that starts a sum of numbers over the ranks, and returns a function to wait for it.

    All ranks must call this: it creates a gloo process group, which uses no device.
    """
    if world_size == 1:
        return lambda numbers: lambda: list(numbers)
    import torch
    import torch.distributed as dist

    group: Any = dist.new_group(backend="gloo")

    def begin(numbers: Sequence[int]) -> Callable[[], list[int]]:
        sums = torch.tensor(numbers)
        work: Any = dist.all_reduce(sums, group=group, async_op=True)

        def finish() -> list[int]:
            work.wait()
            return sums.tolist()

        return finish

    return begin


def on_all_ranks(value: T, world_size: int) -> list[T]:
    """Return every rank's `value` on all ranks; a blocking collective. Without a process group: `[value]`."""
    import torch.distributed as dist

    if world_size == 1 or not joined():
        return [value]
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def broadcast_object(value: Any, ranks: Ranks) -> Any:
    """Return the first rank's `value` on all ranks; a blocking collective, never used in a training step."""
    if not ranks.distributed:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first_rank(compute: Callable[[], T], ranks: Ranks) -> T:
    """Call `compute` on the first rank, and return its result on all ranks; a blocking collective."""
    return broadcast_object(compute() if ranks.is_first else None, ranks)


def once_per_machine(compute: Callable[[], T]) -> T:
    """Call `compute` on one rank per machine; all ranks there return or raise the same. A collective."""
    if not joined():
        return compute()
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own: Any = _attempt(compute) if local_rank == 0 else (None, None)
    found, error = on_all_ranks(own, dist.get_world_size())[dist.get_rank() - local_rank]
    if error is not None:
        raise error
    return found


def once_per_rank(compute: Callable[[], T], ranks: Ranks) -> list[T]:
    """Call `compute` on every rank; return all results, or raise the first error, on all. A collective."""
    answers = on_all_ranks(_attempt(compute), ranks.world_size)
    for _, error in answers:
        if error is not None:
            raise error
    return [found for found, _ in answers]


def _attempt(compute: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error


def broadcast_text(word: str | None, ranks: Ranks, name: str = "word") -> str:
    """Return the first rank's `word` on all ranks, through their store; P001 if they cannot connect.

    It needs no process group. Each word needs its own `name`.
    """
    if word is not None and not ranks.distributed:
        return word
    place = _place(name)
    heard = [f"{place}/heard/{rank}" for rank in range(ranks.world_size)]
    with _meeting() as store:
        if not ranks.is_first:
            heard_word: str = store.get(place).decode()
            store.set(heard[ranks.rank], "")
            return heard_word
        assert word is not None
        store.set(place, word)
        if os.environ.get(AGENT_SERVES) != "True":
            # This process serves the store: wait until all ranks have read the word.
            store.wait(heard[1:], timedelta(seconds=MEET_S))
        return word


def gather_texts(word: str, ranks: Ranks, name: str) -> list[str]:
    """Return every rank's `word` on all ranks, through their store."""
    if not ranks.distributed:
        return [word]
    place = _place(name)
    with _meeting() as store:
        store.set(f"{place}/{ranks.rank}", word)
        return [store.get(f"{place}/{rank}").decode() for rank in range(ranks.world_size)]


def count_neighbors(ranks: Ranks) -> Ranks:
    """Return `ranks` with the count of ranks on this machine, gathered if no launcher has set it."""
    if "LOCAL_WORLD_SIZE" in os.environ or not ranks.distributed:
        return ranks
    neighbors = gather_texts(mine := socket.gethostname(), ranks, "host").count(mine)
    # Read by all code that divides the machine among ranks.
    os.environ["LOCAL_WORLD_SIZE"] = str(neighbors)
    return replace(ranks, local_world_size=neighbors)


@contextlib.contextmanager
def _meeting(timeout_s: float = MEET_S) -> Iterator[Any]:
    """Yield the ranks' store, which the first rank or torchrun serves; P001 if it cannot be reached."""
    from torch.distributed.rendezvous import rendezvous

    try:
        if not _stores:
            _stores.append(next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0])
        yield _stores[0]
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = f"the ranks cannot reach each other there ({str(error).splitlines()[0]})"
        hint = "MASTER_ADDR and MASTER_PORT name the machine of rank 0, and a free port of it"
        raise ParallelError("P001", what, key=address, suggestion=hint) from error


def _place(name: str) -> str:
    """Return the store key of `name`; it changes with each restart if the store outlives its ranks."""
    # A store that the first rank serves is new after a restart, and the ranks' counts may differ.
    agent_serves = os.environ.get(AGENT_SERVES) == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_serves else "0"
    return f"ptfast/{restarts}/{name}"


def all_come_to(place: str, ranks: Ranks, timeout_s: float) -> bool:
    """Return True if all ranks call this with the same `place` within `timeout_s`.

    It uses the store, because the process group may be stuck in a collective that a rank never joined.
    """
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    keys = [f"ptfast/{place}/{rank}" for rank in range(ranks.world_size)]
    store.set(keys[ranks.rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True


def broadcast_buffers(buffers: list[Tensor], ranks: Ranks) -> None:
    """Broadcast the first rank's buffers (BatchNorm statistics), so that all evaluate the same model."""
    if ranks.distributed:
        import torch.distributed as dist

        for buffer in buffers:
            dist.broadcast(buffer, src=0)


def barrier(ranks: Ranks) -> None:
    if ranks.distributed:
        import torch.distributed as dist

        dist.barrier()


def is_connection_lost(error: BaseException) -> bool:
    """Return True if `error` means that the connection to another rank was lost."""
    import torch.distributed as dist

    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in text_of(error))
