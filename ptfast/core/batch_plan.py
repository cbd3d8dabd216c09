"""Which samples make up which optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ptfast.core.durations import Duration

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DropLast = bool | Literal["pad"]


class BatchPlan:
    """The samples of each optimizer step, by their position in the order of the epoch.

    They depend only on the step.

    Args:
        size: samples of an epoch; None for data of unknown length, which is one endless epoch.
        batch_size: samples of a step over all ranks.
        drop_last: drop the last batch of an epoch if it is short, or `pad` it.
    """

    def __init__(self, size: int | None, batch_size: int, drop_last: DropLast = False) -> None:
        self.size, self.batch_size, self.drop_last = size, batch_size, drop_last
        self.steps_per_epoch: int | None = None
        """None for data of unknown length."""
        if size is not None:
            self.steps_per_epoch = size // batch_size if drop_last is True else -(-size // batch_size)

    def order(self, epoch: int) -> NDArray[np.int64] | None:
        """Return the order of an epoch's samples that `batch` refers to; None if any order will do."""
        return None

    def batch(self, step: int) -> tuple[int, int, int]:
        """Return a step's epoch and its range of samples, which wraps to the epoch's start if padded."""
        epoch, first, _ = (0, 0, 0) if self.size is None else self.epoch_of(step)
        start = (step - first) * self.batch_size
        stop = start + self.batch_size
        return epoch, start, stop if self.size is None or self.drop_last == "pad" else min(stop, self.size)

    def epoch_of(self, step: int) -> tuple[int, int, int]:
        """Return a step's epoch, and the first steps of this epoch and the next; needs a known length."""
        assert self.steps_per_epoch
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch, step - position, step - position + self.steps_per_epoch

    def epoch_at(self, step: int) -> float:
        """Return the epochs completed after `step` steps; 0 for data of unknown length."""
        return step / self.steps_per_epoch if self.steps_per_epoch else 0.0

    def steps(self, duration: Duration, total_steps: int | None) -> int:
        """Return `duration` in optimizer steps; raises like `Duration.steps`."""
        return duration.steps(total_steps, self.steps_per_epoch, self.batch_size)

    def every(self, duration: Duration, total_steps: int) -> range:
        """Return every step that ends another `duration`; empty for a duration of 0. Raises like `steps`."""
        steps = self.steps(duration, total_steps)
        return range(steps, total_steps + 1, steps) if steps else range(0)

    def all_sizes(self) -> set[int]:
        """Return all batch sizes that the steps of this plan can have, for a run of any length."""
        if not self.steps_per_epoch:
            return {self.batch_size}
        _, start, stop = self.batch(self.steps_per_epoch - 1)
        return {stop - start} | ({self.batch_size} if self.steps_per_epoch > 1 else set[int]())
