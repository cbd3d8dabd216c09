"""The schedule of one run: a shape with durations in steps, a linear warm-up, and user-defined shapes."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, NoReturn

import torch

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, described, summary_of
from ptfast.core.sections.targets import Target, built, is_torch_scheduler, keywords, steps_on_metric
from ptfast.techniques.schedule.lr_schedules import Curve, LRSchedule, Span


@dataclass
class RunSchedule:
    """Learning-rate factors and momenta of a run, by steps taken, counted from 0."""

    factor: Curve
    """Returns the factor on every group's base learning rate, without warm-up."""
    momentum: Curve | None = None
    warmup_steps: int = 0
    delay_steps: int = 0
    """Number of steps before `factor` and `momentum` start."""
    of_length: Callable[..., RunSchedule] | None = None
    """Builds the same schedule for other `total_steps`; None if that is unknown."""
    momentum_note: str | None = None
    """Whether the momentum is cycled, in words; None if the shape does not change it."""
    on_metric: MetricScheduler | None = None
    """Updates `factor` after each evaluation after the warm-up; None if it depends only on the step."""

    def lr_factors(self, first: int, last: int) -> list[float]:
        """Return the factors of steps `first` up to, not including, `last`."""
        factor, delay, warmup = self.factor, self.delay_steps, self.warmup_steps
        rising, full = range(first, min(last, warmup)), range(max(first, warmup), last)
        ramp = [(step + 1) / warmup * factor(max(step - delay, 0)) for step in rising]
        return ramp + [factor(step - delay) for step in full]

    def momenta(self, first: int, last: int) -> list[float] | None:
        """Return momenta of steps `first` up to, not including, `last`; None keeps the optimizer's own."""
        momentum, delay = self.momentum, self.delay_steps
        return momentum and [momentum(max(step - delay, 0)) for step in range(first, last)]

    def begins_like(self, total_steps: int, num_steps: int) -> bool:
        """Return True if a run of `total_steps` can, after `num_steps`, be extended to this length."""
        if self.of_length is None:
            return False
        other = self.of_length(total_steps=total_steps)
        alike = self.lr_factors(0, num_steps) == other.lr_factors(0, num_steps)
        return alike and self.momenta(0, num_steps) == other.momenta(0, num_steps)


def build_schedule(
    shape: LRSchedule,
    *,
    warmup: Duration,
    total_steps: int,
    plan: BatchPlan,
    has_momentum: bool = True,
    extendable: bool = True,
) -> RunSchedule:
    """Convert durations to steps once, and prepend a linear warm-up; C011 if it is longer than the run.

    The warm-up rises linearly, to the full learning rate at its last step (arXiv:1706.02677).
    A schedule is not `extendable` if another part spans the run, such as the sizes of a curriculum.
    """
    span = Span(total_steps, plan)
    warmup_steps = span.steps(warmup)
    if warmup_steps > total_steps:
        what = f"the warm-up of {warmup_steps:,} steps is longer than the run of {total_steps:,}"
        raise ConfigError("C011", what, key="schedule.warmup", value=warmup)
    delay_steps = warmup_steps if shape.spans_run else 0
    span = Span(max(total_steps - delay_steps, 1), plan)
    momentum = shape.momentum(span)
    of_length = partial(build_schedule, shape, warmup=warmup, plan=plan, has_momentum=has_momentum)
    return RunSchedule(
        shape.factor(span),
        momentum if has_momentum else None,
        warmup_steps=warmup_steps,
        delay_steps=delay_steps,
        momentum_note=momentum and ("cycled" if has_momentum else "not cycled: no momentum to cycle"),
        of_length=of_length if extendable else None,
        on_metric=shape if isinstance(shape, MetricScheduler) else None,
    )


MOMENTUM = 0.9
"""Momentum of the optimizer that a torch scheduler is tried on, to detect whether it cycles momentum."""


def build_shape(target: Target, lr: float, mode: str = "min") -> LRSchedule:
    """Return the shape of `schedule._target_`: a `LRSchedule`, a torch scheduler, or a function of steps.

    If it steps on a metric, `mode` (`min` or `max`) says whether lower or higher is better.
    """
    found = target.resolve()
    if steps_on_metric(found):
        return MetricScheduler(target, lr, mode)
    if is_torch_scheduler(found):
        return TorchScheduler(target, lr)
    if inspect.isclass(found):
        return target.build()
    return UserFunction(target, spans_run="num_steps" in keywords(found))


