"""Loaders of iterable data, in this process or by workers, exact across ranks without a known length."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ptfast.core.distributed import host_sums, on_all_ranks
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.data.loaders.loader_choice import count_workers
from ptfast.data.loaders.pipeline import Batches, LoaderOptions, Prepare
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.sampling.counter_draws import OwnGenerators
from ptfast.data.sampling.sampler import MicroBatchIndices, Sharding
from ptfast.data.streams.iterable import DataWorker, IterableSource
from ptfast.data.transforms.augment_plan import Augment


class Mark(NamedTuple):
    """The start of a pass."""

    epoch: int = 0
    first: int = 0
    """Index of its first sample in the stream, or of its first step if data workers have their own parts."""


class Item(NamedTuple):
    """One micro-batch as read, or an end mark."""

    raw: Any
    """None marks the end of a pass over a part, or of the whole stream."""
    num_samples: int
    mark: Mark = Mark()
    digest: int = 0
    """`digest` of the first step, or of the worker's first samples; 0 if it identifies nothing."""


END = Item(None, 0)
COMPARED = 16
"""Minimum number of samples to compare between workers: a single one may recur by chance."""


@dataclass
class StreamWorker:
    """The micro-batches of one data worker. A call returns the next one, so that it can run in a process."""

    source: IterableSource
    worker: DataWorker
    augment: Augment
    sharding: Sharding
    in_parts: bool
    """Whether the dataset gives each data worker its own part."""
    once: bool
    """Stop after the first pass, whose last batch may be short; else batches continue into the next pass."""

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
        """Yield micro-batches from `first_step` on, which is in the pass of `mark` or later; never ends."""
        return self._part_items(mark) if self.in_parts else self._whole_items(first_step, mark)

    def _whole_items(self, first_step: int, mark: Mark) -> Iterator[Item]:
        """Yield this worker's micro-batches of a whole stream; their samples do not depend on the worker."""
        worker, plan, per_rank = self.worker, self.sharding.plan, self.sharding.per_rank
        self._mark = mark
        samples = self._passes()
        with self._generators.in_place(), self.source.as_worker(worker):
            skipped = plan.batch(first_step)[1] - mark.first
            next(islice(samples, skipped, skipped), None)
        for step in count(first_step):
            _, first, end = plan.batch(step)
            now = self._mark
            batch = self._take(samples, end - first)
            checksum = digest(batch) if worker.world_size > 1 and step == first_step else 0
            if not batch or (len(batch) < end - first and not self.once):
                break
            micro_batches = self.sharding.micro_batches_of(0, np.arange(len(batch)))
            for number, micro_batch in enumerate(micro_batches, step * per_rank):
                if number % worker.num_workers == worker.worker:
                    taken = [batch[place] for place in micro_batch.indices]
                    # Sample numbers continue across passes.
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
        """Yield this worker's part pass after pass, an end mark after each; its last batch may be short."""
        worker = self.worker
        for epoch in count(mark.epoch):
            samples, number, checksum = self.source.read(epoch, worker), worker.index, 0
            if epoch == mark.epoch:
                first = self._take(samples, max(self.size, COMPARED))
                samples, checksum = chain(first, samples), digest(first)
            while batch := self._take(samples, self.size):
                numbers = number + worker.count * np.arange(len(batch))
                number += len(batch) * worker.count
                raw = self.source.batch(batch, MicroBatchIndices(epoch, numbers, len(batch)), self.augment)
                yield Item(raw, len(batch), digest=checksum)
            yield END

    def _take(self, samples: Iterator[Any], number: int) -> list[Any]:
        with self._generators.in_place(), self.source.as_worker(self.worker):
            return list(islice(samples, number))


def digest(samples: Iterable[Any]) -> int:
    """Return a checksum of samples, 1 ms for 1.5 MB; 0 if all are equal, which identifies nothing."""
    sums = [sum_of(sample) for sample in samples]
    return sum_of(sums) or 1 if len(set(sums)) > 1 else 0


def check_same(digests: Sequence[int], name: str) -> None:
    """Raise DataError D008 if a stream that all ranks read differs between ranks: samples would be lost."""
    if len(set(digests)) <= 1:
        return
    what = f"{name} yields different samples on each rank, and does not say why"
    hint = 'Give it shared_by = "ranks" if it splits itself over ranks, else "workers" or "none"'
    raise DataError("D008", what, key="data", suggestion=hint)


def check_parted(digests: Sequence[int], name: str) -> None:
    """Raise DataError D008 if a dataset that splits itself gives all data workers the same samples."""
    if len(digests) <= 1 or len(set(digests)) > 1 or not digests[0]:
        return
    what = (
        f"{name} yields the same to each of {len(digests)} workers: every sample would come that many times"
    )
    hint = 'Give it shared_by = "none", or have each data worker take its share by get_worker_info()'
    raise DataError("D008", what, key="data", suggestion=hint)


