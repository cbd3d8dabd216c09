"""Loaders of iterable data: read in this process or by workers, exact over ranks without a known length."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, repeat
from typing import Any, NamedTuple, cast

from ptfast.core.batch_plan import BatchPlan, constant
from ptfast.core.distributed import host_sums, joined, on_all_ranks
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.data.loaders.to_device import Prepare
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.streams.iterable import IterableSource, Reader, check_kind
from ptfast.data.streams.stream_agreement import CHECKED, check_parted, check_same, place, sum_of
from ptfast.data.streams.stream_readers import Augmented, Item, Mark, PartReading, Reading, WholeReading

Sums = Callable[[Sequence[int]], Callable[[], list[int]]]


class Hands(NamedTuple):
    """Who reads a stream on one rank."""

    rank: int
    num_ranks: int
    workers: int
    """Processes; 0 for this one."""
    in_parts: bool
    """Whether each of several readers has a part of its own."""
    reason: str

    @property
    def kind(self) -> str:
        return "workers" if self.workers else "plain"

    @property
    def readers(self) -> list[Reader]:
        """Those of this rank."""
        num_workers = max(1, self.workers)
        return [Reader(self.rank, self.num_ranks, worker, num_workers) for worker in range(num_workers)]


def share_out(source: IterableSource, *, kind: str, workers: int, rank: int, num_ranks: int) -> Hands:
    """Who reads `source`.

    Args:
        kind: `plain` or `workers`.
        workers: processes of each rank.

    Raises:
        ConfigError: C011 for another kind, and for more readers than the data set has shards.
    """
    check_kind(kind)
    workers = workers if kind == "workers" else 0
    readers = max(1, workers) * num_ranks
    shared, shards = source.shared_by != "none", source.num_shards
    if shared and shards is not None and readers > shards:
        what = f"{readers} readers, and the data set has {shards} shards to give them"
        fits = shards // num_ranks
        hint = f"Use dataloader.workers={fits}" if fits else f"Use {shards} ranks or fewer"
        raise ConfigError("C011", what, key="dataloader.workers", value=max(1, workers), suggestion=hint)
    who = f"{workers} process{'es' * (workers > 1)}" if workers else "in this process"
    if readers == 1:
        how = "read in order"
    elif shared:
        how = f"the data set shares itself out over {readers} readers"
    else:
        how = "each reader goes through the whole stream: the data set does not ask get_worker_info()"
    return Hands(rank, num_ranks, workers, shared and readers > 1, f"{who}, {how}")


def build_stream_loader(
    source: IterableSource,
    prepare: Prepare,
    plan: BatchPlan,
    *,
    micro_batches: int,
    kind: str,
    workers: int,
    rank: int,
    num_ranks: int,
    last: str,
    prefetch: int,
    threads: int,
    augment: Augmented | None = None,
) -> StreamLoader | PartsLoader:
    """The training loader of iterable data, on one rank.

    Args:
        micro_batches: of a step, over all ranks.
        kind, workers: as for `share_out`.
        last: what becomes of the end of a pass where readers have parts of their own; `keep` or `drop`.
        prefetch: micro-batches that each worker prepares ahead.
        threads: of each worker process.

    Raises:
        ConfigError: C011 for a loader that iterable data cannot have, and where readers have parts of their
            own, for batches that grow or are padded.
        DataError: D008 if processes are not forked and the data set cannot be pickled, and for one that is
            another on each rank without saying so.
    """
    _check_ranks(source, num_ranks)
    hands = share_out(source, kind=kind, workers=workers, rank=rank, num_ranks=num_ranks)
    pools: dict[str, Any] = {"prefetch": prefetch, "pin": prepare.pin, "threads": threads}
    if not hands.in_parts:
        return StreamLoader(source, prepare, hands, plan, micro_batches, augment, **pools)
    if plan.grows:
        what = "batches of a data set that shares itself out over readers cannot grow"
        hint = 'Use curriculum=none, or set its attribute shared_by = "none"'
        raise ConfigError("C011", what, key="curriculum.batch_size_from", suggestion=hint)
    if last == "pad":
        what = "the parts of a data set that shares itself out end unequally, and nothing fills them up"
        hint = "Use dataloader.last=keep or drop"
        raise ConfigError("C011", what, key="dataloader.last", value=last, suggestion=hint)
    return PartsLoader(source, prepare, hands, plan, micro_batches, augment, last=last, **pools)


def build_stream_evaluation(
    source: IterableSource,
    prepare: Prepare,
    *,
    batch_size: int,
    kind: str,
    workers: int,
    rank: int,
    num_ranks: int,
    prefetch: int,
    threads: int,
) -> StreamEvaluation:
    """The evaluation loader of iterable data on one rank; arguments as for `build_stream_loader`.

    Args:
        batch_size: samples of a forward pass on one rank.
    """
    if source.shared_by != "none" and source.num_shards is not None:
        # A held-out split may well have fewer shards than the training data that the workers are for.
        workers = min(workers, source.num_shards // num_ranks)
    hands = share_out(source, kind=kind, workers=workers, rank=rank, num_ranks=num_ranks)
    plan = BatchPlan(None, constant(batch_size * num_ranks))
    loader = PartsLoader if hands.in_parts else StreamLoader
    pools: dict[str, Any] = {"prefetch": prefetch, "pin": prepare.pin, "threads": threads}
    return StreamEvaluation(loader(source, prepare, hands, plan, num_ranks, once=True, **pools))


def _check_ranks(source: IterableSource, num_ranks: int) -> None:
    """Refuse a data set that says nothing of ranks and begins on each with another sample."""
    if source.is_guessed and num_ranks > 1:
        begins = sum_of([source.first(), source.shared_by])
        check_same(on_all_ranks(begins, num_ranks), source.class_name, 0)


class Marks:
    """Where passes began, by the step: what a resumed run needs so as to read no more again than one pass."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._found: list[tuple[int, Mark]] = [(0, Mark())]

    def note(self, step: int, mark: Mark) -> None:
        """The data of `step` begins in the pass of `mark`."""
        if mark != self._found[-1][1]:
            # Loaders are a few batches ahead of the training.
            self._found = [*self._found[-31:], (step, mark)]

    def at(self, step: int) -> Mark:
        """The pass that step `step` begins in, or one before it."""
        return max((found for found in self._found if found[0] <= step), default=self._found[0])[1]

    def state(self, step: int) -> dict[str, int]:
        """What is saved when `step` steps are done."""
        return {**self.at(max(0, step - 1))._asdict(), "readers": self.readers}

    def load(self, state: dict[str, int], step: int) -> str:
        """Go on from a saved state; say what that takes."""
        mark = Mark(state["epoch"], state["first"])
        self._found = [(0, mark)]
        text = f"iterable data is read again from the start of its pass {mark.epoch + 1} up to step {step:,}"
        if state["readers"] != self.readers:
            text += f", which {state['readers']} readers had cut otherwise than {self.readers} do now"
        return text


