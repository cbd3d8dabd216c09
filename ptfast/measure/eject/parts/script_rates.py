"""The learning-rate schedule of a script: a factor on the rate, and the momentum where that is cycled."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

SCHEDULE = "constant"
WARMUP_STEPS = 0
DELAY_STEPS = 0
SPAN_STEPS = 1
MILESTONES: tuple[int, ...] = ()
GAMMA = 0.1
END_FACTOR = 0.0
POWER = 1.0
PHASE_ENDS: tuple[float, ...] = (0.0,)
PHASE_FACTORS: tuple[float, ...] = (1.0, 1.0)
PHASE_MOMENTA: tuple[float, ...] = ()
ANNEAL = "linear"


def lr_factor(step: int) -> float:
    """Factor on the learning rate of a step, counted from 0."""
    if not WARMUP_STEPS:
        return shape(step)
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS * shape(max(step - DELAY_STEPS, 0))
    return shape(step - DELAY_STEPS)


def shape(step: int) -> float:
    """The schedule without its warm-up."""
    if SCHEDULE in ("step", "multistep"):
        return GAMMA ** bisect_right(MILESTONES, step)
    if SCHEDULE == "onecycle":
        return phased(step, PHASE_FACTORS)
    if SCHEDULE == "constant":
        return 1.0
    left = max(1 - step / SPAN_STEPS, 0.0)
    if SCHEDULE == "cosine":
        return END_FACTOR + (1 - END_FACTOR) * (1 - math.cos(math.pi * left)) / 2
    if SCHEDULE == "polynomial":
        return END_FACTOR + (1 - END_FACTOR) * left**POWER
    return END_FACTOR + (1 - END_FACTOR) * left


def momentum(step: int) -> float:
    """Momentum of a step: low where the rate is high."""
    if WARMUP_STEPS:
        step = max(step - DELAY_STEPS, 0)
    return phased(step, PHASE_MOMENTA)


def phased(step: int, values: Sequence[float]) -> float:
    """From each of `values` to the next, which is reached at the end of a phase."""
    step = min(step, SPAN_STEPS - 1)
    phase = bisect_left(PHASE_ENDS, step, hi=len(PHASE_ENDS) - 1)
    start = (0.0, *PHASE_ENDS)[phase]
    length = PHASE_ENDS[phase] - start
    done = (step - start) / length if length else 1.0
    first, last = values[phase], values[phase + 1]
    if ANNEAL == "cosine":
        return last + (first - last) / 2 * (1 + math.cos(math.pi * done))
    return first + (last - first) * done
