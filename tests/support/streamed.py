"""Streams for tests: numbers out of shards, in all the ways that datasets share them out."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.distributed import host_sums
from ptfast.core.durations import Duration
from ptfast.core.protocols import StepBatch
from ptfast.data.build_data import build_data
from ptfast.data.loaders.pipeline import LoaderOptions, Prepare
from ptfast.data.sampling.sampler import Sharding
from ptfast.data.streams import stream_loaders
from ptfast.data.streams.iterable import IterableSource

SIZES = (7, 2, 11, 1, 5, 3, 4)
"""Samples in each shard of the datasets below."""
NUMBERS = [float(number) for number in range(sum(SIZES))]


class Plain(IterableDataset[Any]):
    """Numbers, in order, whoever asks."""

    num_classes = 2

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(number)]), int(number) % 2) for number in NUMBERS)


class Sharded(IterableDataset[Any]):
    """The same out of shards, which it shares out over the workers it hears of."""

    num_classes = 2

    def __init__(self, num_shards: int | None = None) -> None:
        if num_shards is not None:
            self.num_shards = num_shards

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = slice(0, None) if info is None else slice(info.id, None, info.num_workers)
        ends = itertools.accumulate(SIZES)
        for start, end in [(end - size, end) for end, size in zip(ends, SIZES, strict=True)][mine]:
            for number in range(start, end):
                yield torch.tensor([float(number)]), number % 2


class WithHeldOut(Sharded):
    """With a held-out split of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.val, self.test = Sharded(), TensorDataset(torch.tensor([[0.5], [2.5]]), torch.tensor([0, 1]))


class OfRank(Plain):
    """Another one on each rank, which it does not tell."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), torch.distributed.get_rank(), None)


class LateOfRank(Plain):
    """Another one on each rank, from the fourth sample on."""

    def __iter__(self) -> Iterator[Any]:
        numbers = islice(super().__iter__(), 3), islice(super().__iter__(), 3 + self.rank(), None, 2)
        return itertools.chain(*numbers)

    def rank(self) -> int:
        return torch.distributed.get_rank()


class SaysSo(LateOfRank):
    """The same, of which each worker of a rank has a part, and says so."""

    shared_by = "ranks"

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        return islice(super().__iter__(), info.id, None, info.num_workers)


class Asks(Plain):
    """Asks who reads, and yields all that it has to anybody."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        self.seen_by = info.id if info is not None else 0
        return super().__iter__()


class Noisy(Sharded):
    """With noise from the global generator, and shards in an order of the pass's own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for value, label in super().__iter__():
            yield value + 100 * self.epoch + torch.rand(1) / 2, label


def load(dataset: Any, **options: Any) -> Any:
    return build_data(dataset, val=Duration(10, "percent"), seed=0, task="auto", **options)


def build(dataset: Any, sums: Any = None, **options: Any) -> Any:
    """The batches of steps of six samples; `sums` in place of a process group."""
    source = IterableSource(dataset, 0) if isinstance(dataset, IterableDataset) else dataset
    info, how = load(Plain()).info, ("kind", "workers")
    given = {"micro_batches": 2, "drop_last": False, **options}
    loading = LoaderOptions(
        torch.device("cpu"), normalize=False, **{name: given.pop(name) for name in how if name in given}
    )
    sharding = Sharding(BatchPlan(None, 6, given.pop("drop_last")), **given)
    prepare = Prepare(loading, info, images=source.images)
    with mock.patch.object(stream_loaders, "host_sums", lambda world_size: sums or host_sums(world_size)):
        return stream_loaders.build_stream_batches(source, prepare, sharding, loading)


def values(batch: StepBatch) -> list[float]:
    """The samples of a batch that count."""
    return [float(value) for data, number in batch.micro_batches for value in data[0].flatten()[:number]]


def some(loader: Any, num_steps: int, first: int = 0) -> list[list[float]]:
    # Closed by the garbage collector, workers would not be told to stop, but killed after two seconds each.
    with contextlib.closing(loader):
        return [values(batch) for batch in loader.steps(first, first + num_steps)]


class Together:
    """Sums over ranks that are threads of this process, one of which runs at a time."""

    def __init__(self, world_size: int) -> None:
        self.barrier, self.running = threading.Barrier(world_size, timeout=20), threading.Lock()
        self.world_size, self.asked = world_size, list[list[list[int]]]()

    def of_rank(self) -> Callable[[Sequence[int]], Callable[[], list[int]]]:
        counter = itertools.count()

        def begin(numbers: Sequence[int]) -> Callable[[], list[int]]:
            turn = next(counter)
            if turn == len(self.asked):
                self.asked.append([])
            self.asked[turn].append(list(numbers))

            def finish() -> list[int]:
                self.running.release()
                self.barrier.wait()
                self.running.acquire()
                assert len(self.asked[turn]) == self.world_size
                return [sum(column) for column in zip(*self.asked[turn], strict=True)]

            return finish

        return begin


def over_ranks(num_steps: int, dataset: Any = Sharded, **options: Any) -> list[list[StepBatch]]:
    """The batches of two ranks that read together."""
    together = Together(2)
    found: dict[int, list[StepBatch]] = {}
    built = [build(dataset(), together.of_rank(), rank=r, world_size=2, **options) for r in range(2)]

    def run(rank: int) -> None:
        with together.running:
            batches = built[rank].steps(0, num_steps)
            found[rank] = list(islice(batches, num_steps))
            batches.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for loader in built:
        loader.close()
    return [found[0], found[1]]
