"""Which samples make up which step: a pure function of (seed, step), so that resuming needs no replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ptfast.core.batch_plan import BatchPlan, Stages, constant
from ptfast.core.errors import DataError
from ptfast.data.sampling.order import Indices, micro_batch_bounds, permutation

if TYPE_CHECKING:
    from ptfast.data.sampling.length_buckets import LengthPlan


def smallest_micro_batch(batches: set[int], micro_batches: int) -> int:
    """Samples in the smallest micro-batch that is not empty, of batches of these sizes.

    BatchNorm cannot train on one sample: the runner refuses such a run before it starts.
    """
    sizes = (stop - start for batch in batches for start, stop in micro_batch_bounds(batch, micro_batches))
    return min((size for size in sizes if size), default=0)


class Share(NamedTuple):
    """One micro-batch of one rank, before it is fetched."""

    epoch: int
    indices: Indices
    num_samples: int
    """0 where the share is empty and `indices` names a stand-in sample."""


class Sampler:
    """The shares of one rank at every step.

    Args:
        size: samples in the data set.
        batch_size: samples of one optimizer step over all ranks.
        micro_batches: parts that a batch is cut into, a multiple of `num_ranks`; rank r takes its run of them
            in order.
        last: `keep` or `drop` the last batch of an epoch where it is short, or `pad` it with the samples that
            the epoch began with.
        sizes: samples of a step by step, where they grow to `batch_size`.
        by_length: what makes batches up instead, where it goes by the samples' length.

        order: the order of the samples in an epoch, where they are not shuffled as a whole.

    Raises:
        DataError: D002 without samples, D006 if every batch would be dropped.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        micro_batches: int,
        rank: int,
        num_ranks: int,
        seed: int,
        last: str,
        sizes: Stages | None = None,
        by_length: LengthPlan | None = None,
        order: Callable[[int], Indices | None] = lambda epoch: None,
    ) -> None:
        if size == 0:
            raise DataError("D002", "the training split has no samples", key="data")
        if micro_batches % num_ranks:
            raise ValueError(f"{micro_batches} micro-batches do not divide over {num_ranks} ranks")
        self.plan = by_length or BatchPlan(size, sizes or constant(batch_size), last)
        if not self.plan.steps_per_epoch:
            raise DataError(
                "D006",
                f"{size:,} training samples do not fill one batch, and dataloader.last=drop drops it",
                key="batch_size",
                value=batch_size,
                suggestion=f"Use batch_size={size} or less, or dataloader.last=keep",
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self._order = by_length.order if by_length is not None else self._shuffled
        self._own_order = lru_cache(maxsize=2)(order)
        per_rank = micro_batches // num_ranks
        self._micro_batches, self._mine = micro_batches, slice(rank * per_rank, (rank + 1) * per_rank)
        self._full_bounds = micro_batch_bounds(batch_size, micro_batches)[self._mine]

    def step(self, step: int) -> tuple[list[Share], int]:
        """This rank's shares at `step` (counted from 0, over epochs), and the samples of the whole step."""
        epoch, start, stop = self.plan.batch(step)
        batch = self._order(epoch)[start:stop]
        if stop > self.size:
            batch = self._order(epoch).take(np.arange(start, stop), mode="wrap")
        bounds = self._full_bounds
        if len(batch) != self.batch_size:
            bounds = micro_batch_bounds(len(batch), self._micro_batches)[self._mine]
        # An empty share still runs one sample, so that the ranks' collectives stay in step.
        shares = [
            Share(epoch, batch[start:stop], stop - start) if stop > start else Share(epoch, batch[:1], 0)
            for start, stop in bounds
        ]
        return shares, len(batch)

    def _shuffled(self, epoch: int) -> Indices:
        order = self._own_order(epoch)
        return permutation(self.seed, epoch, self.size) if order is None else order
