"""Builds the loaders of a run, for training and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.machine import available_memory
from ptfast.core.protocols import DataInfo, MicroBatch, StepBatch
from ptfast.core.tensors.trees import copied
from ptfast.data.dataset import Data, Source
from ptfast.data.label_checks import not_finite
from ptfast.data.loaders.device_loader import DeviceBatches
from ptfast.data.loaders.loader_choice import DECODED_ONCE, count_workers
from ptfast.data.loaders.pipeline import (
    Batches,
    LoaderOptions,
    Prepare,
    RawBatches,
    SampledBatches,
    SideStream,
    StaticBatches,
    Transform,
    batch_pipeline,
)
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.map_source import MapSource, TensorSource
from ptfast.data.sampling.sampler import InOrder, MicroBatchIndices, Sampler, Sharding
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.stream_loaders import build_stream_batches
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.row_windows import MemoryBatches, padded_bytes

CACHE_LIMIT_BYTES = 128 * 2**20
"""Evaluation splits in memory are normalized once and cached if the result is at most this large."""
STATIC_LIMIT_BYTES = 512 * 2**20
"""Training data is normalized up front if the result is at most this large."""


class Loader:
    """The training batches of one rank. The last three arguments are passed to `batch_pipeline`."""

    def __init__(
        self,
        batches: Batches,
        reason: str,
        data: Data,
        sharding: Sharding,
        loading: LoaderOptions,
        *,
        transforms: Sequence[Transform],
        side: SideStream | None,
        report: Callable[[str], None],
    ) -> None:
        self.batches, self.workers, self.reason = batches, batches.workers, reason
        self.kind = "plain" if loading.kind == "workers" and not self.workers else loading.kind
        self.plan, self._data = sharding.plan, data
        self.side, self._report = side, report
        self._pipeline = partial(
            batch_pipeline, batches, transforms=transforms, first_micro_batch=sharding.first
        )

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        return self._pipeline(first_step, last_step, side=self.side, report=self._report)

    def close(self) -> None:
        self.batches.close()

    def batch_at(self, step: int) -> StepBatch | None:
        """Return the batch of a step again; None if reading it would disturb later batches."""
        if self.batches.indices_at is None or self.workers:
            return None
        return next(self._pipeline(step, step + 1), None)

    def sample_numbers(self, step: int) -> list[NDArray[np.int64]]:
        """Return the sample numbers of each of this rank's micro-batches in a step; empty for a stream."""
        return [numbers for _, numbers in self._numbered(step)]

    def not_finite(self, first_step: int, last_step: int) -> list[int]:
        """Return this rank's samples with NaN or infinite values, from the first of these steps with any.

        Streams are not checked, because reading would consume them.
        """
        if not isinstance(source := self._data.train, MapSource):
            return []
        for step in range(first_step, last_step):
            for micro_batch, numbers in self._numbered(step):
                if found := not_finite(source.fetch(micro_batch.indices, micro_batch.epoch), numbers):
                    return found
        return []

    def _numbered(self, step: int) -> list[tuple[MicroBatchIndices, NDArray[np.int64]]]:
        """Return this rank's micro-batches of a step with their sample numbers; empty for a stream."""
        if self.batches.indices_at is None:
            return []
        kept = self._data.kept
        micro_batches = (
            micro_batch for micro_batch in self.batches.indices_at(step)[0] if micro_batch.num_samples
        )
        return [
            (micro_batch, micro_batch.indices if kept is None else kept[micro_batch.indices])
            for micro_batch in micro_batches
        ]


def build_train_loader(
    data: Data,
    sharding: Sharding,
    loading: LoaderOptions,
    *,
    seed: int,
    augment: Augment | None = None,
    transforms: Sequence[Transform] = (),
    side: SideStream | None = None,
    report: Callable[[str], None] = lambda cause: None,
) -> Loader:
    """Build the training loader of one rank.

    `seed` determines the sample order and the augmentation; the other arguments are as for `Loader`.

    Raises:
        ConfigError: C011 for augmentation that streams do not support.
        DataError: D002 or D006 if there are too few samples.
    """
    augment = (augment or Augment()).model_copy(update={"seed": seed})
    prepare = Prepare(loading, data.info, images=data.train.images)
    if isinstance(data.train, IterableSource):
        batches = build_stream_batches(data.train, prepare, sharding, loading, augment)
        reason = batches.reason
    else:
        batches, reason = _read_samples(data.train, data, prepare, sharding, loading, seed, augment)
    return Loader(batches, reason, data, sharding, loading, transforms=transforms, side=side, report=report)