def sum_of(value: Any) -> int:
    """Return a checksum of arrays, text, numbers, and containers of these."""
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


def share_out(source: IterableSource, sharding: Sharding, loading: LoaderOptions) -> tuple[int, bool, str]:
    """Return this rank's workers (0 for this process), whether each has its own part, and why."""
    world_size = sharding.world_size
    workers = count_workers(loading.workers) if loading.kind == "workers" else 0
    total = max(1, workers) * world_size
    shared, shards = source.shared_by != "none", source.num_shards
    if shared and shards is not None and total > shards:
        what = f"{total} data workers, and the dataset has {shards} shards to give them"
        fits = shards // world_size
        hint = f"Use dataloader.workers={fits}" if fits else f"Use {shards} ranks or fewer"
        raise ConfigError("C011", what, key="dataloader.workers", value=max(1, workers), suggestion=hint)
    who = loading.describe(workers) if workers else "in this process"
    if total == 1:
        how = "read in order"
    elif shared:
        how = f"the dataset shares itself out over {total} data workers"
    elif source.shares_batches:
        how = f"{total} data workers share the batches of one order"
    else:
        how = "each data worker goes through the whole stream: the dataset does not ask get_worker_info()"
    return workers, shared and total > 1, f"{who}, {how}"


def build_stream_batches(
    source: IterableSource,
    prepare: Prepare,
    sharding: Sharding,
    loading: LoaderOptions,
    augment: Augment | None = None,
    *,
    once: bool = False,
) -> WholeBatches | PartBatches:
    """Build the batches of iterable data on one rank.

    If data workers have their own parts, `drop_last` applies at the end of each pass.
    """
    augment = augment or Augment()
    if augment.resized_crop is not None and not source.shares_batches:
        what = "images of a stream are resized before they can be cropped"
        hint = "Crop them in the dataset, or use augment=crop_flip"
        raise ConfigError("C011", what, key="augment.resized_crop", suggestion=hint)
    if source.is_guessed and sharding.world_size > 1:
        # A dataset without `shared_by` may start with a different sample on each rank.
        begins = sum_of([source.first[0], source.shared_by])
        check_same(on_all_ranks(begins, sharding.world_size), source.class_name)
    workers, in_parts, reason = share_out(source, sharding, loading)
    if in_parts and sharding.plan.drop_last == "pad":
        what = "a dataset that splits itself over data workers has unequal parts, which cannot be padded"
        hint = "Use dataloader.drop_last=false or true"
        raise ConfigError("C011", what, key="dataloader.drop_last", value="pad", suggestion=hint)
    streams: list[StreamWorker] = []
    for number in range(max(1, workers)):
        worker = DataWorker(sharding.rank, sharding.world_size, number, max(1, workers))
        streams.append(StreamWorker(source, worker, augment, sharding, in_parts, once))
    pools = [loading.pool(stream, 1, among=workers) for stream in streams if workers]
    kind = PartBatches if in_parts else WholeBatches
    return kind(streams, pools, prepare, reason)


@dataclass
class Marks:
    """The start of each pass, by step, so that a resumed run rereads at most one pass."""

    workers: int
    _found: list[tuple[int, Mark]] = field(default_factory=lambda: [(0, Mark())])

    def note(self, step: int, mark: Mark) -> None:
        if mark != self._found[-1][1]:
            # Keep some marks: loaders are a few batches ahead of training.
            self._found = [*self._found[-31:], (step, mark)]

    def at(self, step: int) -> Mark:
        """Return the start of the pass in which step `step` begins, or of an earlier pass."""
        return max((found for found in self._found if found[0] <= step), default=self._found[0])[1]

    def state(self, step: int) -> dict[str, int]:
        return {**self.at(max(0, step - 1))._asdict(), "readers": self.workers}

    def load(self, state: dict[str, int], step: int) -> str:
        """Resume from a checkpoint; return a note on what is read again, for the panel."""
        mark = Mark(state["epoch"], state["first"])
        self._found = [(0, mark)]
        text = f"iterable data is read again from the start of its pass {mark.epoch + 1} up to step {step:,}"
        if state["readers"] != self.workers:
            text += (
                f", which {state['readers']} data workers had divided otherwise than {self.workers} do now"
            )
        return text