class StreamLoader:
    """Batches of a stream that each reader goes through as a whole, one after another.

    Batches are always full: one that the end of a pass leaves short is filled up from the next pass.

    Args:
        micro_batches: of a step, over all ranks.
        once: end with the first pass, whose last batch may be short.
        sums: what sums numbers over the ranks, where these are to be compared by what they read.
        pools: keywords of the worker processes.
    """

    def __init__(
        self,
        source: IterableSource,
        prepare: Prepare,
        hands: Hands,
        plan: BatchPlan,
        micro_batches: int,
        augment: Augmented | None = None,
        *,
        once: bool = False,
        sums: Sums | None = None,
        **pools: Any,
    ) -> None:
        self.plan, self.kind, self.reason, self.workers = plan, hands.kind, hands.reason, hands.workers
        self.marks = Marks(1)
        self._per_rank, self._prepare = micro_batches // hands.num_ranks, prepare
        self._hands, self._name = hands, source.class_name
        self._sums = sums or (host_sums(hands.num_ranks) if source.is_guessed and joined() else None)
        readings: list[Reading] = [
            WholeReading(source, reader, augment, plan=plan, micro_batches=micro_batches, once=once)
            for reader in hands.readers
        ]
        self._readers = _Readers(readings, hands.workers, **pools)

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` up to, not including, `last_step`; fewer if data ends."""
        readers = self._readers.open(first_step, self.marks.at(first_step))
        # Micro-batches are numbered from the start of the run.
        turn = first_step * self._per_rank
        for step in range(first_step, last_step):
            items = [next(readers[(turn + i) % len(readers)]) for i in range(self._per_rank)]
            if self._sums is not None and step < first_step + CHECKED:
                digests = self._sums(place([items[0].digest], self._hands.rank, self._hands.num_ranks))()
                check_same(digests, self._name, step)
            if any(item.raw is None for item in items):
                return
            turn += self._per_rank
            self.marks.note(step, items[0].mark)
            _, first, end = self.plan.batch(step)
            micro_batches = [MicroBatch(self._prepare(item.raw), item.num_samples) for item in items]
            yield StepBatch(tuple(micro_batches), end - first)

    def close(self) -> None:
        """Stop the worker processes."""
        self._readers.close()


class PartsLoader:
    """Batches of a stream of which every reader has a part of its own.

    A pass is over when all parts are: each sample comes once, whatever their lengths. Ranks tell one another
    a step ahead how many samples they have, while the device trains, so that one whose part is over runs
    along with none, as it does at the end of any epoch.

    Args:
        batch_size: samples of a step over all ranks.
        micro_batches: of a step over all ranks, each of which comes from one reader.
        last: `keep` or `drop` the steps at the end of a pass for which some reader lacks samples.
        once: end with the first pass.
        sums: what sums numbers over the ranks.
        pools: keywords of the worker processes.
    """

    def __init__(
        self,
        source: IterableSource,
        prepare: Prepare,
        hands: Hands,
        plan: BatchPlan,
        micro_batches: int,
        augment: Augmented | None = None,
        *,
        last: str = "keep",
        once: bool = False,
        sums: Sums | None = None,
        **pools: Any,
    ) -> None:
        self.plan, self.kind, self.reason, self.workers = plan, hands.kind, hands.reason, hands.workers
        self.marks = Marks(hands.num_ranks * len(hands.readers))
        self._per_rank, self._size = micro_batches // hands.num_ranks, plan.batch_size // micro_batches
        self._prepare, self._drops, self._rank = prepare, last == "drop", hands.rank
        self._sums = sums or host_sums(hands.num_ranks)
        self._once, self._held = once, cast(Any, None)
        self._hands, self._name, self._told = hands, source.class_name, list[int]()
        readings: list[Reading] = [
            PartReading(source, reader, augment, size=self._size) for reader in hands.readers
        ]
        self._readers = _Readers(readings, hands.workers, **pools)

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` up to, not including, `last_step`; fewer if data ends."""
        mark = self.marks.at(first_step)
        readers, step = self._readers.open(first_step, mark), mark.first
        for epoch in count(mark.epoch):
            mark = Mark(epoch, step)
            for items, num_samples in self.one_pass(readers):
                if items:
                    self._held = items[-1].raw
                if step >= first_step:
                    self.marks.note(step, mark)
                    yield self._batch(items, num_samples)
                step += 1
                if step >= last_step:
                    return
            if step == mark.first and epoch == 0:
                raise self._empty()
            if step == mark.first or self._once:
                return

    def one_pass(self, readers: list[Iterator[Item]]) -> Iterator[tuple[list[Item], int]]:
        """This rank's micro-batches of each step up to the end of the pass, and the samples of all ranks."""
        items = _in_turn(readers)
        ahead = self._ask(items)
        while True:
            mine, answer = ahead
            num_samples, lacking, *digests = answer()
            check_parted(digests, self._name)
            if num_samples == 0 or (self._drops and lacking):
                # What is left of this rank's part does not count any more.
                for _ in items:
                    pass
                return
            ahead = self._ask(items)
            yield mine, num_samples

    def close(self) -> None:
        """Stop the worker processes."""
        self._readers.close()

    def _ask(self, items: Iterator[Item]) -> tuple[list[Item], Callable[[], list[int]]]:
        mine = list(islice(items, self._per_rank))
        sizes = [item.num_samples for item in mine]
        numbers = [sum(sizes), sum(sizes) < self._per_rank * self._size]
        return mine, self._sums([*numbers, *self._digests(mine)])

    def _digests(self, mine: list[Item]) -> list[int]:
        """What each reader of all ranks has read so far, to be summed up: after its first, and its second."""
        readers, before = len(self._hands.readers), len(self._told)
        if before >= 2 * readers:
            return []
        # A rank whose part has ended has fewer.
        self._told += [*(item.digest for item in mine), *[0] * (self._per_rank - len(mine))]
        end = len(self._told) // readers * readers
        if end == before // readers * readers:
            return []
        return place(self._told[end - readers : end], self._hands.rank, self._hands.num_ranks)

    def _batch(self, items: list[Item], num_samples: int) -> StepBatch:
        if self._held is None:
            raise self._empty()
        stand_ins = [Item(self._held, 0)] * (self._per_rank - len(items))
        micro_batches = [MicroBatch(self._prepare(raw), number) for raw, number, *_ in [*items, *stand_ins]]
        return StepBatch(tuple(micro_batches), num_samples)

    def _empty(self) -> DataError:
        what = f"the data set gives rank {self._rank} no samples where it has {self.marks.readers} readers"
        hint = "Use fewer ranks or workers, or more shards"
        if self._drops:
            what, hint = f"{what} of full batches", "Use dataloader.last=keep, or a smaller batch_size"
        return DataError("D006", what, key="data", suggestion=hint)


