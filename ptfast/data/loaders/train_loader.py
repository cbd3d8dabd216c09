"""Training loaders: batches as a pure function of (seed, step), the same bits from every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import torch

from ptfast.core.batch_plan import BatchPlan, Stages, constant
from ptfast.core.machine import available_memory
from ptfast.core.protocols import MicroBatch, StepBatch, TrainLoader
from ptfast.data.dataset import Data, TensorSource, as_tensor
from ptfast.data.loaders.device_loader import build_device_loader
from ptfast.data.loaders.fetch import AugmentedStream, MemoryBatches, RawBatches
from ptfast.data.loaders.loader_choice import HELD, choose, count_workers
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.loaders.to_device import Prepare, build_prepare
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.sampling.length_buckets import LengthPlan
from ptfast.data.sampling.sampler import Sampler, Share
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.stream_loaders import build_stream_loader
from ptfast.data.transforms.augment import build_augment

STATIC_LIMIT_BYTES = 512 * 2**20
"""Data that takes no more than this once normalised is normalised up front."""
CHUNK_BYTES = 64 * 2**20


def build_train_loader(
    data: Data,
    *,
    task_name: str,
    batch_size: int,
    micro_batches: int,
    rank: int,
    num_ranks: int,
    seed: int,
    augment: Any,
    normalize: bool,
    kind: str,
    workers: int | str,
    prefetch: int,
    pin: bool | str,
    last: str,
    device: torch.device,
    channels_last: bool,
    sizes: Stages | None = None,
    by_length: LengthPlan | None = None,
    worker_threads: int = 1,
    reason: str = "as the config says",
) -> TrainLoader:
    """The training loader of one rank.

    Args:
        task_name: what the run calls its task, for messages.
        batch_size: samples of an optimizer step over all ranks.
        micro_batches: parts of a batch over all ranks.
        augment: mapping or object of the fields of `Augment`.
        kind: `auto`, or `plain` (fetch in this process), `workers` (processes fetch whole micro-batches),
            `memory` (everything decoded in memory, batches gathered and augmented at once), `device` (the
            same on the training device), `packed` (as `plain`, from memory-mapped files).
        workers: processes of the kind `workers`, or `auto` for the cores to spare.
        prefetch: micro-batches that each worker prepares ahead.
        worker_threads: of each worker process.
        last: `keep` or `drop` a short last batch of an epoch, or `pad` it.
        reason: for `kind`, for the panel.
        sizes: samples of an optimizer step by step, where they grow to `batch_size`.
        by_length: what makes batches up where it goes by the samples' length.

    Raises:
        ConfigError: C011 if images are to be augmented and the data has none, or for a kind that iterable
            data cannot have.
        DataError: D002 or D006 if there are too few samples.
    """
    source = data.train
    wanted = build_augment(augment, data.info, images=source.images, task_name=task_name, normalize=normalize)
    prepare = build_prepare(
        source, data.info, device=device, normalize=normalize, channels_last=channels_last, pin=pin
    )
    if isinstance(source, IterableSource):
        return build_stream_loader(
            source,
            prepare,
            BatchPlan(None, sizes or constant(batch_size)),
            micro_batches=micro_batches,
            kind=kind,
            workers=count_workers(workers),
            rank=rank,
            num_ranks=num_ranks,
            last=last,
            prefetch=prefetch,
            threads=worker_threads,
            augment=AugmentedStream(wanted, seed) if wanted else None,
        )
    sampler = Sampler(
        len(source),
        batch_size=batch_size,
        micro_batches=micro_batches,
        rank=rank,
        num_ranks=num_ranks,
        seed=seed,
        last=last,
        sizes=sizes,
        by_length=by_length,
        order=partial(data.order, seed),
    )
    if kind == "auto":
        share = batch_size // micro_batches
        kind, reason, workers = choose(
            source, kind=kind, workers=workers, prefetch=prefetch, micro_batch_size=share
        )
    num_workers = count_workers(workers) if kind == "workers" else 0
    if num_workers > 0:
        pool = WorkerPool(
            RawBatches(source, wanted, seed), num_workers, prefetch, pin=prepare.pin, threads=worker_threads
        )
        who = f"{num_workers} process{'es' * (num_workers > 1)}"
        who += f" of {worker_threads} threads" if worker_threads > 1 else ""
        return WorkerLoader(sampler, prepare, pool, f"{who}, {reason}")
    if kind in HELD and not source.in_memory:
        source = source.hold().source
    if kind == "device":
        return build_device_loader(sampler, prepare, source, wanted, device, reason)
    if kind == "memory" and isinstance(source, TensorSource):
        if not wanted and source.prepared_bytes <= STATIC_LIMIT_BYTES:
            return StaticLoader(sampler, prepare, source, reason)
        if wanted and wanted.resized_crop is None:
            holder = data.holder or Holder()
            if holder.agree(MemoryBatches.nbytes(source, wanted) <= available_memory() // 2):
                batches = MemoryBatches(source, wanted, seed, holder)
                return StepLoader(sampler, prepare, batches, kind, reason)
            reason += "; no room for padded copies"
    return StepLoader(sampler, prepare, RawBatches(source, wanted, seed), kind, reason)


class StepLoader:
    """Prepares each batch when its step is due."""

    workers = 0

    def __init__(
        self, sampler: Sampler, prepare: Prepare, batches: Callable[[Share], Any], kind: str, reason: str
    ) -> None:
        self.plan = sampler.plan
        self.kind, self.reason = kind, reason
        self._sampler, self._prepare, self._batches = sampler, prepare, batches

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` up to, not including, `last_step`."""
        micro_batch, batches = self._prepare.micro_batch, self._batches
        for step in range(first_step, last_step):
            shares, num_samples = self._sampler.step(step)
            yield StepBatch(tuple([micro_batch(batches(share), share) for share in shares]), num_samples)

    def close(self) -> None:
        """Nothing to stop."""


