"""Steps that a task takes itself, with an optimizer for each part of the model: GANs, actor and critic."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, described, name_of, name_some
from ptfast.core.protocols import StepBatch, takes_own_steps
from ptfast.core.run import Run
from ptfast.optim.build_optimizer import build_step
from ptfast.techniques.gradients import Gradients
from ptfast.training.step_parts.loss_window import LossWindow
from ptfast.training.user_code import Part

NAME = "optimizer"
"""The key of a parameter group that says whose it is."""


def named_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of an optimizer's named groups: each steps its groups alone.

    They share its groups and its state. So the schedule sets their rates, and saving and resuming the one
    does that for all.
    """
    found: dict[str, torch.optim.Optimizer] = {}
    for group in optimizer.param_groups:
        if (name := group.get(NAME)) is not None and name not in found:
            found[name] = part = copy.copy(optimizer)
            part.param_groups = [each for each in optimizer.param_groups if each.get(NAME) == name]
            part.step = build_step(part)  # pyright: ignore[reportAttributeAccessIssue] # without a closure
    return found


class OwnSteps:
    """Has a task with a method `step` take the loop's place between a batch and the next.

    The task receives the model, the batch and its optimizers by name, whose rates are set. It runs forward
    and backward passes and steps them in whatever order it likes, and returns the sum of the losses to log
    and their count. Gradients are cleared after; what it draws is seeded by the step.
    """

    def __init__(self, run: Run, window: LossWindow) -> None:
        self._run, self._window = run, window
        task: Any = run.task
        self._optimizers, self._step = named_optimizers(run.optimizer), task.step
        self._due: tuple[Any, int] = None, 0

    def hold(self, batch: StepBatch, step: int) -> None:
        """Keep the batch until the rates of its step are set."""
        self._due = batch.micro_batches[0].data, step

    def take(self) -> None:
        """Let the task take its step.

        Raises:
            ConfigError: C017 where it returns no loss and count.
        """
        run, (data, step) = self._run, self._due
        run.clock.to("forward")
        run.seed_step(run.settings.seed, step, 0)
        with run.precision.autocast():
            given: Any = self._step(run.forward, data, self._optimizers)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)):
            what = f"step gives {described(given)}, where the sum of its losses and their count are due"
            raise Part("task", run.task).error(what)
        self._window.add(given[0].detach(), given[1])


def check_own_steps(run: Run, gradients: Gradients) -> None:
    """Refuse named optimizers that nobody steps, and what the loop does with gradients that it does not see.

    Raises:
        ConfigError: C011, or C005 for a name without parameters.
    """
    groups, task = run.optimizer.param_groups, name_of(run.task)
    named = [group[NAME] for group in groups if NAME in group]
    if not takes_own_steps(run.task):
        if named:
            what = f"{task} has no method step, which would take the optimizer {named[0]}"
            raise ConfigError("C011", what, key="optimizer.groups", suggestion="Leave out name")
        return
    rest = [p for group in groups if NAME not in group for p in group["params"]]
    if rest:
        names = [name for name, p in run.model.named_parameters() if any(p is other for other in rest)]
        what = f"{task} steps optimizers by name, and none has {name_some(names, 3)}"
        hint = "Name one for each, such as optimizer.groups='[{match: \"critic.*\", name: critic}]'"
        raise ConfigError("C011", what, key="optimizer.groups", suggestion=hint)
    settings, ways = run.settings, ("clip_norm", "clip_value", "clip_adaptive")
    clipped = next((f"gradients.{way}" for way in ways if getattr(gradients, way) is not None), None)
    of_groups = "clip_norm left out of optimizer.groups"
    out_of_reach = {
        "parallel": "parallel=single" if run.ranks.num_ranks > 1 else None,
        "micro_batches": "gradients.accumulate=1" if settings.micro_batches > run.ranks.num_ranks else None,
        clipped or "optimizer.groups": f"{f'{clipped}=null' if clipped else of_groups}, and clip in step"
        if run.clip is not None
        else None,
        "precision": "precision=bf16 or fp32" if run.precision.scaler is not None else None,
    }
    for key, instead in out_of_reach.items():
        if instead is not None:
            what = f"{task} takes its steps itself, which this cannot reach into"
            raise ConfigError("C011", what, key=key, suggestion=f"Set {instead}")
