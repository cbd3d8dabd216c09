"""The hot loop: optimizer steps back to back, during which the host reads nothing from the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, count, repeat
from typing import Any

import torch
from torch import Tensor

from ptfast.core import devices
from ptfast.core.distributed import sum_over_ranks
from ptfast.core.errors import DataError, described
from ptfast.core.protocols import StepBatch, hooks, takes_own_steps
from ptfast.core.tensors.arrivals import Arrival
from ptfast.core.tensors.dtensors import local_parts
from ptfast.core.tensors.kept_buffers import buffers_kept
from ptfast.core.tensors.torch_internals import after_backward, backward
from ptfast.core.tensors.trees import copied
from ptfast.optim.build_optimizer import apply_lr, build_step
from ptfast.profiling.stragglers import Stragglers
from ptfast.run import Run
from ptfast.techniques.numerics.checked_steps import CheckedSteps, KeptBuffers
from ptfast.techniques.parallel.ddp import GradientAveraging
from ptfast.techniques.parallel.ordered_sums import OrderedSums
from ptfast.techniques.parallel.sync_batchnorm import RunningStatistics
from ptfast.techniques.precision.number_formats import ScaledSteps, kept_conversions
from ptfast.training.first_step import FirstStep
from ptfast.training.loss_window import LossWindow
from ptfast.training.stopping import Stopped
from ptfast.training.user_code import UserPart

OPTIMIZER_NAME = "optimizer"
"""The key of a parameter group that says which of a task's own optimizers steps it."""
_nothing = nullcontext()


