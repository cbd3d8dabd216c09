"""Iterable data of unknown length: read pass after pass, by one data worker or split over several."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

from torch.utils.data import IterableDataset

from ptfast.core.errors import DataError
from ptfast.core.tensors.torch_internals import data_worker
from ptfast.data.loaders.dataset_source import Collate, collate_of
from ptfast.data.loaders.worker_processes import as_data_errors
from ptfast.data.map_source import BaseSource
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.counter_draws import DatasetState, OwnGenerators, seed_all, seeded
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.row_windows import augmented

Sharing = Literal["none", "workers", "ranks"]


@dataclass(frozen=True)
class DataWorker:
    """One of the data workers of all ranks that read a dataset together."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def index(self) -> int:
        """Index among the `count` data workers of all ranks."""
        return self.rank * self.num_workers + self.worker

    @property
    def count(self) -> int:
        return self.world_size * self.num_workers


class IterableSource(BaseSource):
    """A torch `IterableDataset`, read sequentially and restarted when it ends.

    The dataset decides which process reads which samples:

    - A dataset that calls `torch.utils.data.get_worker_info()` splits itself: it sees the data workers of all
      ranks as its workers, so that no two read the same samples.
    - A dataset with an attribute `shared_by = "ranks"` already splits itself over ranks, and
      `get_worker_info()` describes only the workers of its rank.
    - Any other yields everything in every process, which keeps its part. `shared_by = "none"` marks such a
      dataset that calls `get_worker_info()` nevertheless.

    The global generators (torch, numpy, random) are seeded by pass and data worker; the dataset's own
    generators by the pass alone, so that all data workers draw the same order. A method `set_epoch` receives
    the number of the pass. State that the dataset carries from one pass to the next is not restored when a
    run resumes.
    """

    ignores_labels = True
    shares_batches = False
    """Samples are cheap until they are batched: processes that all read the stream split the batching."""

    def __init__(self, dataset: IterableDataset[Any], seed: int, collate: Collate | None = None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate_of(dataset, collate)
        self.class_name = type(dataset).__name__
        self.is_guessed = not hasattr(dataset, "shared_by")
        """True if the dataset has no `shared_by`, so that it is inferred."""
        self.shuffle_buffer: int | None = None
        """Size of the buffer from which the next sample is drawn; None keeps the order."""
        stated = (getattr(dataset, name, None) for name in ("num_shards", "n_shards"))
        self.num_shards = next((number for number in stated if isinstance(number, int)), None)
        """Maximum number of data workers that the dataset can be split over; None if not stated."""

    @property
    def shared_by(self) -> Sharing:
        """The level at which the dataset splits itself: `workers`, `ranks`, or `none`.

        Raises:
            DataError: D008 if it states something else.
        """
        stated = getattr(self.dataset, "shared_by", None)
        if stated is None:
            return "workers" if self.first[1] else "none"
        stated = "workers" if stated == "readers" else stated  # its former name
        if stated not in ("none", "workers", "ranks"):
            what = f"{self.class_name}.shared_by is {stated!r}"
            raise DataError("D008", what, key="data", suggestion='It is "none", "workers" or "ranks"')
        return cast(Sharing, stated)

    def workers_at_most(self, wanted: int, world_size: int) -> int:
        """Return the data workers per rank: `wanted`, or as many as the dataset can be split over."""
        if self.shared_by == "none" or self.num_shards is None:
            return wanted
        return min(wanted, self.num_shards // world_size)

    def read(self, epoch: int, worker: DataWorker = DataWorker()) -> Iterator[Any]:
        """Yield a pass of `worker`'s samples; advance it inside `OwnGenerators.in_place` and `as_worker`."""
        several = (worker.index,) if worker.count > 1 else ()
        seed_all(counter_draws.key(self.seed, epoch, counter_draws.GLOBAL, *several))
        with as_data_errors(self.dataset):
            state = DatasetState(self.dataset)
            if state.begin(epoch):
                state.seed(self.seed, epoch)
            samples: Iterator[Any] = iter(self.dataset)
            if self.shuffle_buffer is not None:
                seed = counter_draws.key(self.seed, epoch, counter_draws.ORDER, *several)
                samples = shuffled(samples, self.shuffle_buffer, seed)
            yield from samples

    def batch(self, samples: list[Any], micro_batch: MicroBatchIndices, augment: Augment) -> Any:
        """Return the raw batch of `samples`, augmented; `micro_batch` has their indices."""
        collate, numbers = self.collate, micro_batch.indices.tolist()
        seed = counter_draws.key(self.seed, micro_batch.epoch, counter_draws.GLOBAL, *numbers[:1])
        with seeded(seed) if collate.is_own else contextlib.nullcontext():
            raw = collate(collate.pairs(samples, numbers))
        raw = self.label_check(raw, numbers)
        if self.images:
            raw = (raw[0].permute(0, 2, 3, 1).contiguous(), *raw[1:])
        return augmented(augment, raw, micro_batch) if augment else raw

    def as_worker(self, worker: DataWorker) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `get_worker_info()` describes `worker` to the dataset."""
        shared_by = self.shared_by
        if shared_by == "none":
            return contextlib.nullcontext()
        index, count = worker.index, worker.count
        if shared_by == "ranks":
            index, count = worker.worker, worker.num_workers
        seed = counter_draws.key(self.seed, counter_draws.GLOBAL, index)
        info = data_worker.WorkerInfo(id=index, num_workers=count, seed=seed, dataset=self.dataset)
        return _answering(info)

    @cached_property
    def first(self) -> tuple[Any, bool]:
        """The first sample, and whether the dataset asked for its worker info.

        Raises:
            DataError: D002 if there is no sample, D008 for an error of the dataset.
        """
        info = _Noticing(self.dataset)
        with OwnGenerators().in_place(), _answering(info):
            sample = next(self.read(0), None)
        if sample is None:
            raise DataError("D002", "the iterable dataset yields no samples", key="data")
        return sample, info.asked


def shuffled(samples: Iterator[Any], size: int, seed: int) -> Iterator[Any]:
    """Yield the samples in random order, each drawn from a buffer of `size`.

    Samples more than a few `size` apart stay apart, so data sorted by class needs its shards shuffled, too.
    """
    draw, buffer = random.Random(seed).random, []
    for sample in samples:
        buffer.append(sample)
        if len(buffer) >= size:
            place = int(draw() * size)
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            yield buffer.pop()
    while buffer:
        place = int(draw() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


@dataclass
class _Noticing:
    """A worker info that records whether its `id` or `num_workers` is read."""

    dataset: Any
    seed: int = 0
    asked: bool = False

    @property
    def id(self) -> int:
        self.asked = True
        return 0

    @property
    def num_workers(self) -> int:
        self.asked = True
        return 1


@contextlib.contextmanager
def _answering(info: Any) -> Iterator[None]:
    """Make `get_worker_info()` return `info` inside this context."""
    before = data_worker._worker_info
    data_worker._worker_info = info
    try:
        yield
    finally:
        data_worker._worker_info = before
