"""The result of a learning rate range test: its smoothed curve, and the rates that it suggests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LOSS_DIVERGED = "the loss diverged"
SMOOTHING = 0.85
"""Weight of a step in the smoothed loss of the step beside it."""
START_STEPS = 10
"""Steps at the lowest rates, which hardly change anything."""
EXPLODED = 1.5
"""Losses above so many times that of the start end the curve."""
LEAST_FALL = 0.01
"""Part of the loss that has to be gained somewhere; less is no curve but noise."""
DIVERGED = 4.0
"""Training has diverged where the smoothed loss is so many times its lowest."""


def running_mean(losses: Sequence[float]) -> list[float]:
    """Exponential means of the losses up to each step.

    Args:
        losses: of each step, finite.
    """
    mean, weight, means = 0.0, 0.0, []
    for loss in losses:
        mean, weight = SMOOTHING * mean + loss, SMOOTHING * weight + 1
        means.append(mean / weight)
    return means


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential means to both sides of each step, which unlike running ones do not lag behind.

    The curve ends before the first loss that lies far above those of the start: one that explodes would hide
    its neighbours.

    Args:
        losses: of each step, finite.
    """
    start = statistics.median(losses[:START_STEPS])
    exploded = [step for step, loss in enumerate(losses) if loss > EXPLODED * start]
    losses = losses[: exploded[0]] if exploded else losses
    smoothed = []
    for here in range(len(losses)):
        weights = [SMOOTHING ** abs(step - here) for step in range(len(losses))]
        total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        smoothed.append(total / sum(weights))
    return smoothed


def has_diverged(means: Sequence[float]) -> bool:
    """Return True if the newest running mean lies so far above the lowest that higher rates need no trial."""
    low, now = min(means), means[-1]
    # Where losses come near to 0, four times the lowest is little.
    return now > DIVERGED * low and now > low + 0.5 * (means[0] - low)


def suggestions(lrs: Sequence[float], smoothed: Sequence[float]) -> dict[str, float]:
    """Learning rates that a curve suggests, by the rule that finds them; empty where it never falls.

    `steepest` is where the loss falls fastest by the logarithm of the rate. `valley` is the middle between
    where a quarter of the fall is done for good and where the loss is lowest. `minimum/10` is a tenth of the
    rate at which it is lowest, just before it rises again.

    Args:
        lrs: rising by a constant factor.
        smoothed: loss at each of the first of them.
    """
    end = min(range(len(smoothed)), key=smoothed.__getitem__)
    fall = smoothed[0] - smoothed[end]
    if end < 2 or fall < LEAST_FALL * smoothed[0]:
        return {}
    slopes = [smoothed[i + 1] - smoothed[i - 1] for i in range(1, end)]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
    above = [i for i in range(end) if smoothed[i] > smoothed[0] - fall / 4]
    return {
        "steepest": lrs[steepest],
        "valley": math.sqrt(lrs[above[-1]] * lrs[end]),
        "minimum/10": lrs[end] / 10,
    }


def first_trial(found: dict[str, float]) -> float:
    """The rate of the first trial: half a decade below the lowest point of the curve.

    Short runs did best near it: with SGD, AdamW and LAMB, on images, text and digits.
    """
    return found["minimum/10"] * math.sqrt(10)
