"""Loaders of iterable data: read in this process or by workers, exact over ranks without a known length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, repeat
from typing import Any

from ptfast.core.distributed import host_sums, on_all_ranks
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.data.loaders.loader_choice import count_workers
from ptfast.data.loaders.loading import LoaderOptions, Prepare
from ptfast.data.loaders.step_batches import Batches
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.sampling.sampler import Sharding
from ptfast.data.streams.iterable import IterableSource, Reader
from ptfast.data.streams.stream_readers import (
    Item,
    Mark,
    StreamReader,
    check_parted,
    check_same,
    sum_of,
)
from ptfast.data.transforms.augment_plan import Augment


def share_out(source: IterableSource, sharding: Sharding, loading: LoaderOptions) -> tuple[int, bool, str]:
    """The workers of this rank (0 for this process), whether readers have parts of their own, and why."""
    world_size = sharding.world_size
    workers = count_workers(loading.workers) if loading.kind == "workers" else 0
    readers = max(1, workers) * world_size
    shared, shards = source.shared_by != "none", source.num_shards
    if shared and shards is not None and readers > shards:
        what = f"{readers} readers, and the dataset has {shards} shards to give them"
        fits = shards // world_size
        hint = f"Use dataloader.workers={fits}" if fits else f"Use {shards} ranks or fewer"
        raise ConfigError("C011", what, key="dataloader.workers", value=max(1, workers), suggestion=hint)
    who = loading.describe(workers) if workers else "in this process"
    if readers == 1:
        how = "read in order"
    elif shared:
        how = f"the dataset shares itself out over {readers} readers"
    elif source.shares_batches:
        how = f"{readers} readers share the batches of one order"
    else:
        how = "each reader goes through the whole stream: the dataset does not ask get_worker_info()"
    return workers, shared and readers > 1, f"{who}, {how}"


def build_stream_batches(
    source: IterableSource,
    prepare: Prepare,
    sharding: Sharding,
    loading: LoaderOptions,
    augment: Augment | None = None,
    *,
    once: bool = False,
) -> WholeBatches | PartBatches:
    """The batches of iterable data, on one rank.

    If readers have parts of their own, the plan's `last` (`keep` or `drop`) applies to the end of each pass.
    """
    augment = augment or Augment()
    if augment.resized_crop is not None and not source.shares_batches:
        what = "images of a stream are resized before they can be cropped"
        hint = "Crop them in the dataset, or use augment=crop_flip"
        raise ConfigError("C011", what, key="augment.resized_crop", suggestion=hint)
    if source.is_guessed and sharding.world_size > 1:
        # A dataset that does not say who shares it out may begin with another sample on each rank.
        begins = sum_of([source.first[0], source.shared_by])
        check_same(on_all_ranks(begins, sharding.world_size), source.class_name)
    workers, in_parts, reason = share_out(source, sharding, loading)
    if in_parts and sharding.plan.drop_last == "pad":
        what = "a dataset that splits itself over readers has parts of unequal length, which cannot be padded"
        hint = "Use dataloader.drop_last=false or true"
        raise ConfigError("C011", what, key="dataloader.drop_last", value="pad", suggestion=hint)
    num_readers = max(1, workers)
    readers = [Reader(sharding.rank, sharding.world_size, each, num_readers) for each in range(num_readers)]
    streams = [StreamReader(source, reader, augment, sharding, in_parts, once) for reader in readers]
    pools = [loading.pool(reader, 1, among=workers) for reader in streams if workers]
    kind = PartBatches if in_parts else WholeBatches
    return kind(streams, pools, prepare, reason)


@dataclass
class Marks:
    """The start of each pass, by step: with it a resumed run reads no more than one pass again."""

    readers: int
    _found: list[tuple[int, Mark]] = field(default_factory=lambda: [(0, Mark())])

    def note(self, step: int, mark: Mark) -> None:
        if mark != self._found[-1][1]:
            # Loaders are a few batches ahead of the training.
            self._found = [*self._found[-31:], (step, mark)]

    def at(self, step: int) -> Mark:
        """The pass that step `step` begins in, or one before it."""
        return max((found for found in self._found if found[0] <= step), default=self._found[0])[1]

    def state(self, step: int) -> dict[str, int]:
        return {**self.at(max(0, step - 1))._asdict(), "readers": self.readers}

    def load(self, state: dict[str, int], step: int) -> str:
        """Resume from a checkpoint; return what that takes, for the panel."""
        mark = Mark(state["epoch"], state["first"])
        self._found = [(0, mark)]
        text = f"iterable data is read again from the start of its pass {mark.epoch + 1} up to step {step:,}"
        if state["readers"] != self.readers:
            text += f", which {state['readers']} readers had cut otherwise than {self.readers} do now"
        return text


class StreamBatches(Batches):
    """The step batches of a stream on one rank, by its readers or their `pools`. Subclasses give `steps`."""

    def __init__(
        self, readers: list[StreamReader], pools: list[WorkerPool], prepare: Prepare, reason: str
    ) -> None:
        self._readers, self.pools, self.prepare, self.reason = readers, pools, prepare, reason
        self.workers, self.marks = len(pools), Marks(1)
        self._source, self._sharding, self._once = readers[0].source, readers[0].sharding, readers[0].once
        self._per_rank = self._sharding.per_rank

    def _open(self, step: int, mark: Mark) -> list[Iterator[Item]]:
        if self.pools:
            return [pool.fetch(repeat((step, mark))) for pool in self.pools]
        return [reader.items(step, mark) for reader in self._readers]

    def _step_batch(self, items: Sequence[Item], num_samples: int) -> StepBatch:
        micro_batches = [MicroBatch(item.raw, item.num_samples) for item in items]
        return StepBatch(tuple(micro_batches), num_samples)


class WholeBatches(StreamBatches):
    """Batches of a stream that each reader goes through as a whole, one pass after another.

    A batch that the end of a pass leaves short is filled up from the next pass, unless the stream is read
    once. Unless the dataset says who shares it out, the first batches of all ranks are compared.
    """

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        readers = self._open(first_step, self.marks.at(first_step))
        # Micro-batches are numbered from the start of the run.
        turn = first_step * self._per_rank
        for step in range(first_step, last_step):
            items = [next(readers[(turn + i) % len(readers)]) for i in range(self._per_rank)]
            if step == first_step and self._source.is_guessed:
                digests = on_all_ranks(items[0].digest, self._sharding.world_size)
                check_same(digests, self._source.class_name)
            if any(item.raw is None for item in items):
                return
            turn += self._per_rank
            self.marks.note(step, items[0].mark)
            _, first, end = self._sharding.plan.batch(step)
            yield self._step_batch(items, end - first)


class PartBatches(StreamBatches):
    """Batches of a stream of which every reader has a part of its own.

    A pass ends when all parts have: each sample comes once. Ranks sum their numbers of samples a step early,
    while the device trains, and a rank whose part has ended joins without samples.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums = host_sums(self._sharding.world_size)
        self.marks = Marks(self._sharding.world_size * len(self._readers))
        self._drops = self._sharding.plan.drop_last is True
        self._last_raw: Any = None

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        mark = self.marks.at(first_step)
        readers, step = self._open(first_step, mark), mark.first
        first_items = [next(reader) for reader in readers]
        digests = on_all_ranks([item.digest for item in first_items], self._sharding.world_size)
        check_parted([*chain(*digests)], self._source.class_name)
        readers[:] = (chain([item], reader) for item, reader in zip(first_items, readers, strict=True))
        for epoch in count(mark.epoch):
            mark = Mark(epoch, step)
            for items, num_samples in self._one_pass(readers):
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

    def _one_pass(self, readers: list[Iterator[Item]]) -> Iterator[tuple[list[Item], int]]:
        """This rank's micro-batches of each step up to the end of the pass, and the samples of all ranks."""
        items = _in_turn(readers)
        following = self._ask(items)
        while True:
            mine, answer = following
            num_samples, lacking = answer()
            if num_samples == 0 or (self._drops and lacking):
                # The rest of this rank's part is dropped.
                for _ in items:
                    pass
                return
            following = self._ask(items)
            yield mine, num_samples

    def _ask(self, items: Iterator[Item]) -> tuple[list[Item], Callable[[], list[int]]]:
        """The next micro-batches, and a function that waits for the sums over all ranks: of samples, and of
        ranks that lack some.
        """
        mine = list(islice(items, self._per_rank))
        num_samples = sum(item.num_samples for item in mine)
        return mine, self._sums([num_samples, num_samples < self._per_rank * self._readers[0].size])

    def _empty(self) -> DataError:
        rank, readers = self._sharding.rank, self.marks.readers
        what = f"the dataset gives rank {rank} no samples where it has {readers} readers"
        hint = "Use fewer ranks or workers, or more shards"
        if self._drops:
            what, hint = f"{what} of full batches", "Use dataloader.drop_last=false, or a smaller batch_size"
        return DataError("D006", what, key="data", suggestion=hint)


def _in_turn(readers: list[Iterator[Item]]) -> Iterator[Item]:
    """Their items by turns; when the pass of one ends, the others continue without it."""
    reading = list(readers)
    while reading:
        for reader in tuple(reading):
            item = next(reader)
            if item.raw is None:
                reading.remove(reader)
            else:
                yield item
