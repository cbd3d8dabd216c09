"""Batches of sequences of similar length, and the share of padding."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptfast.core.batch_plan import BatchPlan, DropLast
from ptfast.core.durations import Duration
from ptfast.data.map_source import Padding
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, Sampler, permutation

MOST_STEPS = 10_000
"""Maximum number of steps whose padding is counted."""


class LengthPlan(BatchPlan):
    """Batches of samples of similar length, in random order; each sample is used once per epoch.

    Random batches are mostly padding. Here samples are sorted by length bucket, shuffled within a bucket, and
    split into batches, which are used in random order. Buckets are 3 to 6 % of a length or
    `padding.multiple` tokens wide, so every epoch mixes batches differently, as a function of (lengths, seed,
    epoch). All epochs have the same number of steps.

    Args:
        lengths, limit: tokens of each sample, and the maximum length of the data.
        batch_tokens: tokens of a step, padding included; a step takes as many samples as fit, instead of
            `batch_size`.
        drop_last: drop the short batch of an epoch, whose lengths differ from epoch to epoch, or `pad` it
            with samples of similar length. Token-budget batches are never short.

    Cost: a sort of the samples in every epoch.
    Source: Khomenko et al. 2016, arXiv:1708.05604; for token budgets, Vaswani et al. 2017, arXiv:1706.03762,
        section 5.1.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        *,
        limit: int,
        padding: Padding,
        batch_size: int,
        batch_tokens: int | None,
        drop_last: DropLast,
        seed: int,
    ) -> None:
        size = len(lengths)
        # The upper bound of each sample's length bucket.
        octaves = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        widths = np.maximum(1 << np.maximum(octaves - 4, 0), padding.multiple)
        self._classes = -(-lengths // widths) * widths
        self._seed = seed
        # Prefetched batches may belong to the next epoch.
        self._epoch = lru_cache(maxsize=2)(self._draw)
        self._bounds: NDArray[np.int64] | None = None
        if batch_tokens is not None:
            widest = np.full(size, limit) if padding.fixed else np.minimum(np.sort(self._classes), limit)
            bounds = [0]
            while (start := bounds[-1]) < size:
                following = widest[start : start + batch_tokens // int(widest[start])]
                padded = following * np.arange(1, len(following) + 1)
                bounds.append(start + max(1, int(np.searchsorted(padded, batch_tokens, side="right"))))
            self._bounds = np.array(bounds)
            batch_size = max(1, round(size / (len(self._bounds) - 1)))
        super().__init__(size, batch_size, drop_last)
        if self._bounds is not None:
            self.steps_per_epoch = len(self._bounds) - 1

    def order(self, epoch: int) -> Indices:
        """Return the order of the samples, of which `batch` returns slices."""
        return self._epoch(epoch)[0]

    def batch(self, step: int) -> tuple[int, int, int]:
        assert self.steps_per_epoch
        epoch, position = divmod(step, self.steps_per_epoch)
        _, bounds, turns = self._epoch(epoch)
        which = int(turns[position])
        start, stop = int(bounds[which]), int(bounds[which + 1])
        if self.drop_last == "pad" and self._bounds is None:
            # The short batch is filled with its neighbors, which have similar lengths.
            start = max(0, min(start, len(self._classes) - self.batch_size))
            stop = start + self.batch_size
        return epoch, start, stop

    def steps(self, duration: Duration, total_steps: int | None) -> int:
        if duration.unit == "samples" and self.size:
            duration = Duration(duration.value / self.size, "epochs")
        return super().steps(duration, total_steps)

    def all_sizes(self) -> set[int]:
        return super().all_sizes() if self._bounds is None else {*np.diff(self._bounds).tolist()}

    def _draw(self, epoch: int) -> tuple[Indices, NDArray[np.int64], Indices]:
        """Return the samples from short to long, the bounds of batches, and the batch of each step."""
        size, bounds = len(self._classes), self._bounds
        whole, rest = divmod(size, self.batch_size)
        num_batches = whole + (rest > 0) if bounds is None else len(bounds) - 1
        shuffled = permutation(self._seed, epoch, size)
        order = shuffled[np.argsort(self._classes[shuffled], kind="stable")]
        turns = permutation(counter_draws.key(self._seed, counter_draws.BATCHES), epoch, num_batches)
        if bounds is None:
            widths = np.full(num_batches, self.batch_size)
            if rest:
                # The last step gets the short batch, which may be of any length.
                widths[turns[-1]] = rest
            bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
        return order, bounds, turns


def padding_share(sampler: Sampler, lengths: NDArray[np.int64], limit: int, padding: Padding) -> float:
    """Return the share of padding among the tokens of the first epoch, in [0, 1), for a single rank."""
    texts = padded = 0
    for step in range(min(sampler.plan.steps_per_epoch or 0, MOST_STEPS)):
        for micro_batch in sampler.step(step)[0]:
            if micro_batch.num_samples:
                own = lengths[micro_batch.indices]
                texts += int(own.sum())
                padded += padding.width(int(own.max()), limit) * len(own)
    return 1 - texts / padded if padded else 0.0
