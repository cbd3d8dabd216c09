"""From gradients to new weights: clip, then take the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ptfast.core.protocols import StepBatch
from ptfast.optim.build_optimizer import build_step
from ptfast.run import Run


class PlainUpdate:
    """Clips the gradients and takes the optimizer's step."""

    skipped: Tensor | None = None
    """True if the last step was skipped, 0-d, on the device; None if the host knows that it was taken."""
    counts: tuple[Tensor | int, ...] = ()
    """Consecutive skipped steps, before the last step, and in total; the same on all ranks."""
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

    def restore_skipped(self, batch: StepBatch) -> None:
        """Undo the losses and statistics of the last step if it was skipped."""

    def unscaled(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients as they are before `step`, without a loss scale."""
        return norm