class Trainer:
    """Takes the optimizer steps of a run. What steps share is looked up once, before the first."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.switch()
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.base_lrs = [group["initial_lr"] for group in run.optimizer.param_groups]
        is_double = any(p.dtype == torch.float64 for p in self.parameters)
        self.dtype = torch.float64 if is_double else torch.float32
        scaler = run.precision.scaler
        self.fp16 = None if scaler is None else ScaledSteps(scaler, run.optimizer, run.device, run.progress)
        self.sums = run.forward if isinstance(run.forward, OrderedSums) else None
        averages = run.ranks.distributed and self.sums is None
        self.batchnorm = RunningStatistics(run.model, run.ranks) if averages else None
        self.optimizers = named_optimizers(run.optimizer) if takes_own_steps(run.task) else None
        self.first_step, self.first_look = run.progress.step, FirstStep(run)
        self.first_micro_batch = run.ranks.rank * (run.micro_batches // run.ranks.num_ranks)
        # Sums of float32 losses in float64 are exact, and so do not depend on who adds them.
        sum_dtype = self.dtype if self.sums is None else devices.sum_dtype(run.device)
        self.window = LossWindow(run, sum_dtype, self.parameters, self.fp16, self.first_look)
        self.take_step = build_step(run.optimizer) if self.fp16 is None else self.fp16.take
        self.checked: CheckedSteps | None = None
        if run.checks_steps and self.fp16 is None:
            self.checked = self.window.skips = build_checked_steps(run, self.parameters)
            self.take_step = self.checked.take
        self.buffers = KeptBuffers(run.model) if self.window.skips is not None else None
        self.stragglers = Stragglers(run)
        self.votes: Arrival | None = None
        """What the ranks told each other at the last look."""
        self._weights: dict[int, Tensor] = {}
        self.counts_late = False
        self._zero = torch.zeros((), dtype=devices.sum_dtype(run.device), device=run.device)

    def train(self, batches: Iterator[StepBatch], last_step: int) -> None:
        """Take optimizer steps up to `last_step`, or up to a signal.

        Raises:
            Stopped: a signal has ended the wait for a batch.
            DataError: D006 if the data has ended.
        """
        run, progress, optimizer, mark = self.run, self.run.progress, self.run.optimizer, self.run.clock.to
        parameters, base_lrs, rates = self.parameters, self.base_lrs, self._rates(last_step)
        clip, fp16, ema, batchnorm, window = run.clip, self.fp16, run.ema, self.batchnorm, self.window
        checked, skips = self.checked, window.skips
        on_step = hooks([*run.callbacks, *run.debug_aids], "on_step")
        inspected_step = last_step - 1  # the host looks up after it
        run.forward.train()
        for step, batch in zip(range(progress.step, last_step), batches, strict=False):
            if self.buffers is not None:
                self.buffers.keep()
                if checked is not None and not checked.on_device:
                    window.remember()
            if self.optimizers is None:
                self.accumulate(batch, step)
            # From here on weights and the optimizer's state change.
            run.saver.hold()
            if batchnorm is not None:
                mark("gradient_sync")
                batchnorm.merge()
            mark("optimizer")
            if step == inspected_step:
                window.inspect_gradients()
            if checked is not None:
                checked.check(window.loss_sum)
            if clip is not None:
                if fp16 is not None:
                    fp16.scaler.unscale_(optimizer)
                clip()
            apply_lr(optimizer, base_lrs, *next(rates))
            if self.optimizers is None:
                self.take_step()
            else:
                self._run_own_step(self.optimizers, batch, step)
            for parameter in parameters:
                parameter.grad = None
            progress.step += 1
            progress.samples += batch.num_samples
            skipped = None if skips is None else skips.skipped
            if skipped is not None:
                self.leave_out(skipped, batch)
            if ema is not None:
                ema.update(progress.step, skipped)
            if on_step:
                mark("callbacks")
                for method in on_step:
                    method(run, progress.step)
            # Several ranks agree on where to stop, at the next check of signals.
            if run.stop_signal is not None and not run.ranks.distributed:
                return
        if progress.step < last_step and run.stop_signal is None:
            what = f"the data ended after step {progress.step} of {run.total_steps}"
            hint = "Lower steps to what the data provides"
            raise DataError("D006", what, key="steps", value=run.total_steps, suggestion=hint)

    def accumulate(self, batch: StepBatch, step: int) -> None:
        """Run forward and backward of this rank's micro-batches: the gradient of the step's mean loss."""
        run, mark, alone, sums = self.run, self.run.clock.to, self.batchnorm is None, self.sums
        last = len(batch.micro_batches) - 1
        weight, counts = None, list[Any]()
        # Sharded weights are gathered in the half type, and released in between.
        converts_once = last > 0 and run.precision.half_type is not None and not run.sharded
        with (
            kept_conversions() if converts_once else _nothing,
            _nothing if sums is None else sums.step(),
        ):
            for index, (data, num_samples) in enumerate(batch.micro_batches):
                if not num_samples and alone:
                    if sums is not None:
                        sums.keep(self.first_micro_batch + index)
                    continue
                mark("forward")
                run.seed_step(run.seed, step, self.first_micro_batch + index)
                exchanges = index == last
                with _nothing if alone else self.among_ranks(num_samples, exchanges=exchanges):
                    loss, num_items = self.loss_of(data, num_samples, step)
                    # A user's loss shows by its first value what it counts.
                    weight = self.item_weight(batch, num_items) if weight is None else weight
                    if exchanges and not alone:
                        # DDP and FSDP queue their wait for the other ranks after this callback. Sending
                        # during backward, and gathering FSDP's weights, count as forward and backward.
                        loss.register_hook(lambda _: after_backward(partial(mark, "gradient_sync")))
                    mark("backward")
                    # A rank without samples joins the collectives by a dummy of weight 0.
                    backward(loss, weight if num_samples else weight * 0)
                if sums is not None:
                    sums.keep(self.first_micro_batch + index)
                if num_samples:
                    self.window.add(loss.detach(), num_items)
                    counts.append(num_items)
            if sums is not None:
                if weight is None:
                    self._count_with_others(batch, step)
                mark("gradient_sync")
        if self.counts_late:
            self._divide_by(sum(counts), batch.num_samples)

    def loss_of(self, data: Any, num_samples: int, step: int) -> tuple[Tensor, Any]:
        """The sum of the losses of a micro-batch's items, and their count."""
        run = self.run
        # Read on every step: a callback may replace the task.
        with run.precision.autocast:
            if step > self.first_step:
                return run.task.loss(run.forward, data)
            return self.first_look.loss(run.forward, data, num_samples)

    def item_weight(self, batch: StepBatch, first_count: Any) -> Tensor:
        """The weight of one item's loss in the gradient of a step: a 0-d tensor on the device.

        One over the items of the step, times the ranks whose gradients are averaged, times fp16's scale. If
        only the losses count items, and that of the first micro-batch has counted `first_count`, gradients
        are averaged over samples until `_divide_by`.
        """
        run, is_whole = self.run, self.batchnorm is None and len(batch.micro_batches) == 1
        num_items: Any = self.count_items(batch)
        self.counts_late = num_items is None and not (is_whole and self.sums is None)
        if num_items is None:
            num_items = batch.num_samples if self.counts_late else first_count
        # Gradients are averaged over the ranks, or summed.
        ranks = run.ranks.num_ranks if self.sums is None else 1
        if isinstance(num_items, Tensor):
            # Without items the losses are 0.
            weight = (ranks / num_items.to(self.dtype)).nan_to_num(posinf=ranks)
        elif (weight := self._weights.get(num_items)) is None:
            weight = torch.full((), ranks / (num_items or 1), device=run.device, dtype=self.dtype)
            if isinstance(num_items, int):
                self._weights[num_items] = weight
        return weight if run.precision.scaler is None else run.precision.scaler.scale(weight)

    def count_items(self, batch: StepBatch) -> Any:
        """The items of a step over all ranks, or their weight; None if only the losses count them.

        Cost: nothing if each sample is an item; else a sum over ranks. The host never waits.
        """
        run = self.run
        if not getattr(run.task, "averages", True):
            return 1
        if getattr(run.task, "counts_samples", False):
            return batch.num_samples
        run.clock.to("forward")
        # A rank without samples finds None as well.
        counts = [(run.task.count(data, n), n) for data, n in batch.micro_batches]
        if any(count is None for count, _ in counts):
            return None
        return self._over_ranks(sum(count for count, n in counts if n))

    def _count_with_others(self, batch: StepBatch, step: int) -> None:
        """Take part in the sum over ranks of a step's items, on a rank that has no samples."""
        run = self.run
        if step == self.first_step:
            # What a user's loss counts has to be known here, too.
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

    @contextmanager
    def among_ranks(self, num_samples: int, *, exchanges: bool) -> Iterator[None]:
        """A context for forward and backward of a micro-batch on one of several ranks.

        Gradients are exchanged once a step, with its last micro-batch. `num_samples` is 0 for the dummy of an
        empty share, which must leave BatchNorm's statistics alone.
        """
        assert self.batchnorm is not None
        with (
            _nothing if exchanges else self.run.forward.no_sync(),
            _nothing if num_samples else self.batchnorm.untouched(),
        ):
            yield

    def _run_own_step(
        self, optimizers: dict[str, torch.optim.Optimizer], batch: StepBatch, step: int
    ) -> None:
        """Let a task take the step itself; it returns the sum of the losses to log, and their count."""
        run = self.run
        run.clock.to("forward")
        run.seed_step(run.seed, step, 0)
        task: Any = run.task
        with run.precision.autocast:
            given: Any = task.step(run.forward, batch.micro_batches[0].data, optimizers)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)):
            what = f"step gives {described(given)}, where the sum of its losses and their count are expected"
            raise UserPart("task", task).error(what)
        self.window.add(given[0].detach(), given[1])

    def leave_out(self, skipped: Tensor, batch: StepBatch) -> None:
        """Take back the last step's figures and statistics if it was `skipped`: 0-d, on the device."""
        self.window.leave_out(skipped)
        if self.buffers is not None:
            self.buffers.put_back(skipped)
            if self.batchnorm is not None:
                self.batchnorm.reread()
            if self.checked is not None and not self.checked.on_device:
                self.window.explain(self.run.progress.step, batch)

    def switch(self) -> bool:
        """Freeze and thaw parameters that are due before the next step; return True if any were."""
        run = self.run
        if run.freezing is None or not run.freezing.apply(run.progress.step):
            return False
        if isinstance(run.forward, GradientAveraging):
            # They would keep averaging beside those of the new wrapper.
            run.forward._remove_autograd_hooks()
        run.forward = run.wrap()
        self.sums = run.forward if isinstance(run.forward, OrderedSums) else None
        return True

    def warm_up(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Run the next step's backward once and undo it, if a model is compiled or several ranks resume.

        The compiler works in the first backward of a process, and DDP regroups its buckets after it, and so
        the order of sums of three ranks or more. Returns all batches, the first included.
        """
        run, window = self.run, self.window
        resumes = run.ranks.distributed and not run.sharded and self.sums is None and run.progress.step
        due = (resumes or run.compilation is not None) and self.optimizers is None
        if not due or run.progress.step >= run.total_steps:
            return batches
        first = None
        with suppress(Stopped):
            first = next(batches, None)
        if first is None:
            return batches
        sums = window.sums()
        run.forward.train()
        try:
            with buffers_kept(run.model):
                self.accumulate(StepBatch(copied(first.micro_batches), first.num_samples), run.progress.step)
        finally:
            for parameter in self.parameters:
                parameter.grad = None
            window.put_back(sums)
        return chain([first], batches)

    def _rates(self, last_step: int) -> Iterator[tuple[float, float | None]]:
        """The factor on the base rates, and the momentum if it moves, of each step that is taken."""
        schedule, fp16, first_step = self.run.schedule, self.fp16, self.run.progress.step
        held_steps = 0 if fp16 is None else fp16.held_steps
        factors = schedule.lr_factors(first_step - held_steps, last_step)
        momenta = schedule.momenta(first_step - held_steps, last_step)
        rates = [*zip(factors, momenta or repeat(None), strict=False)]
        if fp16 is None:
            return iter(rates)
        return (rates[index + held_steps - fp16.held_steps] for index in count())


def build_checked_steps(run: Run, parameters: list[Tensor]) -> CheckedSteps:
    """Build what leaves out the steps of a run whose loss or gradients are not finite."""
    steps = CheckedSteps(
        run.optimizer, build_step, parameters, run.device, run.ranks, run.progress, run.skip_limit
    )
    if steps.waits:
        name = type(run.optimizer).__name__
        run.display.warn(f"numerics: {name} takes no flag on the device, so every step waits for it")
    return steps


def named_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Build an optimizer for each name among an optimizer's groups, for a task that takes its own steps.

    They share groups and state with `optimizer`, which schedules, saves and restores them all.
    """
    found: dict[str, torch.optim.Optimizer] = {}
    for group in optimizer.param_groups:
        if (name := group.get(OPTIMIZER_NAME)) is not None and name not in found:
            found[name] = part = copy.copy(optimizer)
            part.param_groups = [each for each in optimizer.param_groups if each.get(OPTIMIZER_NAME) == name]
            part.step = build_step(part, own_grads=True)  # pyright: ignore[reportAttributeAccessIssue] # without a closure
    return found
