"""Learning-rate schedules as pure functions of the step, so there is no state to restore on resume."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError

Curve = Callable[[int], float]
"""A number for each step, counted from 0."""

NEARLY_HALF = Duration(45, "percent")
FIFTH = Duration(20, "percent")


@dataclass(frozen=True)
class Span:
    """Converts durations, given the steps that a schedule spans and the steps of an epoch."""

    total_steps: int
    plan: BatchPlan

    def steps(self, duration: Duration) -> int:
        """Return `duration` in whole steps; C011 for a unit that this data does not have."""
        try:
            return self.plan.steps(duration, self.total_steps)
        except ValueError as error:
            raise ConfigError("C011", str(error), key="schedule", value=duration) from error

    def position(self, duration: Duration) -> float:
        """Return `duration` in steps; a percentage keeps its fraction of a step, as in torch's one-cycle."""
        if duration.unit == "percent":
            return duration.value / 100 * self.total_steps
        return float(self.steps(duration))


class LRSchedule:
    """How the learning rate changes over a run; subclass it and name your class by import path.

    Schedules that end with the run (cosine, one-cycle) set `spans_run`: they start after the warm-up and span
    the rest of the run. Schedules with points at fixed steps (milestones) count from the run's first step,
    including the warm-up.
    """

    spans_run: bool = False

    def factor(self, span: Span) -> Curve:
        """Return the factor on every parameter group's base learning rate, by step."""
        raise NotImplementedError

    def momentum(self, span: Span) -> Curve | None:
        """Return the momentum (beta1 for Adam's family) by step; None keeps the optimizer's own."""
        return None


class Constant(LRSchedule):
    """Keep the base learning rate throughout."""

    def factor(self, span: Span) -> Curve:
        return lambda step: 1.0


@dataclass
class Step(LRSchedule):
    """Multiply the learning rate by `gamma` after every `every` (StepLR); bare numbers are epochs."""

    every: Duration
    gamma: float = 0.1

    def __post_init__(self) -> None:
        self.every = Duration.parse(self.every, "epochs")

    def factor(self, span: Span) -> Curve:
        gamma = self.gamma
        if span.steps(self.every) < 1:
            raise ConfigError("C005", "less than one step", key="schedule.every", value=self.every)
        at_steps = span.plan.every(self.every, span.total_steps)
        return lambda step: gamma ** bisect_right(at_steps, step)


@dataclass
class MultiStep(LRSchedule):
    """Multiply the learning rate by `gamma` at each of `milestones`, as MultiStepLR; numbers are epochs."""

    milestones: list[Duration]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        self.milestones = [Duration.parse(milestone, "epochs") for milestone in self.milestones]

    def factor(self, span: Span) -> Curve:
        at_steps = [span.steps(milestone) for milestone in self.milestones]
        if at_steps != sorted(at_steps):
            given = "[" + ",".join(map(str, self.milestones)) + "]"
            raise ConfigError("C005", "milestones must be in order", key="schedule.milestones", value=given)
        gamma = self.gamma
        return lambda step: gamma ** bisect_right(at_steps, step)


@dataclass
class Linear(LRSchedule):
    """Fall in a straight line from the base learning rate to `end` times it."""

    end: float = 0.0
    spans_run = True

    def factor(self, span: Span) -> Curve:
        return _to_end(span.total_steps, self.end, lambda left: left)


@dataclass
class Cosine(LRSchedule):
    """Fall from the base learning rate to `end` times it as half a cosine wave (arXiv:1608.03983)."""

    end: float = 0.0
    spans_run = True

    def factor(self, span: Span) -> Curve:
        return _to_end(span.total_steps, self.end, lambda left: (1 - math.cos(math.pi * left)) / 2)


@dataclass
class Polynomial(LRSchedule):
    """Fall from the base learning rate to `end` times it, as the remaining fraction to the power `power`."""

    power: float = 1.0
    end: float = 0.0
    spans_run = True

    def factor(self, span: Span) -> Curve:
        power = self.power
        return _to_end(span.total_steps, self.end, lambda left: left**power)