class StreamEvaluation:
    """One pass over a held-out stream, each sample once over all ranks, which yield equally many batches."""

    num_samples = None
    left_out = 0

    def __init__(self, loader: StreamLoader | PartsLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in self._loader.steps(0, sys.maxsize):
            yield from batch.micro_batches

    def close(self) -> None:
        """Stop the worker processes."""
        self._loader.close()


class _Readers:
    """Those of one rank: in this process, or each in one of its own."""

    def __init__(
        self, readings: list[Reading], workers: int, *, prefetch: int, pin: bool, threads: int
    ) -> None:
        self._readings, self._pools = readings, list[WorkerPool]()
        if workers:
            self._pools = [
                WorkerPool(reading, 1, prefetch, pin=pin, threads=threads, among=workers)
                for reading in readings
            ]

    def open(self, step: int, mark: Mark) -> list[Iterator[Item]]:
        """What each of them reads from `step` on, without end."""
        if self._pools:
            return [pool.fetch(repeat((step, mark))) for pool in self._pools]
        return [reading.items(step, mark) for reading in self._readings]

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _in_turn(readers: list[Iterator[Item]]) -> Iterator[Item]:
    """Their items by turns up to the end of the pass of each, which those with more go on without."""
    reading = list(readers)
    while reading:
        for reader in tuple(reading):
            item = next(reader)
            if item.raw is None:
                reading.remove(reader)
            else:
                yield item
