"""The schedule of one run: a shape with its durations in steps, and a linear warm-up in front."""

from __future__ import annotations

from collections.abc import Callable

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.techniques.schedule.lr_schedules import Curve, Shape, Span


class Schedule:
    """Learning-rate factors and momenta of a run, by step counted from 0.

    Steps that fp16 leaves out are none: who asks counts those that were taken.

    Args:
        factor: factor on every group's base rate, without warm-up.
        momentum: momentum by step, or None.
        warmup_steps: steps over which the factor is also multiplied by a ramp, (step + 1) / warmup_steps.
        delay_steps: steps that pass before the clock of `factor` and `momentum` starts.
        of_length: the schedule of a run of so many steps, otherwise the same; None where that is not known.
        momentum_note: what becomes of the momentum, in a few words; None where the shape leaves it alone.
    """

    def __init__(
        self,
        factor: Curve,
        momentum: Curve | None,
        *,
        warmup_steps: int,
        delay_steps: int,
        of_length: Callable[[int], Schedule] | None = None,
        momentum_note: str | None = None,
    ) -> None:
        self.warmup_steps, self.momentum_note, self._of_length = warmup_steps, momentum_note, of_length
        self._factor, self._momentum, self._delay_steps = factor, momentum, delay_steps

    def lr_factors(self, first: int, last: int) -> list[float]:
        """Factors of steps `first` up to, not including, `last`."""
        factor, delay, warmup = self._factor, self._delay_steps, self.warmup_steps
        rising, full = range(first, min(last, warmup)), range(max(first, warmup), last)
        ramp = [(step + 1) / warmup * factor(max(step - delay, 0)) for step in rising]
        return ramp + [factor(step - delay) for step in full]

    def momenta(self, first: int, last: int) -> list[float] | None:
        """Momenta of steps `first` up to, not including, `last`; None where the optimizer keeps its own."""
        momentum, delay = self._momentum, self._delay_steps
        return momentum and [momentum(max(step - delay, 0)) for step in range(first, last)]

    def begins_like(self, total_steps: int, num_steps: int) -> bool:
        """Return True if a run of `total_steps` has the same figures in its first `num_steps`.

        Such a run can be made as long as this one after that many steps. Cost: a microsecond a step.
        """
        if self._of_length is None:
            return False
        other = self._of_length(total_steps)
        return all(
            figures(0, num_steps) == others(0, num_steps)
            for figures, others in ((self.lr_factors, other.lr_factors), (self.momenta, other.momenta))
        )


def build_schedule(
    shape: Shape,
    *,
    warmup: Duration,
    total_steps: int,
    plan: BatchPlan,
    has_momentum: bool = True,
    extendable: bool = True,
) -> Schedule:
    """Turn durations into steps, once, and put a linear warm-up in front.

    The warm-up rises in equal parts to the full rate at its last step (Goyal et al. 2017, arXiv:1706.02677);
    its first step already trains. Milestones count from the start of the run, warm-up included, as there;
    shapes that end with the run span what the warm-up leaves of it, as SequentialLR puts them together.

    Args:
        plan: which samples make up each step.
        has_momentum: the optimizer has a momentum that can be cycled.
        extendable: nothing else spans the run, such as the sizes of a curriculum.

    Raises:
        ConfigError: C011 for a warm-up longer than the run.
    """
    span = Span(total_steps, plan)
    warmup_steps = span.steps(warmup)
    if warmup_steps > total_steps:
        what = f"the warm-up of {warmup_steps:,} steps is longer than the run of {total_steps:,}"
        raise ConfigError("C011", what, key="schedule.warmup", value=warmup)
    delay_steps = warmup_steps if shape.spans_run else 0
    span = Span(max(total_steps - delay_steps, 1), plan)
    momentum = shape.momentum(span)

    def of_length(steps: int) -> Schedule:
        return build_schedule(shape, warmup=warmup, total_steps=steps, plan=plan, has_momentum=has_momentum)

    return Schedule(
        shape.factor(span),
        momentum if has_momentum else None,
        warmup_steps=warmup_steps,
        delay_steps=delay_steps,
        momentum_note=momentum and ("cycled" if has_momentum else "not cycled: the optimizer has none"),
        of_length=of_length if extendable else None,
    )
