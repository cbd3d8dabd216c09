"""Batches of sequences of like length: which samples come together, and how much of them is padding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptfast.core.batch_plan import BatchPlan, constant
from ptfast.core.durations import Duration
from ptfast.data.map_source import Padding
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, Sampler, permutation

MOST_STEPS = 10_000
"""Steps whose padding is counted; more of an epoch are as they are."""


class Epoch(NamedTuple):
    """Everything that is drawn anew for each epoch."""

    order: Indices
    """All samples, from short to long."""
    cuts: NDArray[np.int64]
    """Where batches begin and end in that order."""
    turns: Indices
    """Which batch each step takes."""


class LengthPlan(BatchPlan):
    """Batches of samples of like length, in a random order; every sample once in an epoch.

    A batch is as long as its longest sample, so that samples which come together by chance are mostly
    padding. Here they are ordered by the class of their length, at random within a class, and cut into
    batches, of which each step takes one at random. Classes are 3 to 6 % of a length wide, or
    `padding.multiple` tokens: who meets whom changes from epoch to epoch. Everything is a function of
    (lengths, seed, epoch), and an epoch has as many steps as any other.

    Args:
        lengths: tokens of each sample.
        limit: tokens of the longest that the data allows.
        batch_tokens: a step takes as many samples instead as fit into so many tokens, padding included.
        last: `keep` or `drop` the batch of an epoch that is short, or `pad` it with samples of like length.
            It is of other lengths in every epoch. Where tokens are counted none is short.

    Cost: a sort of the samples in every epoch.
    Source: Khomenko et al. 2016, arXiv:1708.05604; Vaswani et al. 2017, arXiv:1706.03762, section 5.1, for
        batches of so many tokens.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        *,
        limit: int,
        padding: Padding,
        batch_size: int,
        batch_tokens: int | None,
        last: str,
        seed: int,
    ) -> None:
        size = len(lengths)
        self._classes = _classes(lengths, padding.multiple)
        self._seed, self._epochs = seed, dict[int, Epoch]()
        self._cuts: NDArray[np.int64] | None = None
        if batch_tokens is not None:
            longest = np.minimum(np.sort(self._classes), limit)
            self._cuts = _cut_by_tokens(np.full(size, limit) if padding.fixed else longest, batch_tokens)
            batch_size = max(1, round(size / (len(self._cuts) - 1)))
        super().__init__(size, constant(batch_size), last)
        if self._cuts is not None:
            self.steps_per_epoch = len(self._cuts) - 1

    def order(self, epoch: int) -> Indices:
        """The order of the samples that `batch` cuts pieces out of."""
        return self._epoch(epoch).order

    def batch(self, step: int) -> tuple[int, int, int]:
        """Epoch of a step, and where its samples begin and end in the order of that epoch."""
        assert self.steps_per_epoch
        epoch, position = divmod(step, self.steps_per_epoch)
        _, cuts, turns = self._epoch(epoch)
        which = int(turns[position])
        start, stop = int(cuts[which]), int(cuts[which + 1])
        if self._pads and self._cuts is None:
            # The short one takes in its neighbours, which are of like length.
            start = max(0, min(start, len(self._classes) - self.batch_size))
            stop = start + self.batch_size
        return epoch, start, stop

    def steps(self, duration: Duration, total_steps: int | None) -> int:
        """`duration` from the start of the run, in optimizer steps to the nearest."""
        if duration.unit == "samples" and self.size:
            duration = Duration(duration.value / self.size, "epochs")
        return super().steps(duration, total_steps)

    def all_sizes(self) -> set[int]:
        """Every number of samples that a step has."""
        return super().all_sizes() if self._cuts is None else {*np.diff(self._cuts).tolist()}

    def _epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            # Batches that are read ahead are of the next epoch already.
            self._epochs = {**dict([*self._epochs.items()][-1:]), epoch: self._draw(epoch)}
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> Epoch:
        size = len(self._classes)
        shuffled = permutation(self._seed, epoch, size)
        order = shuffled[np.argsort(self._classes[shuffled], kind="stable")]
        cuts = self._cuts
        if cuts is not None:
            return Epoch(order, cuts, self._turns(epoch, len(cuts) - 1))
        whole, rest = divmod(size, self.batch_size)
        widths = np.full(whole + (rest > 0), self.batch_size)
        turns = self._turns(epoch, len(widths))
        if rest:
            # The last in its turn, and by that of any length.
            widths[turns[-1]] = rest
        return Epoch(order, np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]), turns)

    def _turns(self, epoch: int, num_batches: int) -> Indices:
        return permutation(counter_draws.key(self._seed, counter_draws.BATCHES), epoch, num_batches)


def padding_share(sampler: Sampler, lengths: NDArray[np.int64], limit: int, padding: Padding) -> float:
    """Which part of all tokens of the first epoch is padding, in [0, 1); `sampler` is that of a lone rank."""
    texts = padded = 0
    for step in range(min(sampler.plan.steps_per_epoch or 0, MOST_STEPS)):
        for share in sampler.step(step)[0]:
            if share.num_samples:
                own = lengths[share.indices]
                texts += int(own.sum())
                padded += padding.width(int(own.max()), limit) * len(own)
    return 1 - texts / padded if padded else 0.0


def _classes(lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """The upper bound of each length's class."""
    octaves = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    widths = np.maximum(1 << np.maximum(octaves - 4, 0), multiple)
    return -(-lengths // widths) * widths


def _cut_by_tokens(longest: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Where batches of at most `budget` tokens begin and end."""
    cuts = [0]
    while cuts[-1] < len(longest):
        start = cuts[-1]
        following = longest[start : start + budget // int(longest[start])]
        taken = np.searchsorted(following * np.arange(1, len(following) + 1), budget, side="right")
        cuts.append(start + max(1, int(taken)))
    return np.array(cuts)
