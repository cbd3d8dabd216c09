"""Evaluation loaders: a split in order, each sample once over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ptfast.core.batch_plan import BatchPlan, constant
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo, MicroBatch
from ptfast.data.dataset import Source
from ptfast.data.loaders.loader_choice import count_workers
from ptfast.data.loaders.loading import ReaderOptions, SideStream, build_prepare, prefetched
from ptfast.data.loaders.step_batches import Batches, RawBatches, SampledBatches
from ptfast.data.map_source import TensorSource
from ptfast.data.sampling.sampler import InOrder, Sharding
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.stream_loaders import build_stream_batches
from ptfast.data.transforms.augment_plan import Augment

CACHE_LIMIT_BYTES = 128 * 2**20
"""Splits in memory that take no more than this once normalised are prepared once and cached."""


@dataclass
class EvaluationLoader:
    """One rank's share of an evaluation split."""

    batches: Batches
    num_steps: int = sys.maxsize
    """After which the batches end, if they do not before."""
    num_samples: int | None = None
    """Evaluated over all ranks; None for data of unknown length."""
    left_out: int = 0
    """Samples of the split that are not."""
    side: SideStream | None = None
    """Stream on which batches are copied while others are evaluated."""
    caches: bool = False
    """Prepare the batches once, and keep them."""

    def __post_init__(self) -> None:
        self._cached: list[MicroBatch] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._cached is not None:
            return iter(self._cached)
        steps = self.batches.steps(0, self.num_steps)
        batches = (micro_batch for step in steps for micro_batch in step.micro_batches)
        if self.caches:
            # Tensors made under inference mode would be refused by any later use that needs gradients.
            with torch.inference_mode(False):
                self._cached = list(batches)
            return iter(self._cached)
        return batches if self.side is None else prefetched(batches, self.side)

    def close(self) -> None:
        self.batches.close()


def build_eval_loader(
    source: Source,
    info: DataInfo,
    loading: ReaderOptions,
    *,
    batch_size: int,
    rank: int = 0,
    num_ranks: int = 1,
    drop_last: bool = False,
    side: SideStream | None = None,
) -> EvaluationLoader:
    """The evaluation loader of one rank: a run of consecutive samples, in order, nothing twice.

    Args:
        loading: as for training. Samples that are not in memory are read by worker processes for the kinds
            `auto` and `workers`.
        batch_size: samples of one forward pass on this rank.
        drop_last: leave out the samples at the split's end that make no whole batch. Ranks then share out
            batches, so that the same samples are left out for any number of them.

    Raises:
        ConfigError: C011 for a last batch to be left out of a stream, whose end nobody knows.
        DataError: D006 where nothing would be left.
    """
    prepare = build_prepare(source, info, loading)
    if isinstance(source, IterableSource):
        if drop_last:
            what, hint = "the last batch of a stream is not known beforehand", "Set eval.last=keep"
            raise ConfigError("C011", what, key="eval.last", value="drop", suggestion=hint)
        # A held-out split may well have fewer shards than the training data that the workers are for.
        workers = source.readers_at_most(count_workers(loading.workers), num_ranks)
        kind = loading.kind if loading.kind == "workers" else "plain"
        sharding = Sharding(BatchPlan(None, constant(batch_size * num_ranks)), num_ranks, rank, num_ranks)
        how = replace(loading, kind=kind, workers=workers)
        return EvaluationLoader(build_stream_batches(source, prepare, sharding, how, once=True), side=side)
    size = len(source)
    counted = size // batch_size * batch_size if drop_last else size
    if not counted and size:
        what = (
            f"{size:,} held-out samples do not fill a batch of {batch_size:,}, and smaller ones are dropped"
        )
        hint = f"Set eval.last=keep or eval.batch_size={max(1, size // 2)}, say"
        raise DataError("D006", what, key="eval.last", value="drop", suggestion=hint)
    order = InOrder(counted, batch_size, rank, num_ranks, unit=batch_size if drop_last else 1)
    fetch: Any = RawBatches(source, Augment())
    if isinstance(source, TensorSource):
        held = source
        # Neighbours need no copy.
        fetch = lambda share: held.slice(int(share.indices[0]), int(share.indices[-1]) + 1)  # noqa: E731
    elif loading.kind in ("auto", "workers") and not source.in_memory:
        workers = count_workers(loading.workers)
        fetch = loading.pool(fetch, workers) if workers else fetch
    return EvaluationLoader(
        SampledBatches(order.step, prepare, fetch),
        order.num_steps,
        num_samples=counted,
        left_out=size - counted,
        side=side,
        caches=isinstance(source, TensorSource) and source.prepared_bytes <= CACHE_LIMIT_BYTES,
    )
