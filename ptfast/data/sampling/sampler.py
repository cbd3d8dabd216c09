"""Which samples make up which step: a pure function of (seed, step), so that resuming needs no replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.errors import DataError
from ptfast.data.sampling import counter_draws

Indices = NDArray[np.int64]


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> Indices:
    """The order of `size` samples in `epoch`: int64, read-only.

    Sorting random bits with the index in their low end does not depend on the sorting algorithm or numpy's
    generators, and is faster than an argsort (15 ms for a million samples).
    """
    index_bits = np.uint64(max(size - 1, 1).bit_length())
    indices = np.arange(size, dtype=np.uint64)
    keys = counter_draws.bits(seed, epoch, indices, counter_draws.ORDER) >> index_bits << index_bits
    keys |= indices
    keys.sort()
    keys &= (np.uint64(1) << index_bits) - np.uint64(1)
    order = keys.view(np.int64)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=64)
def micro_batch_bounds(num_samples: int, micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Split `num_samples` evenly into `micro_batches` runs (start, stop); some empty if there are too few."""
    return tuple(pairwise(m * num_samples // micro_batches for m in range(micro_batches + 1)))


def smallest_micro_batch(batches: set[int], micro_batches: int) -> int:
    """Samples in the smallest micro-batch that is not empty, for batches of these sizes."""
    sizes = (stop - start for batch in batches for start, stop in micro_batch_bounds(batch, micro_batches))
    return min((size for size in sizes if size), default=0)


class MicroBatchIndices(NamedTuple):
    """One micro-batch of one rank, before it is fetched."""

    epoch: int
    indices: Indices
    num_samples: int
    """0 where the micro-batch is empty and `indices` names a stand-in sample."""


@dataclass(frozen=True)
class Sharding:
    """How each step's batch is divided into micro-batches, and which of them one rank gets."""

    plan: BatchPlan
    micro_batches: int
    """Of a step over all ranks, a multiple of `world_size`."""
    rank: int = 0
    world_size: int = 1

    @cached_property
    def per_rank(self) -> int:
        return self.micro_batches // self.world_size

    @cached_property
    def first(self) -> int:
        """Number, within a step, of this rank's first micro-batch."""
        return self.rank * self.per_rank

    def micro_batches_of(self, epoch: int, batch: Indices) -> list[MicroBatchIndices]:
        """This rank's micro-batches of a step; an empty one gets a stand-in sample for the collectives."""
        bounds = micro_batch_bounds(len(batch), self.micro_batches)[self.first : self.first + self.per_rank]
        return [
            MicroBatchIndices(epoch, batch[start:stop], stop - start)
            if stop > start
            else MicroBatchIndices(epoch, batch[:1], 0)
            for start, stop in bounds
        ]


class Sampler:
    """The micro-batches of one rank at every step; all samples are shuffled unless `order` says otherwise.

    Raises:
        DataError: D002 without samples, D006 if every batch would be dropped.
    """

    def __init__(
        self, sharding: Sharding, seed: int, order: Callable[[int], Indices | None] = lambda epoch: None
    ) -> None:
        self.plan, self.seed = sharding.plan, seed
        size, self.batch_size = self.plan.size, self.plan.batch_size
        if not size:
            raise DataError("D002", "the training split has no samples", key="data")
        if not self.plan.steps_per_epoch:
            what = f"{size:,} training samples do not fill one batch, and dataloader.drop_last=true drops it"
            hint = f"Use batch_size={size} or less, or dataloader.drop_last=false"
            raise DataError("D006", what, key="batch_size", value=self.batch_size, suggestion=hint)
        self.size, self._sharding = size, sharding
        self._source_order = order
        # Batches that are read ahead may be of the next epoch.
        self._order_of = lru_cache(maxsize=2)(self._order)

    def steps(self, first_step: int, last_step: int) -> Iterator[tuple[list[MicroBatchIndices], int]]:
        return map(self.step, range(first_step, last_step))

    def step(self, step: int) -> tuple[list[MicroBatchIndices], int]:
        """This rank's micro-batches at `step` (from 0, over epochs), and the samples of the whole step."""
        epoch, start, stop = self.plan.batch(step)
        order = self._order_of(epoch)
        batch = order[start:stop]
        if stop > self.size:
            batch = order.take(np.arange(start, stop), mode="wrap")
        return self._sharding.micro_batches_of(epoch, batch), len(batch)

    def _order(self, epoch: int) -> Indices:
        order = self.plan.order(epoch)
        if order is None:
            order = self._source_order(epoch)
        return permutation(self.seed, epoch, self.size) if order is None else order


class InOrder:
    """The micro-batches of one rank of an evaluation: consecutive samples, each once, a micro-batch a step.

    Ranks share out `size` samples in pieces of `unit`, of which the last may be smaller. All have the same
    number of steps.
    """

    def __init__(self, size: int, batch_size: int, rank: int, world_size: int, unit: int = 1) -> None:
        pieces = -(-size // unit)
        self._start, self._stop = (min(r * pieces // world_size * unit, size) for r in (rank, rank + 1))
        self._batch_size = batch_size
        most = -(-pieces // world_size) * unit
        self.num_steps = -(-most // batch_size)

    def steps(self, first_step: int, last_step: int) -> Iterator[tuple[list[MicroBatchIndices], int]]:
        return map(self.step, range(first_step, last_step))

    def step(self, step: int) -> tuple[list[MicroBatchIndices], int]:
        start = self._start + step * self._batch_size
        indices = np.arange(start, min(start + self._batch_size, self._stop))
        micro_batch = (
            MicroBatchIndices(0, indices, len(indices))
            if len(indices)
            else MicroBatchIndices(0, np.arange(1), 0)
        )
        return [micro_batch], micro_batch.num_samples
