"""Reading iterable data in one process, and the check that all ranks agree on who reads what."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ptfast.core.errors import DataError
from ptfast.data.sampling.counter_draws import OwnGenerators
from ptfast.data.sampling.sampler import MicroBatchIndices, Sharding
from ptfast.data.streams.iterable import IterableSource, Reader
from ptfast.data.transforms.augment_plan import Augment


class Mark(NamedTuple):
    """The start of a pass."""

    epoch: int = 0
    first: int = 0
    """The number of its first sample in the stream, or of its first step where readers have parts."""


class Item(NamedTuple):
    """One micro-batch as it was read, or an end."""

    raw: Any
    """None at the end: of a pass over a part, or of the whole stream."""
    num_samples: int
    mark: Mark = Mark()
    digest: int = 0
    """`digest` of the first step, or of the worker's first micro-batch; 0 where none is compared."""


END = Item(None, 0)


@dataclass
class StreamReader:
    """The micro-batches of one reader. Calling it gives the next one, so that it can run in a worker."""

    source: IterableSource
    reader: Reader
    augment: Augment
    sharding: Sharding
    in_parts: bool
    """The dataset gives each reader a part of its own."""
    once: bool
    """End with the first pass, whose last batch may be short; else batches continue into the next pass."""

    def __post_init__(self) -> None:
        self._items: Iterator[Item] | None = None
        self._generators = OwnGenerators()
        self._mark = Mark()
        self.size = self.sharding.plan.batch_size // self.sharding.micro_batches
        """Samples of a full micro-batch."""

    def __call__(self, start: tuple[int, Mark]) -> Item:
        if self._items is None:
            self._items = self.items(*start)
        return next(self._items)

    def items(self, first_step: int, mark: Mark) -> Iterator[Item]:
        """Micro-batches from `first_step` on, which lies in the pass of `mark` or after it; never ends."""
        return self._part_items(mark) if self.in_parts else self._whole_items(first_step, mark)

    def _whole_items(self, first_step: int, mark: Mark) -> Iterator[Item]:
        """This reader's share of a whole stream; samples of micro-batches do not depend on who reads them."""
        reader, plan, per_rank = self.reader, self.sharding.plan, self.sharding.per_rank
        self._mark = mark
        samples = self._passes()
        with self._generators.in_place(), self.source.as_reader(reader):
            skipped = plan.batch(first_step)[1] - mark.first
            next(islice(samples, skipped, skipped), None)
        for step in count(first_step):
            _, first, end = plan.batch(step)
            now = self._mark
            batch = self._take(samples, end - first)
            checksum = digest(batch) if reader.world_size > 1 and step == first_step else 0
            if not batch or (len(batch) < end - first and not self.once):
                break
            micro_batches = self.sharding.cut(0, np.arange(len(batch)))
            for number, micro_batch in enumerate(micro_batches, step * per_rank):
                if number % reader.num_workers == reader.worker:
                    taken = [batch[place] for place in micro_batch.indices]
                    # Numbers continue over the passes.
                    numbers = MicroBatchIndices(0, first + micro_batch.indices, len(taken))
                    raw = self.source.batch(taken, numbers, self.augment)
                    yield Item(raw, micro_batch.num_samples, now, checksum)
        while True:
            yield END

    def _passes(self) -> Iterator[Any]:
        while True:
            num_samples = 0
            for sample in self.source.read(self._mark.epoch):
                num_samples += 1
                yield sample
            if num_samples == 0 and self._mark.epoch == 0:
                raise DataError("D002", "the iterable dataset yields no samples", key="data")
            if num_samples == 0 or self.once:
                return
            self._mark = Mark(self._mark.epoch + 1, self._mark.first + num_samples)

    def _part_items(self, mark: Mark) -> Iterator[Item]:
        """This reader's own part, pass after pass, with an end after each; the last of a pass is short."""
        reader = self.reader
        for epoch in count(mark.epoch):
            samples, number = self.source.read(epoch, reader), reader.index
            while batch := self._take(samples, self.size):
                is_first = epoch == mark.epoch and number == reader.index
                numbers = number + reader.count * np.arange(len(batch))
                number += len(batch) * reader.count
                checksum = digest(batch) if is_first else 0
                raw = self.source.batch(batch, MicroBatchIndices(epoch, numbers, len(batch)), self.augment)
                yield Item(raw, len(batch), digest=checksum)
            yield END

    def _take(self, samples: Iterator[Any], number: int) -> list[Any]:
        with self._generators.in_place(), self.source.as_reader(self.reader):
            return list(islice(samples, number))


def digest(samples: Iterable[Any]) -> int:
    """A checksum of samples, 1 ms for 1.5 MB; 0 if all are equal, which identifies nothing."""
    sums = [sum_of(sample) for sample in samples]
    return sum_of(sums) or 1 if len(set(sums)) > 1 else 0


def check_same(digests: Sequence[int], name: str) -> None:
    """Check that a dataset which all ranks read as one stream is the same on each: samples would be lost.

    Raises:
        DataError: D008 if it differs.
    """
    if len(set(digests)) <= 1:
        return
    what = f"{name} yields different samples on each rank, and does not say why"
    hint = 'Give it shared_by = "ranks" if it splits itself over ranks, else "readers" or "none"'
    raise DataError("D008", what, key="data", suggestion=hint)


def check_parted(digests: Sequence[int], name: str) -> None:
    """Check that a dataset which shares itself out over readers gives each something else.

    Raises:
        DataError: D008 if all have read the same.
    """
    if len(digests) <= 1 or len(set(digests)) > 1 or not digests[0]:
        return
    what = (
        f"{name} yields the same to each of {len(digests)} readers: every sample would come that many times"
    )
    hint = 'Give it shared_by = "none", or have each reader take its share by get_worker_info()'
    raise DataError("D008", what, key="data", suggestion=hint)


def sum_of(value: Any) -> int:
    """A checksum of arrays, text, numbers, and containers of these."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).data) if not value.dtype.hasobject else 0
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        found = 0
        for item in value:
            found = zlib.crc32(sum_of(item).to_bytes(4, "little"), found)
        return found
    return zlib.crc32(repr(value).encode()) if isinstance(value, (bytes, str, int, float, complex)) else 0
