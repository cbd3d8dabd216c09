"""Optimizer steps on scaled fp16 gradients, of which those that overflow are left out and counted."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ptfast.core.resolved import Progress


class ScaledSteps:
    """Takes the steps of an optimizer whose gradients are scaled, and counts those that are left out.

    Whether a step was left out is known on the device alone. The learning rate goes by how many have been
    taken, as torch advises for its schedulers under a gradient scaler, and is the host's to set: so the count
    follows each step to the host, which looks at it one step late. A fixed delay, and not whatever has
    arrived, lets a run that is resumed set the same rates as one never stopped.

    Args:
        scaler: of the run, its state restored.
        optimizer: whose steps are taken. Fused ones and ours receive it on the device; torch's others make
            the host wait in every step.
        progress: what had been left out before.

    Cost: some tiny kernels and a copy of 8 bytes a step. The host waits where it is two steps ahead of the
    device, which then has more than a step's work before it.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.scaler, self._optimizer = scaler, optimizer
        self._one = torch.ones((), device=device)
        self.scale = scaler.scale(self._one)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        self.in_a_row = zero
        self.skipped = zero > 0
        """True if the last step was left out: read off the scale, which falls then; on the device."""
        self._skipped = zero + progress.skipped_steps
        # The counts after the last step but one and after the last.
        counts = (progress.skipped_before, progress.skipped_steps)
        self._copies = deque(_Copy(count, device) for count in counts)

    @property
    def held_steps(self) -> int:
        """Steps that the schedule is behind in the step to come: those left out before the last one."""
        return self._copies[0].read()

    def unscale(self) -> None:
        """Bring gradients to their own size, to be clipped."""
        self.scaler.unscale_(self._optimizer)

    def take(self) -> None:
        """Take a step, or leave it out where the scaled gradients overflow."""
        self.scaler.step(self._optimizer)
        self.scaler.update()
        scale = self.scaler.scale(self._one)
        self.skipped, self.scale = scale < self.scale, scale
        self.in_a_row = (self.in_a_row + 1) * self.skipped
        self._skipped = self._skipped + self.skipped
        self._copies.rotate(-1)
        self._copies[-1].send(self._skipped)

    def note(self, progress: Progress) -> None:
        """Write the counts into `progress`. Makes the host wait for the device."""
        progress.skipped_before, progress.skipped_steps = (copy.read() for copy in self._copies)


class _Copy:
    """A whole number on its way from the device to the host."""

    def __init__(self, value: int, device: torch.device) -> None:
        on_device = device.type != "cpu"
        self._value = torch.tensor(value, pin_memory=on_device)
        self._arrived: Any = torch.Event(device=device) if on_device else None

    def send(self, value: Tensor) -> None:
        self._value.copy_(value, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._value)
