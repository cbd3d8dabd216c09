"""From gradients to new weights: clip, then take the optimizer's step, or skip it."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ptfast.core.distributed import sum_over_ranks
from ptfast.core.errors import described
from ptfast.core.protocols import StepBatch, takes_own_steps
from ptfast.core.tensors.async_host_copy import wait_for
from ptfast.core.tensors.dtensors import is_sharded, local_part
from ptfast.core.tensors.kept_buffers import KeptBuffers
from ptfast.optim.build_optimizer import build_step
from ptfast.run import Run
from ptfast.training.loop.accumulation import GradientExchange
from ptfast.training.loop.loss_accumulator import LossAccumulator
from ptfast.training.user_code import UserPart

READ_AT_ONCE = ("cpu",)
"""Devices whose values the host reads without waiting."""
OPTIMIZER_NAME = "optimizer"
"""The key of a parameter group that names the optimizer with which a task steps it."""


class PlainUpdate:
    """Clips the gradients and takes the optimizer's step."""

    skipped: Tensor | None = None
    """True if the last step was skipped, 0-d, on the device; None if the host knows that it was taken."""
    counts: tuple[Tensor | int, ...] = ()
    """Numbers of skipped steps: in a row, before the last step, and in total; the same on all ranks."""
    schedule_lag = 0
    """Number of skipped steps by which the schedule lags in the next step."""
    limit, cause = math.inf, ""
    """Consecutive skipped steps that end the run, and the reason steps are skipped."""
    explains_skips = False
    """Whether the first skipped step is explained at once."""

    def __init__(self, run: Run, step: Callable[[], object] | None = None) -> None:
        self._run, self._step = run, step or build_step(run.optimizer)

    def prepare(self) -> None:
        """Save values that a skipped step must not change; called before its forward pass."""

    def step(self, batch: StepBatch) -> None:
        """Update the weights from their gradients, or skip the step."""
        if self._run.clip is not None:
            self._run.clip()
        self._step()

    def undo_if_skipped(self, batch: StepBatch) -> None:
        """Undo the losses and statistics of the last step if it was skipped."""

    def unscaled(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients as they are before `step`, without a loss scale."""
        return norm


class SkippingUpdate(PlainUpdate):
    """The base class of updates that may skip a step and then restore buffers and losses."""

    def __init__(
        self, run: Run, losses: LossAccumulator, exchange: GradientExchange, step: Callable[[], object]
    ) -> None:
        super().__init__(run, step)
        self._losses, self._exchange, self._buffers = losses, exchange, KeptBuffers(run.model)

    def prepare(self) -> None:
        self._buffers.keep()

    def undo_if_skipped(self, batch: StepBatch) -> None:
        if self.skipped is not None:
            self._losses.leave_out(self.skipped)
            self._buffers.put_back(self.skipped)
            self._exchange.reread_statistics()


class ScaledUpdate(SkippingUpdate):
    """Takes the steps of an optimizer whose gradients are scaled (fp16), and skips those that overflow.

    The learning rate follows the number of steps taken, which only the device knows. After each step the
    count is copied to the host and read one step later, so that a resumed run sets the same learning rates.

    Cost: a few tiny kernels and a copy of 8 bytes per step. The host waits only when it is two steps ahead of
    the device, and in every step if torch's optimizer is not fused, which then reads the scale.
    """

    limit = 30
    """Number of consecutive skipped steps, each halving the scale, after which no scale will help."""
    cause = "fp16 gradients overflowed"

    def __init__(self, run: Run, losses: LossAccumulator, exchange: GradientExchange) -> None:
        super().__init__(run, losses, exchange, run.optimizer.step)
        assert run.precision.scaler is not None
        self.scaler, progress, device = run.precision.scaler, run.progress, run.device
        self._one = torch.ones((), device=device)
        self.scale = self.scaler.scale(self._one)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row, self.skipped = zero, zero > 0
        self._skipped, self._skipped_before = zero + progress.skipped_steps, zero + progress.skipped_before
        on_device = device.type != "cpu"
        # The counts after the second-last and the last step, and the events of their arrival.
        counts = (progress.skipped_before, progress.skipped_steps)
        self._counts = deque(torch.tensor(count, pin_memory=on_device) for count in counts)
        self._arrivals = deque(torch.Event(device=device) for _ in counts if on_device)

    @property
    def schedule_lag(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of steps skipped before the last one."""
        if self._arrivals:
            wait_for(self._arrivals[0])
        return int(self._counts[0])

    @property
    def counts(self) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Numbers of skipped steps on the device: in a row, before the last step, and in total."""
        return self._in_a_row, self._skipped_before, self._skipped

    def step(self, batch: StepBatch) -> None:
        """Unscale, clip and step, or skip the step if the scaled gradients overflow."""
        if self._run.clip is not None:
            self.scaler.unscale_(self._run.optimizer)
            self._run.clip()
        self.scaler.step(self._run.optimizer)
        self.scaler.update()
        scale = self.scaler.scale(self._one)
        # The scale falls after a step that overflows.
        self.skipped, self.scale = scale < self.scale, scale
        self._in_a_row = (self._in_a_row + 1) * self.skipped
        self._skipped_before, self._skipped = self._skipped, self._skipped + self.skipped
        self._counts.rotate(-1)
        self._counts[-1].copy_(self._skipped, non_blocking=True)
        if self._arrivals:
            self._arrivals.rotate(-1)
            self._arrivals[-1].record()

    def unscaled(self, norm: Tensor) -> Tensor:
        return norm / self.scale


class CheckedUpdate(SkippingUpdate):
    """Takes the steps of an optimizer, except those whose loss or gradients are not finite.

    A skipped step changes neither the weights nor the optimizer's state and step counts. If the optimizer
    accepts `found_inf`, like fused ones and ptfast's, the device decides and the host never waits.

    Cost: one read of the gradients per step, and with several ranks a sum of one number. 5 us on a CPU.
    """

    cause = "loss or gradients were not finite"
    explains_skips = True

    def __init__(self, run: Run, losses: LossAccumulator, exchange: GradientExchange) -> None:
        optimizer, device = run.optimizer, run.device
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._ranks, self.limit = run.ranks, run.plan.numerics.limit
        at_once = device.type in READ_AT_ONCE
        self._special = any(is_sharded(each) or each.is_complex() for each in self._parameters)
        # On CUDA the kernel of `_check` rejects bfloat16: PyTorch issue 127176.
        self._has_halves = not at_once and any(each.dtype == torch.bfloat16 for each in self._parameters)
        takes_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._on_device = not at_once and takes_flag and not is_sharded(self._parameters[0])
        if not at_once and not self._on_device:
            name = type(optimizer).__name__
            run.display.warn(f"numerics: {name} has no `found_inf`, so every step waits for the device")
        self._found, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        step = build_step(optimizer, self._found if self._on_device else None)
        super().__init__(run, losses, exchange, step)
        self._yes = torch.ones((), device=device, dtype=torch.bool)
        zero = torch.zeros((), device=device, dtype=torch.int64) if self._on_device else 0
        self._step_number, self._last = run.progress.step, zero
        self._in_a_row: Tensor | int = zero
        self._skipped_steps: Tensor | int = zero + run.progress.skipped_steps

    @property
    def counts(self) -> tuple[Tensor | int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Numbers of skipped steps: in a row, and in total (twice); then the last one, counted from 1."""
        return self._in_a_row, self._skipped_steps, self._skipped_steps, self._last

    def prepare(self) -> None:
        super().prepare()
        if not self._on_device:
            self._losses.remember()

    def step(self, batch: StepBatch) -> None:
        """Check loss and gradients, clip and step, or skip the step."""
        # Check before clipping, which would hide infinities.
        self._check(self._losses.loss_sum)
        if self._run.clip is not None:
            self._run.clip()
        self._take()

    def undo_if_skipped(self, batch: StepBatch) -> None:
        super().undo_if_skipped(batch)
        if self.skipped is not None and not self._on_device:
            self._losses.explain(self._run.progress.step, batch)

    def _check(self, loss_sum: Tensor) -> None:
        """Record in `_found` whether the sum of the losses or a gradient is not finite."""
        parts = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._special or any(part.is_sparse for part in parts):
            parts = [local_part(part._values() if part.is_sparse else part) for part in parts]
            parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
        if self._has_halves:
            halves = [part for part in parts if part.dtype == torch.bfloat16 and part.numel()]
            norms = torch._foreach_norm(halves, math.inf) if halves else []
            parts = [*(part for part in parts if part.dtype != torch.bfloat16), *(n.float() for n in norms)]
        # With a scale of 1, this kernel only checks whether all gradients are finite.
        torch._amp_foreach_non_finite_check_and_unscale_([*parts, loss_sum], self._found, self._one)
        if self._ranks.distributed:
            # Torch's kernels skip a step only if the flag is exactly 1.
            sum_over_ranks(self._found, self._ranks).clamp_(max=1)

    def _take(self) -> None:
        self._step_number += 1
        if self._on_device:
            self._step()
            left_out = self.skipped = self._found > 0
        elif self._found.item():
            self.skipped, left_out = self._yes, 1
        else:
            self._step()
            self.skipped, self._in_a_row = None, 0
            return
        self._last = self._last + (self._step_number - self._last) * left_out
        self._in_a_row = (self._in_a_row + 1) * left_out
        self._skipped_steps = self._skipped_steps + left_out
        self._found.zero_()


class TaskUpdate(PlainUpdate):
    """Lets a task take its own step: forward, backward, and its named optimizers."""

    def __init__(self, run: Run, losses: LossAccumulator) -> None:
        super().__init__(run)
        self._losses, self._optimizers = losses, named_optimizers(run.optimizer)

    def step(self, batch: StepBatch) -> None:
        """Call the task's `step`, which returns the sum of the losses to log and their count."""
        run = self._run
        run.clock.to("forward")
        run.seed_step(run.progress.step, 0)
        task: Any = run.task
        with run.precision.autocast:
            given: Any = task.step(run.forward, batch.micro_batches[0].data, self._optimizers)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)):
            what = f"step returns {described(given)}, but must return the sum of its losses and their count"
            raise UserPart("task", task).error(what)
        self._losses.add(given[0].detach(), given[1])


def build_update(run: Run, losses: LossAccumulator, exchange: GradientExchange) -> PlainUpdate:
    """Build the update of a run from its task, its precision, and its handling of non-finite values."""
    if takes_own_steps(run.task):
        return TaskUpdate(run, losses)
    if run.precision.scaler is not None:
        return ScaledUpdate(run, losses, exchange)
    return CheckedUpdate(run, losses, exchange) if run.plan.numerics.mode == "skip" else PlainUpdate(run)


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
