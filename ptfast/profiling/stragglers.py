"""Find the rank that the others wait for, and the cause, from the time ledger of each rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ptfast.core.clock import STEP, label
from ptfast.run import Run

SLOWER = 0.2
"""Fraction by which a rank must lengthen all steps to be reported."""
LEAST_S = 1.0
"""Seconds of training that a verdict needs; shorter times are too noisy."""


class Stragglers:
    """Compares the time that ranks spend on their own work: all except waiting for gradients of others.

    Times are sent along with the votes of ranks, without extra communication. A slow rank is reported once.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._before = run, dict(run.clock.seconds)
        self._sums = [0.0] * (run.ranks.world_size * len(STEP))

    def own(self) -> list[float]:
        """Return the seconds by cause since the last call, in the order of `STEP`."""
        before, self._before = self._before, dict(self._run.clock.seconds)
        return [self._before.get(cause, 0.0) - before.get(cause, 0.0) for cause in STEP]

    def receive(self, seconds: Sequence[float]) -> None:
        """Compare the results of `own` of all ranks, in order; warn about a rank that delays the others."""
        if self._run.ranks.world_size == 1:
            return
        self._sums = [old + new for old, new in zip(self._sums, seconds, strict=True)]
        size, run = len(STEP), self._run
        ranks = [
            dict(zip(STEP, self._sums[at : at + size], strict=True)) for at in range(0, len(seconds), size)
        ]
        if min(sum(each.values()) for each in ranks) < LEAST_S:
            return
        self._sums = [0.0] * len(seconds)
        busy = [sum(each.values()) - each["gradient_sync"] for each in ranks]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        others = [each for rank, each in enumerate(ranks) if rank != slowest]
        extra_s = busy[slowest] - statistics.median(busy[:slowest] + busy[slowest + 1 :])
        share = extra_s / (sum(ranks[slowest].values()) - extra_s)
        if share < SLOWER or slowest in run.slow_ranks:
            return
        excess = {
            cause: own_s - statistics.median(each[cause] for each in others)
            for cause, own_s in ranks[slowest].items()
            if cause != "gradient_sync"
        }
        cause = max(excess, key=excess.__getitem__)
        run.slow_ranks[slowest] = {"step": run.progress.step, "cause": cause, "slower": share}
        what = f"rank {slowest} is slower than the others, mainly in {label(cause)}"
        run.display.warn(f"{what}: steps take {share:.0%} longer because of it, at step {run.progress.step}")