def _read_samples(
    source: MapSource,
    data: Data,
    prepare: Prepare,
    sharding: Sharding,
    loading: LoaderOptions,
    seed: int,
    augment: Augment,
) -> tuple[Batches, str]:
    """Return the batches of an indexed source, and the reason for how they are read."""
    kind, reason = loading.kind, loading.reason
    sampler = Sampler(sharding, seed, partial(data.order, seed))
    if kind == "workers" and (workers := count_workers(loading.workers)):
        pool = loading.pool(RawBatches(source, augment), workers)
        return SampledBatches(sampler, prepare, pool, source), f"{loading.describe(workers)}, {reason}"
    if kind in DECODED_ONCE and source.storage != "memory":
        source = source.to_memory()
    if kind == "device":
        return DeviceBatches(sampler, prepare, source, augment), reason
    fetch = RawBatches(source, augment)
    if kind == "memory" and isinstance(source, TensorSource):
        if not augment and source.prepared_bytes <= STATIC_LIMIT_BYTES:
            return StaticBatches(sampler, prepare, source), reason
        if augment and augment.resized_crop is None:
            arrays = data.arrays or SharedArrays()
            needed = padded_bytes(augment, source) * (2 if augment.flip else 1) if augment.moves else 0
            if arrays.agree(needed <= available_memory() // 2):
                fetch = MemoryBatches(source, augment, arrays)
            else:
                reason += "; no room for padded copies"
    return SampledBatches(sampler, prepare, fetch, source), reason


@dataclass
class EvaluationLoader:
    """Loads one rank's part of an evaluation split."""

    batches: Batches
    num_steps: int = sys.maxsize
    """Maximum number of steps; streams may end earlier."""
    side: SideStream | None = None
    caches: bool = False
    """Make the batches once and return copies, which the evaluation code may modify."""
    _cached: list[MicroBatch] | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[MicroBatch]:
        if not self.caches:
            return self._micro_batches()
        # Tensors created in inference mode cannot be used with gradients later.
        if self._cached is None:
            with torch.inference_mode(False):
                self._cached = [*self._micro_batches()]
        return (MicroBatch(_copied(data), num_samples) for data, num_samples in self._cached)

    def _micro_batches(self) -> Iterator[MicroBatch]:
        side = None if self.caches else self.side
        steps = batch_pipeline(self.batches, 0, self.num_steps, side=side)
        return (micro_batch for step in steps for micro_batch in step.micro_batches)

    def close(self) -> None:
        self.batches.close()


def build_eval_loader(
    source: Source,
    info: DataInfo,
    loading: LoaderOptions,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    whole_batches: bool = False,
    side: SideStream | None = None,
) -> EvaluationLoader:
    """Build the evaluation loader of one rank: samples in order, each evaluated on exactly one rank.

    Args:
        loading: with kind `auto` or `workers`, worker processes read samples that are not in memory.
        batch_size: samples of one forward pass on this rank.
        whole_batches: assign whole batches to ranks, so that batches do not depend on the number of ranks.
    """
    prepare = Prepare(loading, info, images=source.images)
    if isinstance(source, IterableSource):
        # Workers were counted for the training data; a held-out split may have fewer shards.
        workers = source.workers_at_most(count_workers(loading.workers), world_size)
        kind = loading.kind if loading.kind == "workers" else "plain"
        sharding = Sharding(BatchPlan(None, batch_size * world_size), world_size, rank, world_size)
        how = replace(loading, kind=kind, workers=workers)
        return EvaluationLoader(build_stream_batches(source, prepare, sharding, how, once=True), side=side)
    order = InOrder(len(source), batch_size, rank, world_size, unit=batch_size if whole_batches else 1)
    fetch: Any = RawBatches(source, Augment())
    if loading.kind in ("auto", "workers") and source.storage != "memory":
        workers = count_workers(loading.workers)
        fetch = loading.pool(fetch, workers) if workers else fetch
    return EvaluationLoader(
        SampledBatches(order, prepare, fetch, source),
        order.num_steps,
        side=side,
        caches=isinstance(source, TensorSource) and source.prepared_bytes <= CACHE_LIMIT_BYTES,
    )


def _copied(data: Any) -> Any:
    with torch.inference_mode(False):
        return copied(data)
