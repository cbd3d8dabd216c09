"""Which of several ranks the others wait for, and in what, by the ledger that each of them keeps anyway."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ptfast.core.clock import STEP, label
from ptfast.run import Run

SLOWER = 0.2
"""Part by which a rank has to make all steps longer."""
LEAST_S = 1.0
"""Time in steps that a verdict takes: over less, chance decides."""


class Stragglers:
    """Compares what each rank does itself, which is all but waiting for the gradients of the others.

    Figures travel with the votes at a look, so that nothing more is exchanged. A slow rank is said once.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._before = run, dict(run.clock.seconds)
        self._sums = [0.0] * (run.ranks.num_ranks * len(STEP))

    def own(self) -> list[float]:
        """Seconds by cause of a step, in the order of `STEP`, since the last call."""
        before, self._before = self._before, dict(self._run.clock.seconds)
        return [self._before.get(cause, 0.0) - before.get(cause, 0.0) for cause in STEP]

    def receive(self, figures: Sequence[float]) -> None:
        """Take the `own` of all ranks one after another; warn of one that makes steps `SLOWER`."""
        if self._run.ranks.num_ranks == 1:
            return
        self._sums = [old + new for old, new in zip(self._sums, figures, strict=True)]
        size, run = len(STEP), self._run
        ranks = [
            dict(zip(STEP, self._sums[at : at + size], strict=True)) for at in range(0, len(figures), size)
        ]
        if min(sum(each.values()) for each in ranks) < LEAST_S:
            return
        self._sums = [0.0] * len(figures)
        busy = [sum(each.values()) - each["gradient_sync"] for each in ranks]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        others = [each for rank, each in enumerate(ranks) if rank != slowest]
        extra_s = busy[slowest] - statistics.median(busy[:slowest] + busy[slowest + 1 :])
        share = extra_s / (sum(ranks[slowest].values()) - extra_s)
        if share < SLOWER or slowest in run.slow_ranks:
            return
        excess = {
            cause: seconds - statistics.median(each[cause] for each in others)
            for cause, seconds in ranks[slowest].items()
            if cause != "gradient_sync"
        }
        cause = max(excess, key=excess.__getitem__)
        run.slow_ranks[slowest] = {"step": run.progress.step, "cause": cause, "slower": share}
        what = f"rank {slowest} is slower than the others, by {label(cause)} above all"
        run.display.warn(f"{what}: steps take {share:.0%} longer for it by step {run.progress.step}")