@dataclass
class UserFunction(LRSchedule):
    """A user's function `factor(step)`, called before training, once for each step, counted from 0.

    A function that also takes `num_steps` starts after the warm-up, and spans the rest of the run.
    """

    target: Target
    spans_run: bool

    def factor(self, span: Span) -> Curve:
        function: Callable[..., Any] = partial(self.target.resolve(), **built(self.target.kwargs))
        if self.spans_run:
            function = partial(function, num_steps=span.total_steps)
        factors: list[float] = []
        for step in range(span.total_steps):
            try:
                value = function(step)
            except Exception as error:
                _reject(self.target, f"at step {step} it raises {summary_of(error)}", error)
            value = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            if not isinstance(value, Real) or not 0 <= (number := float(value)) < math.inf:
                given = f"{float(value):g}" if isinstance(value, Real) else described(value)
                _reject(self.target, f"at step {step} it gives {given}, where a factor of at least 0 is due")
            factors.append(number)
        return _curve(factors)


@dataclass
class TorchScheduler(LRSchedule):
    """A torch scheduler, run once over all steps with an optimizer of one weight.

    Its learning rates become factors on the base of every group, including absolute ones such as `eta_min`.
    Its steps are those of the run, including the warm-up.

    Cost: about 10 microseconds per step of the run, before training.
    """

    target: Target
    lr: float
    _known: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def factor(self, span: Span) -> Curve:
        return _curve([rate / self.lr for rate, _ in self._rates_and_momenta(span.total_steps)])

    def momentum(self, span: Span) -> Curve | None:
        momenta = [momentum for _, momentum in self._rates_and_momenta(span.total_steps)]
        return _curve(momenta) if set(momenta) != {MOMENTUM} else None

    def lowest_from(self, num_steps: int) -> int | None:
        """Return the step where the learning rate nearly reaches its minimum, if in the run's first tenth.

        Return None for a schedule that starts at its minimum, as cyclic schedules do.
        """
        rates = [rate for rate, _ in self._rates_and_momenta(num_steps)]
        lowest, highest = min(rates), max(rates)
        margin = 0.01 * (highest - lowest)
        low, peak = lowest + margin, next(i for i, rate in enumerate(rates) if rate >= highest - margin)
        first = next((step for step in range(peak, num_steps) if rates[step] <= low), num_steps)
        return first if rates[0] > low and first < num_steps / 10 else None

    def _rates_and_momenta(self, num_steps: int) -> list[tuple[float, float]]:
        """Return the learning rate and momentum of each step."""
        if num_steps in self._known:
            return self._known[num_steps]
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.lr, momentum=MOMENTUM)
        (group,) = optimizer.param_groups
        found: list[tuple[float, float]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                scheduler = built(self.target, optimizer=optimizer)
                optimizer.step()
                for step in range(num_steps):
                    if step:
                        scheduler.step()
                    found.append((float(group["lr"]), float(group["momentum"])))
            except Exception as error:
                when = f"at step {len(found)} it " if found else ""
                _reject(self.target, f"{when}raises {summary_of(error)}", error)
        self._known[num_steps] = found
        return found


class MetricScheduler(LRSchedule):
    """A scheduler that steps on a metric: once per evaluation, with an optimizer of one weight.

    Its learning rate becomes a factor on the base of every group, including absolute ones such as `min_lr`.
    A `ReduceLROnPlateau` gets its mode from the metric.
    """

    def __init__(self, target: Target, lr: float, mode: str) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=MOMENTUM)
        self._lr, (self._group,) = lr, optimizer.param_groups
        if issubclass(target.resolve(), torch.optim.lr_scheduler.ReduceLROnPlateau):
            if (asked := target.kwargs.get("mode", mode)) != mode:
                what = f"contradicts the metric of stop.metric, whose mode is {mode}"
                hint = "Leave it out, or set stop.metric and stop.mode"
                raise ConfigError("C011", what, key="schedule.mode", value=asked, suggestion=hint)
            target = replace(target, kwargs={**target.kwargs, "mode": mode})
        try:
            self._scheduler = built(target, optimizer=optimizer)
        except Exception as error:
            _reject(target, f"raises {summary_of(error)}", error)

    def factor(self, span: Span) -> Curve:
        return lambda step: self._group["lr"] / self._lr

    def follow(self, metric: float) -> str | None:
        """Step on `metric`; return a message about the changed learning rate, or None."""
        before = self._group["lr"]
        self._scheduler.step(metric)
        after = self._group["lr"] = float(self._group["lr"])
        return None if after == before else f"learning rate {before:g} -> {after:g}"

    def state_dict(self) -> dict[str, Any]:
        """Return its learning rate, and the scheduler's own state."""
        return {"lr": self._group["lr"], "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        self._scheduler.load_state_dict(state["scheduler"])
        self._group["lr"] = state["lr"]


def _curve(table: list[float]) -> Curve:
    return lambda step: table[min(step, len(table) - 1)]


def _reject(target: Target, what: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError("C017", what, key="schedule._target_", value=target.path) from cause