@dataclass
class OneCycle(LRSchedule):
    """Rise once to the base learning rate (the maximum), fall equally, and end far below the start.

    Large learning rates regularize and let a network train in fewer steps; momentum is low where the learning
    rate is high. The defaults are Smith's.

    Args:
        start: learning rate of the first step relative to the maximum, in (0, 1].
        end: learning rate of the last step relative to the maximum, >= 0.
        rise: length of the rise.
        fall: length of the fall back to `start`; null for a fall to `end` over the rest of the run, without a
            tail, as in torch's OneCycleLR (the option `onecycle_torch`).
        anneal: how learning rate and momentum change within a phase.
        momentum_max: momentum of the first step and of the tail; null keeps the optimizer's own.
        momentum_min: momentum where the learning rate is highest.

    Source: Smith, Topin 2018, arXiv:1708.07120; Smith 2018, arXiv:1803.09820.
    """

    start: float = 0.1
    rise: Duration = NEARLY_HALF
    fall: Duration | None = NEARLY_HALF
    end: float = 1e-4
    anneal: Literal["linear", "cosine"] = "linear"
    momentum_max: float | None = 0.95
    momentum_min: float | None = 0.85
    spans_run = True

    def __post_init__(self) -> None:
        self.rise = Duration.parse(self.rise, "steps")
        self.fall = None if self.fall is None else Duration.parse(self.fall, "steps")
        _require_both(self.momentum_max, self.momentum_min)

    def factor(self, span: Span) -> Curve:
        return self._phases(span, self.start, 1.0, self.start, self.end)

    def momentum(self, span: Span) -> Curve | None:
        high, low = self.momentum_max, self.momentum_min
        return None if high is None or low is None else self._phases(span, high, low, high, high)

    def _phases(self, span: Span, first: float, peak: float, back: float, last: float) -> Curve:
        rise_steps = span.position(self.rise)
        fall_steps = span.position(self.fall) if self.fall else 0.0
        if rise_steps + fall_steps > span.total_steps + 1e-6:
            what = f"schedule.rise={self.rise} and schedule.fall={self.fall} are longer than the run"
            raise ConfigError("C011", what)
        # Phases end on steps counted from 0, which gives the values of torch's OneCycleLR.
        ends = [rise_steps - 1, span.total_steps - 1.0]
        values = [first, peak, last]
        if self.fall:
            ends.insert(1, rise_steps + fall_steps - 2)
            values.insert(2, back)
        starts, linear = [0.0, *ends], self.anneal == "linear"

        def curve(step: int) -> float:
            step = min(step, span.total_steps - 1)
            phase = bisect_left(ends, step, hi=len(ends) - 1)
            length = ends[phase] - starts[phase]
            done = (step - starts[phase]) / length if length else 1.0
            start, end = values[phase], values[phase + 1]
            if linear:
                return start + (end - start) * done
            return end + (start - end) / 2 * (1 + math.cos(math.pi * done))

        return curve


@dataclass
class Wsd(LRSchedule):
    """Keep the base learning rate, and fall to `end` times it in the last part of the run.

    No step before the decay depends on the length of the run: any earlier checkpoint can be trained for
    longer, or decayed at once, so runs of several lengths can share their beginning.

    Args:
        decay: length of the fall at the end of the run; 10 to 20 % works as well as a cosine schedule.
        anneal: `1-sqrt` is one minus the root of the completed fraction; `linear` is a straight line.
        end: learning rate after the last step relative to the base, >= 0.

    Sources: Hu et al. 2024, "MiniCPM", arXiv:2404.06395 (the schedule); Hägele et al. 2024, "Scaling Laws and
        Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392 (1-sqrt).
    """

    decay: Duration = FIFTH
    anneal: Literal["1-sqrt", "linear"] = "1-sqrt"
    end: float = 0.0

    def __post_init__(self) -> None:
        self.decay = Duration.parse(self.decay, "steps")

    def factor(self, span: Span) -> Curve:
        decay_steps = span.steps(self.decay)
        if decay_steps > span.total_steps:
            what = f"the decay of {decay_steps:,} steps is longer than the run of {span.total_steps:,}"
            raise ConfigError("C011", what, key="schedule.decay", value=self.decay)
        first, end, by_root = span.total_steps - decay_steps, self.end, self.anneal == "1-sqrt"

        def curve(step: int) -> float:
            if step <= first:
                return 1.0
            done = min((step - first) / decay_steps, 1.0) if decay_steps else 0.0
            return end + (1 - end) * (1 - (math.sqrt(done) if by_root else done))

        return curve


def _require_both(momentum_max: float | None, momentum_min: float | None) -> None:
    if (momentum_max is None) != (momentum_min is None):
        raise ConfigError("C011", "give both schedule.momentum_max and schedule.momentum_min, or neither")


def _to_end(total_steps: int, end: float, shape: Callable[[float], float]) -> Curve:
    """Return a curve from 1 to `end` after the last step; `shape` maps the remaining fraction to 0..1."""
    return lambda step: end + (1 - end) * shape(max(1 - step / total_steps, 0.0))
