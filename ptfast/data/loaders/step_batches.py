"""The step batches of a rank: fetched when due, by workers, or gathered many steps at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee
from typing import Any, cast

import numpy as np
from torch import Tensor

from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.data.loaders.loading import Prepare
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sampling.sampler import InOrder, MicroBatchIndices, Sampler
from ptfast.data.sources.image_files import ImageFiles
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.row_windows import augmented, cropped

CHUNK_BYTES = 64 * 2**20
"""Bytes of normalized data that are gathered at once from memory."""


StepIndices = Callable[[int], tuple[list[MicroBatchIndices], int]]
"""A rank's micro-batches at a step, before they are fetched, and the samples of the whole step."""


class Batches:
    """The batches of one rank, a pure function of the step. Subclasses give `steps`."""

    indices_at: StepIndices | None = None
    """The samples of each step; None for a stream."""
    prepare: Prepare | None = None
    """Makes the batches ready for the model; None where they are."""
    pools: Sequence[WorkerPool] = ()
    workers = 0
    """Processes of all pools, which read the batches."""

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` (from 0, over epochs) up to, not including, `last_step`."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the worker processes."""
        for pool in self.pools:
            pool.close()


class SampledBatches(Batches):
    """Batches of samples by index. `source` is told which files could not be read."""

    def __init__(
        self,
        sampler: Sampler | InOrder,
        prepare: Prepare,
        fetch: Callable[[MicroBatchIndices], Any] | WorkerPool,
        source: MapSource,
    ) -> None:
        self.indices_at, self._sampler, self.prepare = sampler.step, sampler, prepare
        self._fetch = fetch.fetch if isinstance(fetch, WorkerPool) else partial(map, fetch)
        if isinstance(fetch, WorkerPool):
            self.pools, self.workers = [fetch], fetch.workers
        skips = isinstance(source, ImageFiles) and source.skips
        self._note_unreadable = cast(ImageFiles, source).note_unreadable if skips else None

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        # Workers take micro-batches some steps before their batch is due.
        early, due = tee(self._sampler.steps(first_step, last_step))
        raw_batches = self._fetch(micro_batch for micro_batches, _ in early for micro_batch in micro_batches)
        for micro_batches, num_samples in due:
            fetched: list[MicroBatch] = []
            for micro_batch in micro_batches:
                raw = next(raw_batches)
                if self._note_unreadable is not None:
                    self._note_unreadable(micro_batch.indices, raw[1])
                fetched.append(MicroBatch(raw, micro_batch.num_samples))
            yield StepBatch(tuple(fetched), num_samples)


class ChunkedBatches(Batches):
    """Batches gathered many steps at a time. Subclasses give `_gather`."""

    def __init__(self, sampler: Sampler, prepare: Prepare, sample_bytes: int) -> None:
        self.sampler, self.indices_at, self._prepare = sampler, sampler.step, prepare
        step_bytes = max(1, sampler.batch_size * sample_bytes)
        self._chunk_steps = max(1, min(1024, CHUNK_BYTES // step_bytes))

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        step = first_step
        while step < last_step:
            _, first, end = self.sampler.plan.epoch_of(step)
            # Chunks begin at fixed places in an epoch.
            start = step - (step - first) % self._chunk_steps
            stop = min(start + self._chunk_steps, end)
            plan = self._planned(start, stop)
            pieces = self._gather(
                [micro_batch for micro_batches, _ in plan for micro_batch in micro_batches], start
            )
            batches: list[StepBatch] = []
            for micro_batches, num_samples in plan:
                ready = [MicroBatch(next(pieces), micro_batch.num_samples) for micro_batch in micro_batches]
                batches.append(StepBatch(tuple(ready), num_samples))
            yield from batches[step - start : last_step - start]
            step = stop

    def _planned(self, start: int, stop: int) -> list[tuple[list[MicroBatchIndices], int]]:
        """The micro-batches of the steps from `start` to `stop`, all of one epoch."""
        return [self.sampler.step(step) for step in range(start, stop)]

    def _gather(
        self, micro_batches: list[MicroBatchIndices], first_step: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of each micro-batch, in their order from `first_step` on."""
        raise NotImplementedError


class StaticBatches(ChunkedBatches):
    """Batches of small, unaugmented data, normalized once and kept on the device.

    One gather and one split serve up to 64 MB of batches: a step costs about a microsecond.
    """

    def __init__(self, sampler: Sampler, prepare: Prepare, source: TensorSource) -> None:
        inputs = prepare.inputs(source.inputs)
        super().__init__(sampler, prepare, inputs[0].numel() * inputs.element_size())
        self._targets = prepare.move(source.targets)
        # Rows are gathered from contiguous memory; channels first is only a view.
        self._permuted = prepare.channels_last and inputs.dim() == 4
        self._inputs = inputs.permute(0, 2, 3, 1).contiguous() if self._permuted else inputs.contiguous()

    def _gather(
        self, micro_batches: list[MicroBatchIndices], first_step: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        parts, stride = [micro_batch.indices for micro_batch in micro_batches], 1
        if any(len(part) % 16 for part in parts[:-1]):
            # Kernels may sum in another order where memory is aligned otherwise: each micro-batch begins at a
            # multiple of 16 rows, which are whole cache lines, as in a tensor of its own.
            stride = 2
            parts = [each for part in parts for each in (part, np.zeros(-len(part) % 16, np.int64))]
        sizes = [len(part) for part in parts]
        index = self._prepare.move(as_tensor(np.concatenate(parts)))
        inputs, targets = self._inputs.index_select(0, index), self._targets.index_select(0, index)
        if self._permuted:
            inputs = inputs.permute(0, 3, 1, 2)
        return zip(inputs.split(sizes)[::stride], targets.split(sizes)[::stride], strict=True)


@dataclass
class RawBatches:
    """Fetches a micro-batch from the source and augments it; worker processes get a copy of it."""

    source: MapSource
    augment: Augment

    def __call__(self, micro_batch: MicroBatchIndices) -> Any:
        source, places = self.source, micro_batch.indices
        if self.augment.resized_crop is None:
            raw = source.fetch(places, micro_batch.epoch)
            return augmented(self.augment, raw, micro_batch) if self.augment else raw
        if not source.cuts:
            source = TensorSource(*source.fetch(places, micro_batch.epoch), images=True)
            places = np.arange(len(places))
        return cropped(self.augment, source, micro_batch, places)
