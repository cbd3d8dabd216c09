"""The gradient of a step's mean loss: accumulated over micro-batches, and combined over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptfast.core import devices
from ptfast.core.distributed import sum_over_ranks
from ptfast.core.protocols import StepBatch
from ptfast.core.tensors.dtensors import local_parts
from ptfast.core.tensors.kept_buffers import buffers_kept
from ptfast.core.tensors.torch_internals import after_backward, backward
from ptfast.run import Run
from ptfast.techniques.parallel.ordered_sums import OrderedSums
from ptfast.techniques.parallel.sync_batchnorm import RunningStatistics
from ptfast.techniques.precision.mixed_precision import kept_conversions
from ptfast.training.loop.first_step import FirstStep
from ptfast.training.loop.loss_accumulator import LossAccumulator

_nothing: AbstractContextManager[Any] = nullcontext()


class Accumulator:
    """Runs forward and backward on this rank's micro-batches.

    Every item's loss is weighted by one over the number of items in the step, so the gradient does not depend
    on how the step is cut into micro-batches and ranks.
    """

    _weight: Tensor | None
    """The weight of one item's loss in the gradient of this step, known after its first forward pass."""
    _counts: list[Any]
    """The item counts of this step's micro-batches, as returned by their losses."""

    def __init__(
        self, run: Run, exchange: GradientExchange, losses: LossAccumulator, first_checks: FirstStep
    ) -> None:
        self.run, self.exchange, self.losses = run, exchange, losses
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        is_double = any(p.dtype == torch.float64 for p in self.parameters)
        self.dtype = torch.float64 if is_double else torch.float32
        self.first_micro_batch = run.ranks.rank * (run.micro_batches // run.ranks.world_size)
        self._first_step, self._first_checks = run.progress.step, first_checks
        # Entering a context that does nothing takes 0.3 us.
        self._loss_of = self._loss if run.precision.autocast_dtype is None else self._autocast_loss
        # Sharded weights are gathered in the half-precision type, and released in between.
        self._keeps_conversions = run.precision.autocast_dtype is not None and not run.sharded
        self._weights: dict[int, Tensor] = {}
        self.counts_late = False
        """Whether only this step's losses count its items: gradients are divided after the last backward."""
        self._zero = torch.zeros((), dtype=devices.sum_dtype(run.device), device=run.device)

    def accumulate(self, batch: StepBatch) -> None:
        """Accumulate the gradient of a step's mean loss; the host does not wait."""
        self._weight, self._counts = None, []
        if self._keeps_conversions and len(batch.micro_batches) > 1:
            with kept_conversions():
                self.exchange.accumulate(batch, self)
        else:
            self.exchange.accumulate(batch, self)
        if self.counts_late:
            self._divide_by(sum(self._counts), batch.num_samples)

    def run_micro_batch(
        self, batch: StepBatch, index: int, hook: Callable[[Tensor], None] | None = None
    ) -> None:
        """Run forward and backward of micro-batch `index`; its gradients are 0 if it has no samples.

        `hook` is called as the backward pass begins.
        """
        run, mark = self.run, self.run.clock.to
        data, num_samples = batch.micro_batches[index]
        mark("forward")
        run.seed_step(run.progress.step, self.first_micro_batch + index)
        loss, num_items = self._loss_of(data, num_samples)
        if (weight := self._weight) is None:
            # The first value of a user's loss shows which items it counts.
            weight = self._weight = self.item_weight(batch, num_items)
        if hook is not None:
            loss.register_hook(hook)
        mark("backward")
        backward(loss, weight if num_samples else weight * 0)
        if num_samples:
            self.losses.add(loss.detach(), num_items)
            self._counts.append(num_items)

    def _autocast_loss(self, data: Any, num_samples: int) -> tuple[Tensor, Any]:
        with self.run.precision.autocast:
            return self._loss(data, num_samples)

    def _loss(self, data: Any, num_samples: int) -> tuple[Tensor, Any]:
        """Return the sum of the losses of a micro-batch's items, and their count."""
        run = self.run
        # Read on every step: a callback may replace the task.
        if run.progress.step > self._first_step:
            return run.task.loss(run.forward, data)
        return self._first_checks.loss(run.forward, data, num_samples)

    def item_weight(self, batch: StepBatch, first_count: Any) -> Tensor:
        """Return the weight of one item's loss in the gradient of a step: a 0-d tensor on the device.

        It is one over the items of the step, times the ranks that average gradients, times fp16's scale. If
        only the losses count items, `first_count` is used for a step of one micro-batch; otherwise gradients
        are averaged over samples until `_divide_by`.
        """
        run, ranks = self.run, self.exchange.averaged_ranks
        num_items: Any = self._count_items(batch)
        is_whole = self.exchange.is_local and len(batch.micro_batches) == 1
        self.counts_late = num_items is None and not is_whole
        if num_items is None:
            num_items = batch.num_samples if self.counts_late else first_count
        if isinstance(num_items, Tensor):
            # Without items the losses are 0.
            weight = (ranks / num_items.to(self.dtype)).nan_to_num(posinf=ranks)
        elif (weight := self._weights.get(num_items)) is None:
            weight = torch.full((), ranks / (num_items or 1), device=run.device, dtype=self.dtype)
            if isinstance(num_items, int):
                self._weights[num_items] = weight
        return weight if run.precision.scaler is None else run.precision.scaler.scale(weight)

    def _count_items(self, batch: StepBatch) -> Any:
        """Return the items of a step over all ranks, or their weight; None if only the losses count them.

        Cost: none if each sample is an item; otherwise a sum over ranks. The host never waits.
        """
        run = self.run
        if not getattr(run.task, "averages", True):
            return 1
        if getattr(run.task, "counts_samples", False):
            return batch.num_samples
        run.clock.to("forward")
        # Ranks without samples count as well, so that all ranks agree on None.
        counts = [(run.task.count(data, n), n) for data, n in batch.micro_batches]
        if any(count is None for count, _ in counts):
            return None
        return self._over_ranks(sum(count for count, n in counts if n))

    def join_count(self, batch: StepBatch) -> None:
        """Take part in the sum of a step's items over ranks, on a rank without samples."""
        run = self.run
        if self._weight is not None:
            return
        if run.progress.step == self._first_step:
            # This rank must also learn which items a user's loss counts.
            with buffers_kept(run.model), torch.no_grad(), run.precision.autocast:
                run.task.loss(run.forward, batch.micro_batches[0].data)
        self.item_weight(batch, 0)

    def _over_ranks(self, num_items: Any) -> Any:
        run = self.run
        if not run.ranks.distributed:
            return num_items
        run.clock.to("gradient_sync")
        return sum_over_ranks(self._zero + num_items, run.ranks)

    def _divide_by(self, num_items: Any, num_samples: int) -> None:
        """Turn gradients that are means over a step's samples into means over its items."""
        total = self._zero + self._over_ranks(num_items)
        factor = (num_samples / total).nan_to_num(posinf=1.0).to(self.dtype)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(local_parts(grads), factor)


class GradientExchange:
    """Combines the gradients of a step over ranks; this base class is for one rank and combines nothing."""

    is_local = True
    """Whether the samples of this rank are all samples of the step."""
    averaged_ranks = 1
    """Number of ranks over which gradients are averaged; 1 for sums."""

    def accumulate(self, batch: StepBatch, to: Accumulator) -> None:
        """Let `to` accumulate the gradients of each micro-batch, and combine them over the ranks."""
        for index, (_, num_samples) in enumerate(batch.micro_batches):
            if num_samples:
                to.run_micro_batch(batch, index)

    def merge_statistics(self) -> None:
        """Merge BatchNorm's running statistics over the ranks, after the backward passes of a step."""

    def reread_statistics(self) -> None:
        """Accept the model's statistics as the merged ones, after a skipped step has restored them."""


class AveragedRanks(GradientExchange):
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
                to.run_micro_batch(batch, index, self._time_waiting if index == last else None)

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


class OrderedRanks(GradientExchange):
    """Gradients summed over micro-batches in a fixed order, for the same bits on any number of ranks."""

    is_local = False

    def __init__(self, run: Run) -> None:
        self._run = run

    def accumulate(self, batch: StepBatch, to: Accumulator) -> None:
        # Rebuilt when parameters freeze or thaw.
        sums: OrderedSums = self._run.forward
        with sums.step():
            for index, (_, num_samples) in enumerate(batch.micro_batches):
                if num_samples:
                    to.run_micro_batch(batch, index)
                sums.keep(to.first_micro_batch + index)
            to.join_count(batch)
            self._run.clock.to("gradient_sync")


def build_exchange(run: Run) -> GradientExchange:
    """Build the exchange that combines the gradients of `run` over its ranks."""
    if isinstance(run.forward, OrderedSums):
        return OrderedRanks(run)
    return AveragedRanks(run) if run.ranks.distributed else GradientExchange()
