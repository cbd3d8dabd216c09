"""Evaluation loaders: a split in order, each sample once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo, EvalLoader, MicroBatch
from ptfast.data.dataset import Source, TensorSource
from ptfast.data.loaders.fetch import RawBatches
from ptfast.data.loaders.loader_choice import count_workers
from ptfast.data.loaders.to_device import build_prepare
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.sampling.sampler import Share
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.stream_loaders import build_stream_evaluation
from ptfast.data.transforms.augment import Augment

KEEP_LIMIT_BYTES = 128 * 2**20
"""Splits in memory that take no more than this once normalised are prepared once and kept."""


def build_eval_loader(
    source: Source,
    info: DataInfo,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
    device: torch.device,
    normalize: bool,
    channels_last: bool,
    kind: str = "plain",
    workers: int | str = 0,
    prefetch: int = 2,
    pin: bool | str = "auto",
    worker_threads: int = 1,
    drop_last: bool = False,
) -> EvalLoader:
    """The evaluation loader of one rank: a run of consecutive samples, in order, nothing twice.

    Ranks yield the same number of batches; where one has fewer samples, the last is a stand-in of no samples.

    Args:
        batch_size: samples of one forward pass on this rank.
        drop_last: leave out the samples at the split's end that make no whole batch. Ranks then share out
            batches, so that the same samples are left out for any number of them.
        kind, workers, prefetch, pin, worker_threads: as for the training loader. Samples that are not in
            memory are read by worker processes for the kinds `auto` and `workers`.

    Raises:
        ConfigError: C011 for a last batch to be left out of a stream, whose end nobody knows.
        DataError: D006 where nothing would be left.
    """
    prepare = build_prepare(
        source, info, device=device, normalize=normalize, channels_last=channels_last, pin=pin
    )
    if isinstance(source, IterableSource):
        if drop_last:
            what, hint = "the last batch of a stream is not known beforehand", "Set eval.last=keep"
            raise ConfigError("C011", what, key="eval.last", value="drop", suggestion=hint)
        return build_stream_evaluation(
            source,
            prepare,
            batch_size=batch_size,
            kind=kind if kind == "workers" else "plain",
            workers=count_workers(workers),
            rank=rank,
            num_ranks=num_ranks,
            prefetch=prefetch,
            threads=worker_threads,
        )
    size = len(source)
    counted = size // batch_size * batch_size if drop_last else size
    if not counted and size:
        what = f"{size:,} held-out samples make no batch of {batch_size:,}, and smaller ones are left out"
        hint = f"Set eval.last=keep or eval.batch_size={max(1, size // 2)}, say"
        raise DataError("D006", what, key="eval.last", value="drop", suggestion=hint)
    # What ranks share out: samples, or whole batches.
    unit = batch_size if drop_last else 1
    start, stop = (r * (counted // unit) // num_ranks * unit for r in (rank, rank + 1))
    most = -(-counted // unit // num_ranks) * unit
    return _EvalLoader(
        source,
        prepare,
        counted,
        size - counted,
        start,
        stop,
        batch_size,
        -(-most // batch_size) if num_ranks > 1 else 0,
        count_workers(workers) if kind in ("auto", "workers") and not source.in_memory else 0,
        prefetch,
        worker_threads,
    )


class _EvalLoader:
    def __init__(
        self,
        source: Source,
        prepare: Any,
        num_samples: int,
        left_out: int,
        start: int,
        stop: int,
        batch_size: int,
        num_batches: int,
        workers: int,
        prefetch: int,
        worker_threads: int,
    ) -> None:
        self.num_samples, self.left_out = num_samples, left_out
        self._source, self._prepare = source, prepare
        self._shares = [
            Share(0, np.arange(i, min(i + batch_size, stop)), min(batch_size, stop - i))
            for i in range(start, stop, batch_size)
        ]
        # Where ranks have to go through a model together, all go through it as often.
        self._shares += [Share(0, np.arange(1), 0)] * (num_batches - len(self._shares))
        self._pool: WorkerPool | None = None
        if workers:
            self._pool = WorkerPool(
                RawBatches(source, Augment(), 0), workers, prefetch, pin=prepare.pin, threads=worker_threads
            )
        self._keep = isinstance(source, TensorSource) and source.prepared_bytes <= KEEP_LIMIT_BYTES
        self._kept: list[MicroBatch] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._kept is not None:
            return iter(self._kept)
        if self._keep:
            # Tensors made under inference mode would be refused by any later use that needs gradients.
            with torch.inference_mode(False):
                self._kept = list(self._batches())
            return iter(self._kept)
        return self._batches()

    def close(self) -> None:
        """Stop the worker processes of an evaluation that was broken off."""
        if self._pool is not None:
            self._pool.close()

    def _batches(self) -> Iterator[MicroBatch]:
        source = self._source
        if isinstance(source, TensorSource):
            raw: Iterator[Any] = (
                source.slice(int(s.indices[0]), int(s.indices[-1]) + 1) for s in self._shares
            )
        elif self._pool is not None:
            raw = self._pool.fetch(self._shares)
        else:
            raw = (source.fetch(share.indices) for share in self._shares)
        for batch, share in zip(raw, self._shares, strict=True):
            yield self._prepare.micro_batch(batch, share)
