"""Evaluation loaders: a split in order, each sample once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo, MicroBatch
from ptfast.data.dataset import Source
from ptfast.data.loaders.loader_choice import count_workers
from ptfast.data.loaders.loading import Prepare, ReaderOptions, SideStream, build_prepare, prefetched
from ptfast.data.loaders.step_batches import RawBatches
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.map_source import MapSource, TensorSource
from ptfast.data.sampling.sampler import Share
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.stream_loaders import StreamEvaluation, build_stream_evaluation
from ptfast.data.transforms.augment.augment_plan import Augment

CACHE_LIMIT_BYTES = 128 * 2**20
"""Splits in memory that take no more than this once normalised are prepared once and cached."""


@dataclass(frozen=True)
class EvaluationLoader:
    """One rank's share of an evaluation split."""

    batches: SplitBatches | StreamEvaluation
    num_samples: int | None
    """Evaluated over all ranks; None for data of unknown length."""
    left_out: int
    """Samples of the split that are not."""
    side: SideStream | None
    """Stream on which batches are copied while others are evaluated."""

    def __iter__(self) -> Iterator[MicroBatch]:
        batches = iter(self.batches)
        return batches if self.side is None else prefetched(batches, self.side)

    def close(self) -> None:
        """Stop the worker processes of an evaluation that was broken off."""
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

    Ranks yield the same number of batches; where one has fewer samples, the last is a stand-in of no samples.

    Args:
        loading: as for training. Samples that are not in memory are read by worker processes for the kinds
            `auto` and `workers`.
        batch_size: samples of one forward pass on this rank.
        drop_last: leave out the samples at the split's end that make no whole batch. Ranks then share out
            batches, so that the same samples are left out for any number of them.
        side: as of `EvaluationLoader`.

    Raises:
        ConfigError: C011 for a last batch to be left out of a stream, whose end nobody knows.
        DataError: D006 where nothing would be left.
    """
    prepare = build_prepare(source, info, loading)
    if isinstance(source, IterableSource):
        if drop_last:
            what, hint = "the last batch of a stream is not known beforehand", "Set eval.last=keep"
            raise ConfigError("C011", what, key="eval.last", value="drop", suggestion=hint)
        batches = build_stream_evaluation(
            source, prepare, loading, batch_size=batch_size, rank=rank, num_ranks=num_ranks
        )
        return EvaluationLoader(batches, None, 0, side)
    size = len(source)
    counted = size // batch_size * batch_size if drop_last else size
    if not counted and size:
        what = (
            f"{size:,} held-out samples do not fill a batch of {batch_size:,}, and smaller ones are dropped"
        )
        hint = f"Set eval.last=keep or eval.batch_size={max(1, size // 2)}, say"
        raise DataError("D006", what, key="eval.last", value="drop", suggestion=hint)
    # What ranks share out: samples, or whole batches.
    unit = batch_size if drop_last else 1
    start, stop = (r * (counted // unit) // num_ranks * unit for r in (rank, rank + 1))
    shares = [
        Share(0, np.arange(i, min(i + batch_size, stop)), min(batch_size, stop - i))
        for i in range(start, stop, batch_size)
    ]
    if num_ranks > 1:
        # Ranks that have to go through a model together all go through it as often.
        most = -(-counted // unit // num_ranks) * unit
        shares += [Share(0, np.arange(1), 0)] * (-(-most // batch_size) - len(shares))
    workers = 0
    if loading.kind in ("auto", "workers") and not source.in_memory:
        workers = count_workers(loading.workers)
    pool = loading.pool(RawBatches(source, Augment(), 0), workers) if workers else None
    return EvaluationLoader(SplitBatches(source, prepare, shares, pool), counted, size - counted, side)


class SplitBatches:
    """The batches of a split that is read by index.

    Args:
        shares: of this rank.
        pool: processes that fetch; None for this one.
    """

    def __init__(
        self, source: MapSource, prepare: Prepare, shares: list[Share], pool: WorkerPool | None
    ) -> None:
        self._source, self._prepare, self._shares, self.pool = source, prepare, shares, pool
        self._caches = isinstance(source, TensorSource) and source.prepared_bytes <= CACHE_LIMIT_BYTES
        self._cached: list[MicroBatch] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._caches and self._cached is None:
            # Tensors made under inference mode would be refused by any later use that needs gradients.
            with torch.inference_mode(False):
                self._cached = list(self._prepared())
        return self._prepared() if self._cached is None else iter(self._cached)

    def close(self) -> None:
        """Stop the worker processes."""
        if self.pool is not None:
            self.pool.close()

    def _prepared(self) -> Iterator[MicroBatch]:
        source = self._source
        if isinstance(source, TensorSource):
            raw: Iterator[Any] = (
                source.slice(int(s.indices[0]), int(s.indices[-1]) + 1) for s in self._shares
            )
        elif self.pool is not None:
            raw = self.pool.fetch(self._shares)
        else:
            raw = (source.fetch(share.indices) for share in self._shares)
        for batch, share in zip(raw, self._shares, strict=True):
            yield self._prepare.micro_batch(batch, share)
