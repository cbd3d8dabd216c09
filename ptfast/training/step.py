"""The hot loop: optimizer steps back to back, during which the host reads nothing from the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor

from ptfast.core.errors import DataError
from ptfast.core.protocols import StepBatch, hooks, takes_own_steps
from ptfast.core.run import Run
from ptfast.optim.build_optimizer import apply_lr, build_step
from ptfast.techniques.parallel.wrapping import unwrap
from ptfast.techniques.precision.scaled_steps import ScaledSteps
from ptfast.training.step_parts.first_step import FirstStep
from ptfast.training.step_parts.gradient_inspection import GradientInspection
from ptfast.training.step_parts.item_weight import ItemWeight
from ptfast.training.step_parts.loss_window import LossWindow
from ptfast.training.step_parts.own_steps import OwnSteps
from ptfast.training.step_parts.rank_sync import RankSync

LossOf = Callable[[Any, Any], tuple[Tensor, Any]]
"""From a model and a batch to the sum of the losses of its items, and their count."""
Before = Callable[[], object]
"""Called between backward and the optimizer's step."""
After = Callable[[int], object]
"""Called after the optimizer's step with the number of steps taken."""
Rate = tuple[float, float | None]
"""Factor of a step on the base learning rates, and its momentum where that is scheduled."""
_nothing = contextlib.nullcontext()


class Trainer:
    """Takes optimizer steps; holds what they share, so that a step looks nothing up twice.

    What only some runs have is put around the step once, when a stretch of steps begins: a plain run's step
    calls nothing for it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.switch()
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.base_lrs = [group["initial_lr"] for group in run.optimizer.param_groups]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        scaler = run.precision.scaler
        self.scaled: ScaledSteps | None = None
        if scaler is not None:
            self.scaled = ScaledSteps(scaler, run.optimizer, run.device, run.progress)
        self.take_step = build_step(run.optimizer) if self.scaled is None else self.scaled.take
        self.sync = RankSync(run) if run.ranks.distributed else None
        self.item_weight = ItemWeight(run, dtype, scaler)
        self.first_step, self.first_look = run.progress.step, FirstStep(run)
        self.first_micro_batch = run.ranks.rank * (run.settings.micro_batches // run.ranks.num_ranks)
        self.loss_of = self._surrounded(self._task_loss)
        self.first_loss = self._surrounded(self.first_look.loss)
        self.inspection = GradientInspection(run, self.parameters, self.scaled)
        self.window = LossWindow(run, dtype, self.scaled, self.inspection, self.first_look)
        if takes_own_steps(run.task):
            own = OwnSteps(run, self.window)
            self.accumulate, self.take_step = own.hold, own.take

    def train(self, batches: Iterator[StepBatch], last_step: int) -> None:
        """Take optimizer steps up to `last_step`, or up to a signal.

        Raises:
            Stopped: a signal has come while the next batch was awaited.
            DataError: D006 when the data has ended.
        """
        run, progress, optimizer, mark = self.run, self.run.progress, self.run.optimizer, self.run.clock.to
        parameters, base_lrs, sync, rates = self.parameters, self.base_lrs, self.sync, self._rates(last_step)
        before, before_last, after = self._around()
        run.forward.train()
        for step, batch in zip(range(progress.step, last_step), batches, strict=False):
            self.accumulate(batch, step)
            if sync is not None:
                sync.merge()
            mark("optimizer")
            for prepare in before_last if step == last_step - 1 else before:
                prepare()
            apply_lr(optimizer, base_lrs, *next(rates))
            self.take_step()
            for parameter in parameters:
                parameter.grad = None
            progress.step += 1
            progress.samples += batch.num_samples
            for follow in after:
                follow(progress.step)
            if run.status.stop_signal is not None and not run.ranks.distributed:
                return
        if progress.step < last_step and run.status.stop_signal is None:
            what = f"the data ended after step {progress.step} of {run.total_steps}"
            hint = "Set steps to what the data has"
            raise DataError("D006", what, key="steps", value=run.total_steps, suggestion=hint)

    def accumulate(self, batch: StepBatch, step: int) -> None:
        """Forward and backward of this rank's micro-batches: the gradient of the mean loss of the step."""
        run, mark, sync, last = self.run, self.run.clock.to, self.sync, len(batch.micro_batches) - 1
        loss_of = self.loss_of if step > self.first_step else self.first_loss
        weight = self.item_weight(batch)
        for index, (data, num_samples) in enumerate(batch.micro_batches):
            if not num_samples and sync is None:
                continue
            mark("forward")
            run.seed_step(run.settings.seed, step, self.first_micro_batch + index)
            with _nothing if sync is None else sync.micro_batch(num_samples, exchanges=index == last):
                loss, num_items = loss_of(run.forward, data)
                mark("backward")
                # The stand-in of an empty share keeps the collectives in step and counts for nothing.
                loss.backward(weight if num_samples else weight * 0)
            if num_samples:
                self.window.add(loss.detach(), num_items)

    def switch(self) -> bool:
        """Freeze and thaw what the next step asks for; return True if anything changed."""
        run = self.run
        if run.freezing is None or not run.freezing.apply(run.progress.step):
            return False
        unwrap(run.forward)
        run.forward = run.wrap()
        return True

    def _task_loss(self, model: Any, data: Any) -> tuple[Tensor, Any]:
        # Looked up in every step: a callback may have put another task in its place.
        return self.run.task.loss(model, data)

    def _surrounded(self, loss_of: LossOf) -> LossOf:
        """The loss as this run takes it: under autocast, and the exchange between ranks booked."""
        precision = self.run.precision

        def under_autocast(model: Any, data: Any) -> tuple[Tensor, Any]:
            with precision.autocast():
                return loss_of(model, data)

        surrounded = under_autocast if precision.enabled else loss_of
        return surrounded if self.sync is None else self.sync.booking(surrounded)

    def _around(self) -> tuple[list[Before], list[Before], list[After]]:
        """Hooks between backward and the optimizer's step, those at the last step, and those after each."""
        run, scaled, window, ema = self.run, self.scaled, self.window, self.run.ema
        before: list[Before] = [] if run.clip is None else [run.clip]
        if before and scaled is not None:
            before.insert(0, scaled.unscale)
        after: list[After] = []
        if scaled is not None:
            after.append(lambda step: window.leave_out(scaled.skipped))
        if ema is not None:
            after.append(ema.update if scaled is None else lambda step: ema.update(step, scaled.skipped))
        if on_step := hooks([*run.callbacks, *run.watchers], "on_step"):
            after.append(partial(self._call_back, on_step))
        # The last step of a stretch is that before which the state may be saved.
        return before, [self.inspection, *before] if self.inspection.wanted else before, after

    def _call_back(self, on_step: list[Callable[..., None]], step: int) -> None:
        self.run.clock.to("callbacks")
        for method in on_step:
            method(self.run, step)

    def _rates(self, last_step: int) -> Iterator[Rate]:
        """The schedule of the steps to come; it stands still over steps that fp16 leaves out."""
        schedule, scaled, first_step = self.run.schedule, self.scaled, self.run.progress.step
        held_steps = 0 if scaled is None else scaled.held_steps
        factors = schedule.lr_factors(first_step - held_steps, last_step)
        momenta = schedule.momenta(first_step - held_steps, last_step)
        rates = [*zip(factors, momenta or repeat(None), strict=False)]
        if scaled is None:
            return iter(rates)
        return (rates[index + held_steps - scaled.held_steps] for index in count())
