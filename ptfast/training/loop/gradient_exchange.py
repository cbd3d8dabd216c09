"""Combine the gradients of a step over ranks: not at all on one rank, averaged, or summed in one order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ptfast.core.protocols import StepBatch
from ptfast.core.tensors.torch_internals import after_backward
from ptfast.run import Run
from ptfast.techniques.parallel.ordered_sums import OrderedSums
from ptfast.techniques.parallel.sync_batchnorm import RunningStatistics

if TYPE_CHECKING:
    from ptfast.training.loop.accumulation import Accumulator

_nothing: AbstractContextManager[Any] = nullcontext()


class OneRank:
    """The gradients of a run on one rank, which needs no exchange."""

    is_local = True
    """Whether the samples of this rank are all samples of the step."""
    averaged_ranks = 1
    """Number of ranks over which gradients are averaged; 1 for sums."""

    def accumulate(self, batch: StepBatch, to: Accumulator) -> None:
        """Let `to` accumulate the gradients of each micro-batch, and combine them over the ranks."""
        for index, (_, num_samples) in enumerate(batch.micro_batches):
            if num_samples:
                to.micro_batch(batch, index)

    def merge_statistics(self) -> None:
        """Merge BatchNorm's running statistics over the ranks, after the backward passes of a step."""

    def reread_statistics(self) -> None:
        """Accept the model's statistics as the merged ones, after a skipped step has restored them."""


class AveragedRanks(OneRank):
    """Gradients averaged by DDP or FSDP, once per step, during its last backward pass."""

    is_local = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._statistics = RunningStatistics(run.model, run.ranks)
        self.averaged_ranks = run.ranks.world_size

    def accumulate(self, batch: StepBatch, to: Accumulator) -> None:
        """Exchange gradients in the last backward pass.

        A micro-batch without samples runs with weight 0, because all ranks must join each collective.
        """
        last = len(batch.micro_batches) - 1
        for index, (_, num_samples) in enumerate(batch.micro_batches):
            with (
                _nothing if index == last else self._run.forward.no_sync(),
                _nothing if num_samples else self._statistics.untouched(),
            ):
                to.micro_batch(batch, index, self._time_waiting if index == last else None)

    def _time_waiting(self, grad: Tensor) -> None:
        """Book the wait for other ranks, which DDP and FSDP queue after this callback, as gradient sync.

        Sending during backward, and gathering FSDP's weights, count as forward and backward.
        """
        after_backward(partial(self._run.clock.to, "gradient_sync"))

    def merge_statistics(self) -> None:
        self._run.clock.to("gradient_sync")
        self._statistics.merge()

    def reread_statistics(self) -> None:
        self._statistics.reread()


class OrderedRanks(OneRank):
    """Gradients summed in one order over all micro-batches, for the same bits on any number of ranks."""

    is_local = False

    def __init__(self, run: Run) -> None:
        self._run = run

    def accumulate(self, batch: StepBatch, to: Accumulator) -> None:
        # Rebuilt when parameters freeze or thaw.
        sums: OrderedSums = self._run.forward
        with sums.step():
            for index, (_, num_samples) in enumerate(batch.micro_batches):
                if num_samples:
                    to.micro_batch(batch, index)
                sums.keep(to.first_micro_batch + index)
            to.join_count(batch)
            self._run.clock.to("gradient_sync")


def build_exchange(run: Run) -> OneRank:
    """Build the exchange that combines the gradients of `run` over its ranks."""
    if isinstance(run.forward, OrderedSums):
        return OrderedRanks(run)
    return AveragedRanks(run) if run.ranks.distributed else OneRank()
