"""Short runs at single learning rates, which settle what the curve of a range test leaves open."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from ptfast.core.run import Run
from ptfast.measure.lr.lr_suggestion import LOSS_DIVERGED
from ptfast.measure.lr.range_test import train_at

FACTOR = math.sqrt(10)
"""Between neighbours: half a decade. Within it the loss hardly depends on the rate."""
MOST_TRIALS = 6


def run_trials(
    run: Run, start: float, *, lowest: float, highest: float, num_steps: int
) -> dict[float, float]:
    """Train anew at single rates, beginning with `start`, until those beside the best one are worse.

    A range test has a few steps at each rate, after all that the lower ones have taught the model: it finds
    the decade. A trial trains at one rate from the start, and every trial on the same batches, so that
    small differences count.

    Args:
        run: as built, on every rank; left as it was.
        lowest, highest: rates that are not to be passed.
        num_steps: of a trial.

    Returns:
        The mean loss of the last quarter of the steps, by rate; infinite where the loss diverged.

    Cost: 3 to 6 trials of `num_steps` optimizer steps.
    """

    def loss_at(lr: float) -> float:
        _, losses, ended = train_at(run, [lr] * num_steps)
        diverged = ended == LOSS_DIVERGED or not losses
        loss = math.inf if diverged else statistics.mean(losses[-max(len(losses) // 4, 1) :])
        run.display.note(f"  {lr:.2g}  {f'loss {loss:.4g}' if math.isfinite(loss) else LOSS_DIVERGED}")
        return loss

    run.display.note(f"trials of {num_steps} steps each")
    return descend(loss_at, start, lowest, highest)


def descend(
    loss_at: Callable[[float], float], start: float, lowest: float, highest: float
) -> dict[float, float]:
    """Losses by rate, from `start` on towards the better neighbour until none is better."""
    losses = {start: loss_at(start)}
    # Above a rate at which the loss diverges there is nothing to find.
    for factor in (1 / FACTOR,) if math.isinf(losses[start]) else (FACTOR, 1 / FACTOR):
        here = start
        while len(losses) < MOST_TRIALS and lowest <= here * factor <= highest:
            beside = here * factor
            losses[beside] = loss_at(beside)
            if losses[beside] >= losses[here] and not math.isinf(losses[here]):
                break
            here = beside
        if here != start:
            break
    return losses