class StreamBatches(Batches):
    """The step batches of a stream on one rank, read by its data workers or their `pools`."""

    def __init__(
        self, workers: list[StreamWorker], pools: list[WorkerPool], prepare: Prepare, reason: str
    ) -> None:
        self._workers, self.pools, self.prepare, self.reason = workers, pools, prepare, reason
        self.workers, self.marks = len(pools), Marks(1)
        self._source, self._sharding, self._once = workers[0].source, workers[0].sharding, workers[0].once
        self._per_rank = self._sharding.per_rank
        self._compared = False
        """Whether the first samples were compared between ranks: once, not at every evaluation."""

    def _open(self, step: int, mark: Mark) -> list[Iterator[Item]]:
        if self.pools:
            return [pool.fetch(repeat((step, mark))) for pool in self.pools]
        return [worker.items(step, mark) for worker in self._workers]

    def _step_batch(self, items: Sequence[Item], num_samples: int) -> StepBatch:
        micro_batches = [MicroBatch(item.raw, item.num_samples) for item in items]
        return StepBatch(tuple(micro_batches), num_samples)


class WholeBatches(StreamBatches):
    """Batches of a stream that each data worker reads in full, pass after pass.

    A short batch at the end of a pass is filled from the next pass, unless the stream is read once. If the
    dataset has no `shared_by`, the first batches of all ranks are compared.
    """

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        workers = self._open(first_step, self.marks.at(first_step))
        # Micro-batches are numbered from the start of the run.
        turn = first_step * self._per_rank
        for step in range(first_step, last_step):
            items = [next(workers[(turn + i) % len(workers)]) for i in range(self._per_rank)]
            if not self._compared and self._source.is_guessed:
                self._compared = True
                digests = on_all_ranks(items[0].digest, self._sharding.world_size)
                check_same(digests, self._source.class_name)
            if any(item.raw is None for item in items):
                return
            turn += self._per_rank
            self.marks.note(step, items[0].mark)
            _, first, end = self._sharding.plan.batch(step)
            yield self._step_batch(items, end - first)


class PartBatches(StreamBatches):
    """Batches of a stream that is split into one part per data worker.

    A pass ends when all parts have ended, so each sample is read once. Ranks sum their sample counts one step
    ahead, while the device trains, and a rank whose part has ended joins without samples.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums = host_sums(self._sharding.world_size)
        self.marks = Marks(self._sharding.world_size * len(self._workers))
        self._drops = self._sharding.plan.drop_last is True
        self._last_raw: Any = None

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        mark = self.marks.at(first_step)
        workers, step = self._open(first_step, mark), mark.first
        first_items = [next(worker) for worker in workers]
        if not self._compared:
            digests = on_all_ranks([item.digest for item in first_items], self._sharding.world_size)
            check_parted([*chain(*digests)], self._source.class_name)
            self._compared = True
        workers[:] = (chain([item], worker) for item, worker in zip(first_items, workers, strict=True))
        for epoch in count(mark.epoch):
            mark = Mark(epoch, step)
            for items, num_samples in self._one_pass(workers):
                if items:
                    self._last_raw = items[-1].raw
                if step >= first_step:
                    self.marks.note(step, mark)
                    if self._last_raw is None:
                        raise self._empty()
                    # A rank without samples runs a dummy batch of weight 0.
                    dummies = [Item(self._last_raw, 0)] * (self._per_rank - len(items))
                    yield self._step_batch([*items, *dummies], num_samples)
                step += 1
                if step >= last_step:
                    return
            if step == mark.first and epoch == 0:
                raise self._empty()
            if step == mark.first or self._once:
                return

    def _one_pass(self, workers: list[Iterator[Item]]) -> Iterator[tuple[list[Item], int]]:
        """Yield this rank's micro-batches for each step of a pass, and the sample count of all ranks."""
        items = _in_turn(workers)
        following = self._ask(items)
        while True:
            mine, answer = following
            num_samples, lacking = answer()
            if num_samples == 0 or (self._drops and lacking):
                # Drop the rest of this rank's part.
                for _ in items:
                    pass
                return
            following = self._ask(items)
            yield mine, num_samples

    def _ask(self, items: Iterator[Item]) -> tuple[list[Item], Callable[[], list[int]]]:
        """Return the next micro-batches, and a function that waits for sums of samples and of short ranks."""
        mine = list(islice(items, self._per_rank))
        num_samples = sum(item.num_samples for item in mine)
        return mine, self._sums([num_samples, num_samples < self._per_rank * self._workers[0].size])

    def _empty(self) -> DataError:
        rank, total = self._sharding.rank, self.marks.workers
        what = f"the dataset gives rank {rank} no samples where it has {total} data workers"
        hint = "Use fewer ranks or workers, or more shards"
        if self._drops:
            what, hint = f"{what} of full batches", "Use dataloader.drop_last=false, or a smaller batch_size"
        return DataError("D006", what, key="data", suggestion=hint)


def _in_turn(workers: list[Iterator[Item]]) -> Iterator[Item]:
    """Yield the workers' items in turn; when one's pass ends, the others continue without it."""
    reading = list(workers)
    while reading:
        for worker in tuple(reading):
            item = next(worker)
            if item.raw is None:
                reading.remove(worker)
            else:
                yield item
