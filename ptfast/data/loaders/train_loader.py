"""The training loader: step batches, the same bits from every kind, and what they go through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, Full, Queue
from typing import Any

from ptfast.core.errors import ConfigError
from ptfast.core.machine import available_memory
from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.data.dataset import Data
from ptfast.data.label_checks import not_finite
from ptfast.data.loaders.device_loader import build_device_batches
from ptfast.data.loaders.loader_choice import HELD, count_workers
from ptfast.data.loaders.loading import ReaderOptions, SideStream, build_prepare, prefetched
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.loaders.step_batches import (
    Batches,
    RawBatches,
    SampledBatches,
    StaticBatches,
)
from ptfast.data.map_source import BaseSource, MapSource, TensorSource
from ptfast.data.sampling.sampler import Sampler, Sharding
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.stream_loaders import build_stream_batches
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.row_windows import MemoryBatches

STATIC_LIMIT_BYTES = 512 * 2**20
"""Data that takes no more than this once normalised is normalised up front."""

Transform = Callable[[Any, int, int], Any]
"""Makes something of a micro-batch's data at (step, number of the micro-batch in the whole step)."""


class Loader:
    """The training batches of one rank: where they come from, and what they go through on the way.

    A thread may read one ahead, a side stream may copy one ahead, and transforms change what is on the
    device. A transform is a function of data, step and micro-batch, so that the kind of loader, its workers,
    resuming and the number of ranks make no difference to it.

    Args:
        reason: why samples are read by `loading.kind`, for the panel.
        side: stream on which batches are copied while others train.
        report: receives what time goes to, as for `prefetched`.
    """

    def __init__(
        self,
        batches: Batches,
        reason: str,
        data: Data,
        sharding: Sharding,
        loading: ReaderOptions,
        *,
        transforms: Sequence[Transform],
        side: SideStream | None,
        report: Callable[[str], None],
    ) -> None:
        self.batches, self.workers, self.reason = batches, batches.workers, reason
        self.kind = "plain" if loading.kind == "workers" and not self.workers else loading.kind
        self.plan, self._first, self._data = sharding.plan, sharding.first, data
        self.transforms, self.reads_ahead, self.side = transforms, loading.read_ahead, side
        self._report = report
        self._thread: Any = None

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` (from 0, over epochs) up to, not including, `last_step`."""
        batches = self.batches.steps(first_step, last_step)
        if self.reads_ahead:
            batches = self._thread = read_ahead(batches)
        if self.side is not None:
            batches = prefetched(batches, self.side, self._report)
        return self._transformed(batches, first_step) if self.transforms else batches

    def close(self) -> None:
        """Stop the thread and the worker processes."""
        if self._thread is not None:
            self._thread.close()
        self.batches.close()

    def not_finite(self, first_step: int, last_step: int) -> list[int]:
        """Samples with numbers that are not finite: of this rank's in the first step that has some.

        Those of a stream are read once and not looked for.
        """
        shares = self.batches.shares
        if shares is None or not isinstance(source := self._data.train, MapSource):
            return []
        for step in range(first_step, last_step):
            for share in shares(step)[0]:
                numbers = share.indices if self._data.kept is None else self._data.kept[share.indices]
                if found := not_finite(source.fetch(share.indices, share.epoch), numbers):
                    return found
        return []

    def _transformed(self, batches: Iterator[StepBatch], first_step: int) -> Iterator[StepBatch]:
        for step, batch in enumerate(batches, first_step):
            micro_batches: list[MicroBatch] = []
            for number, (data, num_samples) in enumerate(batch.micro_batches, self._first):
                for transform in self.transforms:
                    data = transform(data, step, number)
                micro_batches.append(MicroBatch(data, num_samples))
            yield StepBatch(tuple(micro_batches), batch.num_samples)


def build_train_loader(
    data: Data,
    sharding: Sharding,
    loading: ReaderOptions,
    *,
    seed: int,
    augment: Augment | None = None,
    transforms: Sequence[Transform] = (),
    side: SideStream | None = None,
    report: Callable[[str], None] = lambda cause: None,
) -> Loader:
    """The training loader of one rank.

    Args:
        seed: of the order of the samples and of their augmentation.
        augment: of `build_augment`; None for no augmentation.
        transforms: of each micro-batch, in their order.
        side, report: as of `Loader`.

    Raises:
        ConfigError: C011 for a kind that iterable data cannot have, and for samples that no thread may read.
        DataError: D002 or D006 if there are too few samples.
    """
    if loading.read_ahead:
        check_read_ahead(data.train)
    augment = (augment or Augment()).model_copy(update={"seed": seed})
    if isinstance(data.train, IterableSource):
        prepare = build_prepare(data.train, data.info, loading)
        batches = build_stream_batches(data.train, prepare, sharding, loading, augment)
        reason = batches.layout.reason
    else:
        batches, reason = _read_samples(data.train, data, sharding, loading, seed, augment)
    return Loader(batches, reason, data, sharding, loading, transforms=transforms, side=side, report=report)


def _read_samples(
    source: MapSource, data: Data, sharding: Sharding, loading: ReaderOptions, seed: int, augment: Augment
) -> tuple[Batches, str]:
    """The batches of samples that have an index, and why they are read as they are."""
    kind, reason = loading.kind, loading.reason
    prepare = build_prepare(source, data.info, loading)
    sampler = Sampler(sharding, seed, partial(data.order, seed))
    if kind == "workers" and (workers := count_workers(loading.workers)):
        pool = loading.pool(RawBatches(source, augment), workers)
        return SampledBatches(sampler.step, prepare, pool), f"{loading.describe(workers)}, {reason}"
    if kind in HELD and not source.in_memory:
        source = source.hold().source
    if kind == "device":
        return build_device_batches(sampler, prepare, source, augment, loading.device), reason
    fetch = RawBatches(source, augment)
    if kind == "memory" and isinstance(source, TensorSource):
        if not augment and source.prepared_bytes <= STATIC_LIMIT_BYTES:
            return StaticBatches(sampler, prepare, source), reason
        if augment and augment.resized_crop is None:
            holder = data.holder or Holder()
            if holder.agree(MemoryBatches.nbytes(source, augment) <= available_memory() // 2):
                fetch = MemoryBatches(source, augment, holder)
            else:
                reason += "; no room for padded copies"
    return SampledBatches(sampler.step, prepare, fetch), reason


_LOOK_S = 0.1
"""How often a thread that waits for room looks whether anybody still wants its batches."""
_CLOSE_S = 2.0
"""How long the thread may take to notice that nobody does; one that is stuck ends with the process."""


def read_ahead(batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """The same batches, of which a thread reads one ahead.

    Decoding, gathering and normalising leave the interpreter to others for most of their time. The thread
    ends with the last batch, or when nobody wants more; what goes wrong in it is raised here, in its turn.
    """
    queue: Queue[tuple[StepBatch | None, BaseException | None]] = Queue(1)
    unwanted = threading.Event()

    def put(item: tuple[StepBatch | None, BaseException | None]) -> bool:
        while not unwanted.is_set():
            try:
                queue.put(item, timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False

    def read() -> None:
        error: BaseException | None = None
        try:
            for batch in batches:
                if not put((batch, None)):
                    return
        except BaseException as caught:
            error = caught
        put((None, error))

    thread = threading.Thread(target=read, name="ptfast-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = queue.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        unwanted.set()
        late_s = time.monotonic() + _CLOSE_S
        while thread.is_alive() and time.monotonic() < late_s:
            try:
                queue.get(timeout=_LOOK_S)
            except Empty:
                continue


def check_read_ahead(source: BaseSource) -> None:
    """Raise ConfigError C011 for samples that draw from the global generators, as the training does."""
    if not (source.repeatable or source.in_memory):
        what = "samples may draw from the random generators of the training, which a thread would share"
        hint = "Use dataloader=workers, which have generators of their own"
        raise ConfigError("C011", what, key="dataloader.read_ahead", value="true", suggestion=hint)
