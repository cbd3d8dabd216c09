"""The hot loop: optimizer steps back to back, during which the host reads nothing from the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ptfast.core import devices
from ptfast.core.distributed import Ranks, sum_over_ranks
from ptfast.core.errors import DataError, NumericsError
from ptfast.core.machine import peak_memory_bytes
from ptfast.core.protocols import Run, StepBatch, hooks
from ptfast.optim.build_optimizer import apply_lr, build_step, reference_lr
from ptfast.techniques.gradients.clipping import global_norm
from ptfast.techniques.parallel.wrapping import RunningStatistics, unwrap
from ptfast.techniques.precision.scaled_steps import ScaledSteps
from ptfast.training.first_step import FirstStep
from ptfast.training.stopping import Stopped

MOST_SKIPPED = 30
"""Overflowing fp16 steps in a row, each of which halves the scale, after which no scale will help."""
_nothing = contextlib.nullcontext()


class Trainer:
    """Takes optimizer steps; holds what they share, so that a step looks nothing up twice."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.switch()
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.base_lrs = [group["initial_lr"] for group in run.optimizer.param_groups]
        self.dtype = (
            torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        )
        self.take_step = build_step(run.optimizer)
        self.first_step, self.first_look = run.progress.step, FirstStep(run)
        self.weights: dict[int, Tensor] = {}
        self.counts_samples = getattr(run.task, "counts_samples", False)
        self.first_micro_batch = run.ranks.rank * (run.micro_batches // run.ranks.num_ranks)
        # A resumed window was summed over all ranks; one of them carries it on.
        restored = (run.progress.window_loss, run.progress.window_items) if run.ranks.is_first else (0.0, 0.0)
        self.loss_sum = torch.tensor(restored[0], device=run.device, dtype=self.dtype)
        self.num_items: Any = int(restored[1])
        self.logged_pace, self.logged_step = self._pace(), -1
        self.grad_norm: Tensor | None = None
        self.read_norm: list[float] = []
        self.unreached: set[str] | None = None
        self.seeks_unreached = True
        self.statistics = RunningStatistics(run.model, run.ranks) if run.ranks.distributed else None
        scaler = run.precision.scaler
        self.scaled: ScaledSteps | None = None
        if scaler is not None:
            self.scaled = ScaledSteps(scaler, run.optimizer, run.device, run.progress)

    def switch(self) -> bool:
        """Freeze and thaw what the step to come asks for; say whether anything changed."""
        run = self.run
        if run.freezing is None or not run.freezing.apply(run.progress.step):
            return False
        unwrap(run.forward)
        run.forward = run.wrap()
        return True

    def rehearse(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Where a model is compiled or several ranks resume, run the next step's backward once for nothing.

        A compiler is at work in the first backward of a process, which is no training. And
        DistributedDataParallel regroups its buckets after the first backward of a process. Among three ranks
        or more that changes the order of sums, which would tell a resumed run from one never killed.

        Returns:
            All batches, the rehearsed one included.
        """
        run = self.run
        resumes = run.ranks.distributed and not run.sharded and run.progress.step
        if not (resumes or run.compilation is not None) or run.progress.step >= run.total_steps:
            return batches
        first = None
        with contextlib.suppress(Stopped):
            first = next(batches, None)
        if first is None:
            return batches
        buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
        sums = self.loss_sum.clone(), self.num_items
        run.forward.train()
        with run.forward.rehearsing() if run.ranks.distributed and not run.sharded else _nothing:
            self._accumulate_gradients(first, run.progress.step)
        for parameter in self.parameters:
            parameter.grad = None
        for buffer, before in buffers:
            buffer.copy_(before)
        self.loss_sum, self.num_items = sums
        return chain([first], batches)

    def train(self, batches: Iterator[StepBatch], last_step: int) -> None:
        """Take optimizer steps up to `last_step`, or up to a signal.

        Raises:
            Stopped: a signal has come while the next batch was awaited.
            DataError: D006 when the data has ended.
        """
        run, progress, optimizer, to = self.run, self.run.progress, self.run.optimizer, self.run.clock.to
        scaled, clip, ema = self.scaled, run.clip, run.ema
        on_step = hooks([*run.callbacks, *run.watchers], "on_step")
        first_step, take_step, statistics = progress.step, self.take_step, self.statistics
        # The schedule stands still over steps that fp16 leaves out.
        held_steps = 0 if scaled is None else scaled.held_steps
        factors = run.schedule.lr_factors(first_step - held_steps, last_step)
        momenta = run.schedule.momenta(first_step - held_steps, last_step)
        # The last before the state may be saved.
        inspects = self.seeks_unreached or run.log_norm or run.ranks.distributed
        inspected_step = last_step - 1 if inspects else -1
        skipped = None
        run.forward.train()
        for index, batch in enumerate(islice(batches, last_step - first_step)):
            self._accumulate_gradients(batch, first_step + index)
            if statistics is not None:
                to("gradient_sync")
                statistics.merge()
            to("optimizer")
            if first_step + index == inspected_step:
                self._inspect_gradients()
            at = index if scaled is None else index + held_steps - scaled.held_steps
            apply_lr(optimizer, self.base_lrs, factors[at], momenta[at] if momenta else None)
            if clip is not None:
                if scaled is not None:
                    scaled.unscale()
                clip()
            if scaled is None:
                take_step()
            else:
                skipped = self._take_scaled_step(scaled)
            for parameter in self.parameters:
                parameter.grad = None
            if ema is not None:
                ema.update(progress.step + 1, skipped)
            progress.step += 1
            progress.samples += batch.num_samples
            if on_step:
                to("callbacks")
            for method in on_step:
                method(run, progress.step)
            if run.stop_signal is not None and not run.ranks.distributed:
                break
        else:
            if progress.step < last_step and run.stop_signal is None:
                raise _data_ended(run)

    def _accumulate_gradients(self, batch: StepBatch, step: int) -> None:
        """Forward and backward of this rank's micro-batches: the gradient of the mean loss of the step."""
        run, precision, to = self.run, self.run.precision, self.run.clock.to
        loss_of = run.task.loss if step > self.first_step else self.first_look.loss
        weight, statistics = self._item_weight(batch), self.statistics
        last = len(batch.micro_batches) - 1
        if self.scaled is not None:
            self.sums_before = self.loss_sum.clone(), self.num_items
        for index, (data, num_samples) in enumerate(batch.micro_batches):
            if not num_samples and statistics is None:
                continue
            to("forward")
            run.seed_step(run.seed, step, self.first_micro_batch + index)
            # Gradients cross the ranks once, with the last micro-batch.
            together = run.forward.no_sync() if statistics is not None and index < last else _nothing
            with together, _nothing if num_samples or statistics is None else statistics.untouched():
                if precision.enabled:
                    with precision.autocast():
                        loss, count = loss_of(run.forward, data)
                else:
                    loss, count = loss_of(run.forward, data)
                to("backward")
                if statistics is not None and index == last:
                    loss.register_hook(self._tell_of_sync)
                # The stand-in of an empty share keeps the collectives in step and counts for nothing.
                loss.backward(weight if num_samples else weight * 0)
            if num_samples:
                self.loss_sum += loss.detach()
                self.num_items = self.num_items + count

    def _tell_of_sync(self, grad: Tensor) -> None:
        """Called as backward begins: have its time be `gradient_sync`'s once all gradients are computed.

        What autograd is asked to call at the end it calls in that order, and the ranks' wait for each other's
        gradients, DDP's and FSDP's, is asked for later. What of the sending goes on beside backward is not in
        it; nor is the gathering of FSDP's weights, which is part of forward and backward.
        """
        Variable._execution_engine.queue_callback(partial(self.run.clock.to, "gradient_sync"))

    def _inspect_gradients(self) -> None:
        """Keep the gradients' norm, on the device, and the names of parameters that get none in any look."""
        run = self.run
        if run.ranks.distributed:
            run.forward.check_gradients()
        if run.log_norm:
            norm = global_norm([p.grad for p in self.parameters if p.grad is not None])
            self.grad_norm = norm if self.scaled is None else norm / self.scaled.scale
        if self.seeks_unreached:
            named = run.model.named_parameters()
            missing = {name for name, p in named if p.requires_grad and p.grad is None}
            self.unreached = missing if self.unreached is None else self.unreached & missing

    def _take_scaled_step(self, scaled: ScaledSteps) -> Tensor:
        """A step whose loss counts for nothing where it is left out; on the device, whether it was."""
        skipped = scaled.take()
        loss_before, items_before = self.sums_before
        self.loss_sum = torch.where(skipped, loss_before, self.loss_sum)
        self.num_items = torch.where(skipped, items_before, self.num_items)
        return skipped

    def _item_weight(self, batch: StepBatch) -> Tensor:
        """What one item's loss weighs: one over the items of the step, times the ranks DDP averages over.

        Scaling by the number of micro-batches instead is wrong wherever they differ in size.
        """
        run = self.run
        num_items: Any = batch.num_samples
        if not self.counts_samples:
            run.clock.to("forward")
            num_items = sum(run.task.count(data, n) for data, n in batch.micro_batches if n)
            if run.ranks.distributed:
                zero = torch.zeros((), dtype=torch.int64, device=run.device)
                run.clock.to("gradient_sync")
                num_items = sum_over_ranks(zero + num_items, run.ranks)
        if isinstance(num_items, Tensor):
            weight = run.ranks.num_ranks / num_items.clamp(min=1).to(self.dtype)
        elif (weight := self.weights.get(num_items)) is None:
            value = run.ranks.num_ranks / max(num_items, 1)
            weight = self.weights[num_items] = torch.full((), value, device=run.device, dtype=self.dtype)
        return weight if self.scaled is None else self.scaled.scaler.scale(weight)

    def read_loss(self) -> float:
        """Mean item loss since the last log line, over all ranks. Makes the host wait for the device.

        Raises:
            NumericsError: N001 when it is not finite, or when fp16 gradients overflow step after step.
            ConfigError, DataError: C017 or D005 when that is so from the start, for a reason.
        """
        run, progress = self.run, self.run.progress
        run.clock.to("logging")
        norm = [] if self.grad_norm is None else [self.grad_norm / run.ranks.num_ranks]
        sums = sum_and_read([self.loss_sum, self.num_items, *norm], run.device, run.ranks)
        progress.window_loss, progress.window_items, *self.read_norm = sums
        in_a_row = 0
        if self.scaled is not None:
            in_a_row = int(self.scaled.in_a_row)
            self.scaled.note(progress)
        loss = progress.window_loss / max(progress.window_items, 1)
        if math.isfinite(loss) and in_a_row < MOST_SKIPPED:
            return loss if progress.window_items or not in_a_row else math.nan
        if max(in_a_row, 1) == progress.step and (error := self.first_look.not_finite()) is not None:
            raise error
        what = f"the loss is {loss} by step {progress.step}"
        if in_a_row >= MOST_SKIPPED:
            what = f"fp16 gradients overflowed in {in_a_row} steps in a row, by step {progress.step}"
        lr = reference_lr(run.optimizer)
        hint = f"Lower optimizer.lr (now at {lr:.3g}), clip with gradients.clip_norm=1 or try debug=anomaly"
        raise NumericsError("N001", what, suggestion=hint)

    def log(self, loss: float) -> None:
        """Write one line of training figures and open the next window."""
        run, progress = self.run, self.run.progress
        if self.logged_step == progress.step:
            return
        figures, resources = {"loss": loss, "lr": reference_lr(run.optimizer)}, self._resources()
        if "samples_per_s" in resources:
            figures["samples_per_s"] = resources["samples_per_s"]
        if skipped := progress.skipped_steps - progress.skipped_logged:
            figures["skipped_steps"] = skipped
            progress.skipped_logged = progress.skipped_steps
        # A norm that overflowed is that of a step left out.
        if self.read_norm and math.isfinite(self.read_norm[0]):
            figures["grad_norm"] = self.read_norm[0]
        place = {"step": progress.step, "epoch": round(run.epoch, 4), "split": "train"}
        run.logger.log(place | figures | resources)
        run.display.progress(progress.step, run.epoch, figures)
        run.figures["train"] = figures
        if self.seeks_unreached:
            self._tell_unreached()
        progress.epoch_loss += progress.window_loss
        progress.epoch_items += progress.window_items
        progress.window_loss = progress.window_items = 0.0
        self.loss_sum.zero_()
        self.num_items = 0
        self.logged_pace, self.logged_step = self._pace(), progress.step
        run.clock.to(None)

    def _pace(self) -> tuple[int, int, float]:
        progress = self.run.progress
        return progress.timed_steps, progress.timed_samples, progress.timed_s

    def _resources(self) -> dict[str, float]:
        """What training takes of the machine: speed since the last log line, warm-up left out, and memory."""
        now, then = self._pace(), self.logged_pace
        steps, samples, seconds = (b - a for a, b in zip(then, now, strict=True))
        resources: dict[str, float] = {}
        if steps and seconds > 0:
            resources |= {"samples_per_s": samples / seconds, "step_s": seconds / steps}
        resources["peak_memory_bytes"] = peak_memory_bytes(self.run.device.type)
        if (share := self.run.resolved["padding_share"]) is not None:
            resources["padding_share"] = share
        return resources

    def _tell_unreached(self) -> None:
        """Say once which parameters have had no gradient: setting gradients to None leaves those alone."""
        self.seeks_unreached = False
        if self.unreached:
            names = sorted(self.unreached)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            what = "get no gradient, and so neither updates nor weight decay"
            self.run.display.note(f"{', '.join(names[:5])}{more} {what}")


def sum_and_read(values: Sequence[Tensor | float], device: torch.device, ranks: Ranks) -> list[float]:
    """Scalars of this rank, summed over all ranks. Makes the host wait for the device."""
    dtype = devices.sum_dtype(device)
    scalars = [torch.as_tensor(value).to(device, dtype) for value in values]
    return sum_over_ranks(torch.stack(scalars), ranks).tolist()


def _data_ended(run: Run) -> DataError:
    what = f"the data ended after step {run.progress.step} of {run.total_steps}"
    return DataError(
        "D006", what, key="steps", value=run.total_steps, suggestion="Set steps to what the data has"
    )
