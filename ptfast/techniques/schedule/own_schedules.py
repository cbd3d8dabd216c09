"""Schedules that a config names by import path: a function of the step, or a scheduler of torch's."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, ClassVar, NoReturn

import torch

from ptfast.core.errors import ConfigError, described, summary_of
from ptfast.core.sections.targets import Target, built, built_with, is_torch_scheduler, keywords
from ptfast.techniques.schedule.lr_schedules import Curve, Shape, Span

MOMENTUM = 0.9
"""Of the optimizer that a scheduler of torch's is tried on; one that leaves it there does not cycle it."""


def build_shape(target: Target, lr: float) -> Shape:
    """The shape that `schedule._target_` names: a `Shape`, a scheduler of torch's or a function of the step.

    Args:
        lr: base rate of the run, by which the rates that a scheduler of torch's sets are divided.
    """
    found = target.resolve()
    if is_torch_scheduler(found):
        return TorchScheduler(target, lr)
    if inspect.isclass(found):
        return target.build()
    return FunctionOfRun(target) if "num_steps" in keywords(found) else FunctionOfStep(target)


@dataclass
class FunctionOfStep(Shape):
    """`factor(step)` of the user's, called once for every step of the run, counted from 0.

    Raises:
        ConfigError: C017 where it raises, or gives no finite number of at least 0.

    Cost: one call a step, before training.
    """

    target: Target

    def factor(self, span: Span) -> Curve:
        function: Callable[..., Any] = partial(self.target.resolve(), **built(self.target.kwargs))
        if self.spans_run:
            function = partial(function, num_steps=span.total_steps)
        return _curve([self._value(function, step) for step in range(span.total_steps)])

    def _value(self, function: Callable[..., Any], step: int) -> float:
        try:
            value = function(step)
        except Exception as error:
            _refuse(self.target, f"at step {step} it raises {summary_of(error)}", error)
        value = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        if not isinstance(value, Real) or not 0 <= (number := float(value)) < math.inf:
            given = f"{float(value):g}" if isinstance(value, Real) else described(value)
            _refuse(self.target, f"at step {step} it gives {given}, where a factor of at least 0 is due")
        return number


class FunctionOfRun(FunctionOfStep):
    """`factor(step, num_steps)` of the user's: it begins after the warm-up and spans what is left."""

    spans_run: ClassVar[bool] = True


@dataclass
class TorchScheduler(Shape):
    """A scheduler of torch's, run once over all steps beside an optimizer of one weight.

    Its rates become factors on the base rate, with which every group moves in proportion, and so does what
    it sets in absolute figures, such as `eta_min`. Its steps are those of the run, warm-up included.

    Raises:
        ConfigError: C017 where its constructor or one of its steps raises.

    Cost: some 10 microseconds a step of the run, before training.
    """

    target: Target
    lr: float
    _known: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def factor(self, span: Span) -> Curve:
        return _curve([rate / self.lr for rate, _ in self._figures(span.total_steps)])

    def momentum(self, span: Span) -> Curve | None:
        momenta = [momentum for _, momentum in self._figures(span.total_steps)]
        return _curve(momenta) if set(momenta) != {MOMENTUM} else None

    def _figures(self, num_steps: int) -> list[tuple[float, float]]:
        """Rate and momentum of each step."""
        if num_steps not in self._known:
            self._known[num_steps] = self._run(num_steps)
        return self._known[num_steps]

    def _run(self, num_steps: int) -> list[tuple[float, float]]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.lr, momentum=MOMENTUM)
        (group,) = optimizer.param_groups
        figures: list[tuple[float, float]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                scheduler = built_with(self.target, optimizer=optimizer)
                optimizer.step()
                for step in range(num_steps):
                    if step:
                        scheduler.step()
                    figures.append((float(group["lr"]), float(group["momentum"])))
            except Exception as error:
                when = f"at step {len(figures)} it " if figures else ""
                _refuse(self.target, f"{when}raises {summary_of(error)}", error)
        return figures


def _curve(table: list[float]) -> Curve:
    return lambda step: table[min(step, len(table) - 1)]


def _refuse(target: Target, what: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError("C017", what, key="schedule._target_", value=target.path) from cause
