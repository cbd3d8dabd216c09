"""Which samples make up which optimizer step, with batch sizes that grow in stages."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from ptfast.core.durations import Duration

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DropLast = bool | Literal["pad"]


class Stages(NamedTuple):
    """A figure that grows in stages."""

    values: tuple[int, ...]
    """Rising."""
    starts: tuple[int, ...]
    """The first step, from 0, of each value."""

    def at(self, step: int) -> int:
        return self.values[bisect_right(self.starts, step) - 1]


def grow(first: int, last: int, multiple: int, over_steps: int) -> Stages:
    """About equal stages from `first` by multiples of `multiple` to `last`, which begins at `over_steps`."""
    values = (first, *range((first // multiple + 1) * multiple, last, multiple), last)
    return Stages(values, tuple(index * over_steps // (len(values) - 1) for index in range(len(values))))


def constant(value: int) -> Stages:
    return Stages((value,), (0,))


class BatchPlan:
    """Which samples, by their place in the order of their epoch, make up each optimizer step.

    A pure function of the step: a table with an entry per epoch before the last stage, divisions after it.

    Args:
        size: samples of an epoch; None for data of unknown length, which is one endless epoch.
        sizes: samples of a step over all ranks, by step.
        drop_last: leave out the last batch of an epoch if it is short, or `pad` it.
    """

    def __init__(self, size: int | None, sizes: Stages, drop_last: DropLast = False) -> None:
        self.size, self.sizes, self.batch_size = size, sizes, sizes.values[-1]
        self.grows = len(sizes.values) > 1
        self.drop_last, self._drops, self._pads = drop_last, drop_last is True, drop_last == "pad"
        stages = zip(sizes.values, pairwise(sizes.starts), strict=False)
        self._before = [0]
        for value, (start, stop) in stages:
            self._before.append(self._before[-1] + (stop - start) * value)
        self.steps_per_epoch = None if size is None else self._parts(size, self.batch_size)
        """Of an epoch at the full size; None for data of unknown length."""
        self._firsts = [0]
        while size is not None and self.steps_per_epoch and self._firsts[-1] < sizes.starts[-1]:
            target = self._samples_before(self._firsts[-1]) + size
            stage = bisect_right(self._before, target) - 1
            parts = self._parts(target - self._before[stage], sizes.values[stage])
            self._firsts.append(sizes.starts[stage] + parts)

    def order(self, epoch: int) -> NDArray[np.int64] | None:
        """The order of an epoch's samples that `batch` refers to; None if any will do."""
        return None

    def batch(self, step: int) -> tuple[int, int, int]:
        """Epoch of a step, and the range of its samples in that epoch, which begins again if it is padded."""
        if self.size is None:
            start = self._samples_before(step)
            return 0, start, start + self.sizes.at(step)
        epoch, first, _ = self.epoch_of(step)
        if step >= self._firsts[-1]:
            start, size = (step - first) * self.batch_size, self.batch_size
        else:
            start, size = self._samples_before(step) - self._samples_before(first), self.sizes.at(step)
        return epoch, start, start + size if self._pads else min(start + size, self.size)

    def epoch_of(self, step: int) -> tuple[int, int, int]:
        """The epoch that a step of data with a length lies in, its first step, and that of the next epoch."""
        steady, per_epoch = self._firsts[-1], self.steps_per_epoch
        assert per_epoch is not None
        if step >= steady:
            epochs, position = divmod(step - steady, per_epoch)
            return epochs + len(self._firsts) - 1, step - position, step - position + per_epoch
        epoch = bisect_right(self._firsts, step) - 1
        return epoch, self._firsts[epoch], self._firsts[epoch + 1]

    def epoch_at(self, step: int) -> float:
        """Epochs done after so many steps; 0 for data of unknown length."""
        if not self.steps_per_epoch:
            return 0.0
        if not self.grows:
            return step / self.steps_per_epoch
        epoch, first, end = self.epoch_of(step)
        return epoch + (step - first) / (end - first)

    def steps(self, duration: Duration, total_steps: int | None) -> int:
        """`duration` from the start of the run, in optimizer steps; as `Duration.steps` if nothing grows."""
        epochs = duration.value
        if duration.unit == "samples" and self.size is not None:
            epochs /= self.size
        elif duration.unit != "epochs":
            epochs = None
        per_epoch = self.steps_per_epoch
        if not self.grows or not epochs or self.size is None or per_epoch is None:
            return duration.steps(total_steps, per_epoch, self.batch_size)
        # The step that begins after so many epochs, to the nearest.
        whole, steady_epochs = int(epochs), len(self._firsts) - 1
        first, done, length = self._firsts[-1], epochs - steady_epochs, per_epoch
        if whole < steady_epochs:
            first, done = self._firsts[whole], epochs - whole
            length = self._firsts[whole + 1] - first
        return max(1, first + math.floor(done * length + 0.5))

    def every(self, duration: Duration, total_steps: int) -> Sequence[int]:
        """The steps, rising, after which another `duration` is over; none for one of 0. Raises as `steps`."""
        steps = self.steps(duration, total_steps)
        if not steps:
            return ()
        if not self.grows or duration.unit not in ("epochs", "samples"):
            return range(steps, total_steps + 1, steps)
        found: list[int] = []
        times = 1
        while steps <= total_steps:
            if not found or steps > found[-1]:
                found.append(steps)
            times += 1
            steps = self.steps(Duration(times * duration.value, duration.unit), total_steps)
        return found

    def all_sizes(self) -> set[int]:
        """Every number of samples that a step of this plan can have, however long the run."""
        found = set(self.sizes.values)
        if self.size is not None and self.steps_per_epoch is not None:
            ends = [*self._firsts[1:], self._firsts[-1] + self.steps_per_epoch]
            for end in ends:
                _, start, stop = self.batch(end - 1)
                found.add(stop - start)
            found = {size for size in found if size <= self.size or self._pads}
        return found

    def _samples_before(self, step: int) -> int:
        """Samples of all steps before `step`, were no batch cut short by the end of an epoch."""
        stage = bisect_right(self.sizes.starts, step) - 1
        return self._before[stage] + (step - self.sizes.starts[stage]) * self.sizes.values[stage]

    def _parts(self, samples: int, size: int) -> int:
        return samples // size if self._drops else -(-samples // size)
