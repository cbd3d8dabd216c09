"""Who this rank is, the process group, and the few reductions a run needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
THREADS_VARIABLE = "PTFAST_THREADS"
"""What the user's OMP_NUM_THREADS was before ptfast launched its ranks; torchrun sets it to 1 itself."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes of a run."""

    rank: int = 0
    local_rank: int = 0
    num_ranks: int = 1
    num_local_ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_ranks > 1


def under_torchrun() -> bool:
    """Whether torchrun (the user's, or the one ptfast launched) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def read_ranks() -> Ranks:
    """This process's ranks, from the variables that torchrun sets; a single process without them."""
    if not under_torchrun():
        return Ranks()
    get = os.environ
    return Ranks(
        int(get["RANK"]),
        int(get["LOCAL_RANK"]),
        int(get["WORLD_SIZE"]),
        int(get.get("LOCAL_WORLD_SIZE", "1")),
    )


def init_process_group(device: torch.device, timeout_s: float) -> None:
    """Join the ranks of this run: NCCL between GPUs, gloo between CPU processes."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=device)
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def destroy_process_group() -> None:
    """Leave the process group, if one was joined."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """`tensor` summed over all ranks, in place; on one rank, itself."""
    if ranks.distributed:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def host_sums(num_ranks: int) -> Callable[[Sequence[int]], Callable[[], list[int]]]:
    """What begins to sum numbers over the ranks, and gives what waits for the sums; no device is involved.

    To be called on all ranks at once: they open a channel of their own for it.
    """
    if num_ranks == 1:
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


def joined() -> bool:
    """Whether this process is in a process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def on_all_ranks(value: T, num_ranks: int) -> list[T]:
    """The `value` of each rank, on every rank. Waits for all; without a process group, this one's alone."""
    import torch.distributed as dist

    if num_ranks == 1 or not joined():
        return [value]
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, value)
    return found


def broadcast_object(value: Any, ranks: Ranks) -> Any:
    """The first rank's `value`, on every rank. Waits for all; never in a training step."""
    if not ranks.distributed:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first_rank(compute: Callable[[], T], ranks: Ranks) -> T:
    """What `compute` gives on the first rank, on every rank. Waits for all."""
    return broadcast_object(compute() if ranks.is_first else None, ranks)


def tell_ranks(word: str | None, ranks: Ranks, timeout_s: float = 600.0) -> str:
    """The first rank's `word`, on every rank, over torchrun's own store: needs no process group yet."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    # A restarted group must not hear what was said to the one before it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"ptfast/{attempt}", store)
    if ranks.is_first:
        assert word is not None
        store.set("word", word)
        return word
    return store.get("word").decode()


def all_come_to(place: str, ranks: Ranks, timeout_s: float) -> bool:
    """Return True if all ranks call this with the same `place` within `timeout_s`.

    By way of their store: the process group may be busy with what a missing rank has left undone.
    """
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    keys = [f"ptfast/{place}/{rank}" for rank in range(ranks.num_ranks)]
    store.set(keys[ranks.rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True


def broadcast_buffers(buffers: list[Tensor], ranks: Ranks) -> None:
    """Give every rank the first rank's buffers (BatchNorm statistics), so that all evaluate one model."""
    if ranks.distributed:
        import torch.distributed as dist

        for buffer in buffers:
            dist.broadcast(buffer, src=0)


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here."""
    if ranks.distributed:
        import torch.distributed as dist

        dist.barrier()


def is_connection_lost(error: BaseException) -> bool:
    """Return True if `error` says that another rank has left."""
    import torch.distributed as dist

    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))
