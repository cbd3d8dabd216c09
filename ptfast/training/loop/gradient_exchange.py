"""Combine the gradients of a step over ranks: not at all on one rank, averaged, or summed in one order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ptfast.core.tensors.torch_internals import after_backward
from ptfast.run import Run
from ptfast.techniques.parallel.ordered_sums import OrderedSums
from ptfast.techniques.parallel.sync_batchnorm import RunningStatistics

_nothing: AbstractContextManager[Any] = nullcontext()


class OneRank:
    """The gradients of a run on one rank, which needs no exchange."""

    is_local = True
    """Whether the samples of this rank are all samples of the step."""
    runs_empty = False
    """Whether a rank without samples runs a dummy batch, so that every rank joins the collectives."""
    averaged_ranks = 1
    """Number of ranks over which gradients are averaged; 1 for sums."""

    def step(self) -> AbstractContextManager[Any]:
        """Run the micro-batches of a step inside this context; at its end their gradients are combined."""
        return _nothing

    def micro_batch(self, num_samples: int, *, is_last: bool) -> AbstractContextManager[Any]:
        """Run forward and backward of one micro-batch inside this context."""
        return _nothing

    def before_backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Prepare the backward pass of `loss`."""

    def keep(self, index: int) -> None:
        """Accept the gradients of micro-batch `index`, counted over all ranks."""

    def merge_statistics(self) -> None:
        """Merge BatchNorm's running statistics over the ranks, after the backward passes of a step."""

    def reread_statistics(self) -> None:
        """Accept the model's statistics as the merged ones, after a skipped step has restored them."""


class AveragedRanks(OneRank):
    """Gradients averaged by DDP or FSDP, once per step, during its last backward pass."""

    is_local = False
    runs_empty = True

    def __init__(self, run: Run) -> None:
        self._run = run
        self._statistics = RunningStatistics(run.model, run.ranks)
        self.averaged_ranks = run.ranks.world_size

    @contextmanager
    def micro_batch(self, num_samples: int, *, is_last: bool) -> Iterator[None]:
        """Exchange gradients if it `is_last`; a dummy batch does not change BatchNorm's statistics."""
        with (
            _nothing if is_last else self._run.forward.no_sync(),
            _nothing if num_samples else self._statistics.untouched(),
        ):
            yield

    def before_backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Book the wait for other ranks, which DDP and FSDP queue after this callback, as gradient sync.

        Sending during backward, and gathering FSDP's weights, count as forward and backward.
        """
        if is_last:
            loss.register_hook(lambda _: after_backward(partial(self._run.clock.to, "gradient_sync")))

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

    @property
    def _sums(self) -> OrderedSums:
        # Rebuilt when parameters freeze or thaw.
        return self._run.forward

    @contextmanager
    def step(self) -> Iterator[None]:
        with self._sums.step():
            yield
            self._run.clock.to("gradient_sync")

    def keep(self, index: int) -> None:
        self._sums.keep(index)


def build_exchange(run: Run) -> OneRank:
    """Build the exchange that combines the gradients of `run` over its ranks."""
    if isinstance(run.forward, OrderedSums):
        return OrderedRanks(run)
    return AveragedRanks(run) if run.ranks.distributed else OneRank()
