"""The hot loop: consecutive optimizer steps during which the host reads nothing from the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import chain, islice, repeat
from typing import Any

from ptfast.core.errors import DataError
from ptfast.core.protocols import StepBatch, hooks, takes_own_steps
from ptfast.core.tensors.kept_buffers import buffers_kept
from ptfast.core.tensors.trees import copied
from ptfast.optim.build_optimizer import apply_lr
from ptfast.optim.parameter_groups import keep_frozen_statistics
from ptfast.run import Run
from ptfast.techniques.parallel.ddp import GradientAveraging
from ptfast.training.loop.accumulation import Accumulator, build_exchange
from ptfast.training.loop.first_step import FirstStep
from ptfast.training.loop.loss_accumulator import LossAccumulator
from ptfast.training.loop.updates import build_update
from ptfast.training.stopping import Stopped


def _nothing(*arguments: Any) -> None:
    """Do nothing, in place of a part of the step that is off."""


class Trainer:
    """Takes the optimizer steps of a run. Values shared by all steps are looked up once, before the first."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.freeze_and_thaw()
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.first_step, self.first_checks = run.progress.step, FirstStep(run)
        self.exchange = build_exchange(run)
        self.losses = LossAccumulator(run, self.parameters, self.first_checks)
        self.update = self.losses.update = build_update(run, self.losses, self.exchange)
        accumulator = Accumulator(run, self.exchange, self.losses, self.first_checks)
        self.accumulate = _nothing if takes_own_steps(run.task) else accumulator.accumulate
        self.learning_rates = LearningRates(run)

    def train(self, batches: Iterator[StepBatch], last_step: int) -> None:
        """Take optimizer steps up to `last_step`, or until a signal.

        Raises:
            Stopped: a signal ended the wait for a batch.
            DataError: D006 if the data has ended.
        """
        run, progress = self.run, self.run.progress
        self.set_training_mode()
        self.on_step = hooks([*run.callbacks, *run.debug_aids], "on_step")
        self.update_average = run.ema.update if run.ema is not None else _nothing
        self.losses.inspected_step = last_step - 1
        self.learning_rates.prepare(last_step, self.update.schedule_lag)
        is_warm = progress.step > self.first_step
        with run.collector.waiting(run.clock) if is_warm else nullcontext():
            for batch in islice(batches, last_step - progress.step):
                self.step(batch)
                # Several ranks agree on where to stop in the next exchange of votes.
                if run.stop_signal is not None and not run.ranks.distributed:
                    return
        if progress.step < last_step and run.stop_signal is None:
            what = f"the data ended after step {progress.step} of {run.total_steps}"
            hint = "Lower steps to what the data provides"
            raise DataError("D006", what, key="steps", value=run.total_steps, suggestion=hint)

    def step(self, batch: StepBatch) -> None:
        """Take one optimizer step."""
        progress, update = self.run.progress, self.update
        update.prepare()
        self.accumulate(batch)  # forward and backward of each micro-batch
        self.exchange.merge_statistics()  # of BatchNorm, over the ranks
        self.run.clock.to("optimizer")
        self.losses.inspect_gradients()  # their norm, in the last step of a segment
        self.learning_rates.apply(progress.step - update.schedule_lag)
        update.step(batch)  # clip and take the optimizer's step, or skip it
        self.zero_grad()
        progress.advance(batch.num_samples)
        update.undo_if_skipped(batch)
        self.update_average(progress.step, update.skipped)
        self.call_back()

    def call_back(self) -> None:
        """Call the callbacks' `on_step`."""
        if self.on_step:
            self.run.clock.to("callbacks")
            for method in self.on_step:
                method(self.run, self.run.progress.step)

    def zero_grad(self) -> None:
        """Drop the gradients like `optimizer.zero_grad(set_to_none=True)`, but faster."""
        for parameter in self.parameters:
            parameter.grad = None

    def set_training_mode(self) -> None:
        """Put the model into training mode, except BatchNorm layers with frozen statistics."""
        self.run.forward.train()
        if self.run.plan.freezes_statistics:
            keep_frozen_statistics(self.run.model)

    def freeze_and_thaw(self) -> bool:
        """Freeze and thaw parameters that are due before the next step; return True if any were."""
        run = self.run
        if run.freezing is None or not run.freezing.apply(run.progress.step):
            return False
        if isinstance(run.forward, GradientAveraging):
            # The old hooks would keep averaging along with those of the new wrapper.
            run.forward._remove_autograd_hooks()
        run.forward = run.wrap()
        return True

    def warm_up(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Run the next step's backward once and undo it, if a model is compiled or several ranks resume.

        The compiler runs in the first backward of a process, and DDP rebuilds its buckets after it, which
        changes the order of sums over three or more ranks. Returns all batches, including the first.
        """
        run, losses = self.run, self.losses
        resumes = self.exchange.averaged_ranks > 1 and not run.sharded and run.progress.step
        due = (resumes or run.compilation is not None) and not takes_own_steps(run.task)
        if not due or run.progress.step >= run.total_steps:
            return batches
        first = None
        with suppress(Stopped):
            first = next(batches, None)
        if first is None:
            return batches
        sums = losses.sums()
        self.set_training_mode()
        try:
            with buffers_kept(run.model):
                self.accumulate(StepBatch(copied(first.micro_batches), first.num_samples))
        finally:
            self.zero_grad()
            losses.put_back(sums)
        return chain([first], batches)


class LearningRates:
    """Sets the learning rate, and the momentum if it is cycled, of each step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._base_lrs = [group["initial_lr"] for group in run.optimizer.param_groups]

    def prepare(self, last_step: int, lag: int) -> None:
        """Compute the factors of all steps up to `last_step`; the schedule lags `lag` steps behind."""
        schedule, first = self._run.schedule, self._run.progress.step - lag
        factors, momenta = schedule.lr_factors(first, last_step), schedule.momenta(first, last_step)
        self._first, self._factors = first, [*zip(factors, momenta or repeat(None), strict=False)]

    def apply(self, step: int) -> None:
        """Set the optimizer to the factor of `step`, counted by the schedule from 0."""
        apply_lr(self._run.optimizer, self._base_lrs, *self._factors[step - self._first])