class WorkerLoader:
    """Takes raw batches from worker processes, in the order of the steps."""

    kind = "workers"

    def __init__(self, sampler: Sampler, prepare: Prepare, pool: WorkerPool, reason: str) -> None:
        self.plan = sampler.plan
        self.reason, self.workers = reason, pool.workers
        self._sampler, self._prepare, self._pool = sampler, prepare, pool

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` up to, not including, `last_step`."""
        # The workers are ahead: what their steps consist of is kept until it is due here.
        ahead, due = tee(map(self._sampler.step, range(first_step, last_step)))
        raw_batches = self._pool.fetch(share for shares, _ in ahead for share in shares)
        for shares, num_samples in due:
            micro_batches = [self._prepare.micro_batch(next(raw_batches), share) for share in shares]
            yield StepBatch(tuple(micro_batches), num_samples)

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.close()


class StaticLoader:
    """Batches of small data that never changes: normalised once, gathered many steps at a time.

    One gather and one split serve up to 64 MB of batches, so that a step costs about a microsecond; on a GPU
    the data lives there.
    """

    kind = "memory"
    workers = 0

    def __init__(self, sampler: Sampler, prepare: Prepare, source: TensorSource, reason: str) -> None:
        self.plan = sampler.plan
        self.reason = reason
        self._sampler, self._prepare = sampler, prepare
        inputs = prepare.inputs(source.inputs)
        self._targets = prepare.move(source.targets)
        # Rows are gathered from contiguous memory and only looked at as channels first.
        self._permuted = prepare.channels_last and inputs.dim() == 4
        self._inputs = inputs.permute(0, 2, 3, 1).contiguous() if self._permuted else inputs.contiguous()
        step_bytes = max(1, sampler.batch_size * self._inputs[0].numel() * self._inputs.element_size())
        self._chunk_steps = max(1, min(1024, CHUNK_BYTES // step_bytes))

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` up to, not including, `last_step`."""
        step = first_step
        while step < last_step:
            start, batches = self._chunk(step)
            yield from batches[step - start : last_step - start]
            step = start + len(batches)

    def _chunk(self, step: int) -> tuple[int, list[StepBatch]]:
        """First step and batches of the chunk that holds `step`; chunks begin at fixed places in an epoch."""
        _, first, end = self.plan.epoch_of(step)
        start = step - (step - first) % self._chunk_steps
        stop = min(start + self._chunk_steps, end)
        plan = [self._sampler.step(s) for s in range(start, stop)]
        shares = [share for step_shares, _ in plan for share in step_shares]
        index_parts, sizes, stride = _aligned(shares)
        index = self._prepare.move(as_tensor(np.concatenate(index_parts)))
        inputs = self._inputs.index_select(0, index)
        if self._permuted:
            inputs = inputs.permute(0, 3, 1, 2)
        pieces = zip(
            inputs.split(sizes)[::stride],
            self._targets.index_select(0, index).split(sizes)[::stride],
            strict=True,
        )
        return start, [
            StepBatch(tuple([MicroBatch(next(pieces), share.num_samples) for share in shares]), num_samples)
            for shares, num_samples in plan
        ]

    def close(self) -> None:
        """Nothing to stop."""


def _aligned(shares: list[Share]) -> tuple[list[np.ndarray], list[int], int]:
    """Index parts with their sizes, every share beginning at a multiple of 16 rows, and the stride of shares.

    Kernels may sum in another order where memory is aligned otherwise; 16 rows of any width are whole cache
    lines, as a tensor of its own would be.
    """
    sizes = [len(share.indices) for share in shares]
    parts = [share.indices for share in shares]
    if all(size % 16 == 0 for size in sizes[:-1]):
        return parts, sizes, 1
    fillers = [np.zeros(-size % 16, np.int64) for size in sizes]
    return (
        [part for pair in zip(parts, fillers, strict=True) for part in pair],
        [size for part_size in sizes for size in (part_size, -part_size % 16)],
        2,
    )
