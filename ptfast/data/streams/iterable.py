"""Iterable data of unknown length: read pass after pass, by one reader or shared out over several."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

from torch.utils.data import IterableDataset

from ptfast.core.errors import ConfigError, DataError
from ptfast.core.tensors.torch_internals import data_worker
from ptfast.data.loaders.collate import Collate, collate_of
from ptfast.data.loaders.worker_processes import as_data_errors
from ptfast.data.map_source import BaseSource
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.counter_draws import OwnGenerators, seed_all

Sharing = Literal["none", "readers", "ranks"]


@dataclass(frozen=True)
class Reader:
    """One of the processes that read a data set together: a worker of a rank."""

    rank: int = 0
    num_ranks: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def index(self) -> int:
        return self.rank * self.num_workers + self.worker

    @property
    def count(self) -> int:
        """Readers of all ranks."""
        return self.num_ranks * self.num_workers


class IterableSource(BaseSource):
    """A torch `IterableDataset`: samples one after another, again from the start when it ends.

    Who reads what is up to the data set:

    - One that asks `torch.utils.data.get_worker_info()` shares itself out. Every process that reads, of every
      rank, is to it a worker of its own, so that no two read the same.
    - One that has an attribute `shared_by = "ranks"` parts itself over the ranks already, and
      `get_worker_info()` names the workers of its rank only.
    - Any other yields all it has wherever it is read; each process keeps its part. `shared_by = "none"` says
      that a data set is of this kind although it asks.

    What it draws from the global generators (torch, numpy, random) is seeded by the pass and the reader; one
    with a method `set_epoch` receives the number of the pass. What it remembers itself from one pass to the
    next is nothing that a resumed run could bring back.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int, collate: Collate | None = None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate_of(dataset, collate)
        self.shuffle_buffer: int | None = None
        """Samples among which the next is drawn; None leaves them in their order."""

    def ignores_labels(self) -> bool:
        # Nobody has seen the labels yet.
        return True

    def first(self) -> Any:
        return self._first[0]

    @property
    def shared_by(self) -> Sharing:
        """`readers` or `ranks` where the data set shares itself out over them, `none` where it does not."""
        stated = getattr(self.dataset, "shared_by", None)
        if stated is None:
            return "readers" if self._first[1] else "none"
        if stated not in ("none", "readers", "ranks"):
            what = f"{type(self.dataset).__name__}.shared_by is {stated!r}"
            raise DataError("D008", what, key="data", suggestion='It is "none", "readers" or "ranks"')
        return cast(Sharing, stated)

    @property
    def is_guessed(self) -> bool:
        """True if the data set does not say itself who shares it out."""
        return not hasattr(self.dataset, "shared_by")

    @property
    def class_name(self) -> str:
        """Of the data set, for messages."""
        return type(self.dataset).__name__

    @property
    def num_shards(self) -> int | None:
        """The most readers that the data set can be shared out over, if it says so."""
        for name in ("num_shards", "n_shards"):
            if isinstance(number := getattr(self.dataset, name, None), int):
                return number
        return None

    def readers_at_most(self, wanted: int, num_ranks: int) -> int:
        """Of `wanted` readers of each rank, as many as the data set can be shared out over."""
        if self.shared_by == "none" or self.num_shards is None:
            return wanted
        return min(wanted, self.num_shards // num_ranks)

    def read(self, epoch: int, reader: Reader = Reader()) -> Iterator[Any]:
        """One pass over what belongs to `reader`.

        Seeds the global generators, and asks who is reading: to be advanced inside `OwnGenerators.in_place`
        and `as_reader`.
        """
        several = (reader.index,) if reader.count > 1 else ()
        seed_all(counter_draws.key(self.seed, epoch, counter_draws.GLOBAL, *several))
        samples = self._samples(epoch)
        if self.shuffle_buffer is not None:
            samples = shuffled(
                samples,
                self.shuffle_buffer,
                counter_draws.key(self.seed, epoch, counter_draws.ORDER, *several),
            )
        yield from samples

    def as_reader(self, reader: Reader) -> contextlib.AbstractContextManager[None]:
        """A context in which `get_worker_info()` describes `reader` to the data set."""
        shared_by = self.shared_by
        if shared_by == "none":
            return contextlib.nullcontext()
        index, count = reader.index, reader.count
        if shared_by == "ranks":
            index, count = reader.worker, reader.num_workers
        seed = counter_draws.key(self.seed, counter_draws.GLOBAL, index)
        info = data_worker.WorkerInfo(id=index, num_workers=count, seed=seed, dataset=self.dataset)
        return _answering(info)

    @cached_property
    def _first(self) -> tuple[Any, bool]:
        """The first sample, and whether the data set asked who reads it."""
        info = _Noticing(self.dataset)
        with OwnGenerators().in_place(), _answering(info):
            sample = next(self.read(0), None)
        if sample is None:
            raise DataError("D002", "the iterable data set yields no samples", key="data")
        return sample, info.asked

    def _samples(self, epoch: int) -> Iterator[Any]:
        with as_data_errors(self.dataset):
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            yield from self.dataset


def check_kind(kind: str) -> None:
    """Raise ConfigError C011 for a kind of loader that iterable data cannot have."""
    if kind not in ("auto", "plain", "workers"):
        what, hint = "iterable data is read in order and cannot be held in memory", "Use dataloader=auto"
        raise ConfigError("C011", what, key="dataloader.kind", value=kind, suggestion=hint)


def shuffled(samples: Iterator[Any], size: int, seed: int) -> Iterator[Any]:
    """The same samples, each drawn at random out of `size` that are held back.

    A stream cannot be shuffled as a whole. What lies more than a few `size` apart stays apart, so data sorted
    by class needs its shards shuffled, too.

    Cost: the memory of `size` samples in every process that reads.
    """
    draw, held = random.Random(seed).random, []
    for sample in samples:
        held.append(sample)
        if len(held) >= size:
            place = int(draw() * size)
            held[place], held[-1] = held[-1], held[place]
            yield held.pop()
    while held:
        place = int(draw() * len(held))
        held[place], held[-1] = held[-1], held[place]
        yield held.pop()


class _Noticing:
    """A worker info that notices when anybody wants to know which worker is asked, and of how many."""

    seed = 0

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.asked = dataset, False

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
    """Have `get_worker_info()` answer with `info`."""
    before = data_worker._worker_info
    data_worker._worker_info = info
    try:
        yield
    finally:
        data_worker._worker_info = before
