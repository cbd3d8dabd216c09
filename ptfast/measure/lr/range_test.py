"""The learning rate range test: the rate rises step by step until the loss diverges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ptfast.core.run import Run
from ptfast.measure.lr.lr_suggestion import LOSS_DIVERGED, has_diverged, running_mean
from ptfast.measure.trials.state_guard import preserving_state
from ptfast.optim.parameters.groups import reference_lr
from ptfast.techniques.schedule.scheduled_run import Schedule
from ptfast.training.step import Trainer
from ptfast.training.step_parts.loss_window import MOST_SKIPPED, sum_and_read
from ptfast.training.step_parts.rehearsal import rehearse

LEAST_STEPS = 10
"""Steps before which no curve is judged."""


@dataclass(frozen=True)
class RangeTest:
    """The result of one test."""

    lrs: list[float]
    """Of each step, rising by a constant factor."""
    losses: list[float]
    """Mean item loss of each step, before the step changed anything, over all ranks."""
    ended: str
    """Why it ended: `at the highest rate`, `the loss diverged` or `the data ended`."""
    epochs: float | None
    """Epochs that it took; None where that has no length."""


def range_test(run: Run, *, lowest: float, highest: float, num_steps: int) -> RangeTest:
    """Train with rates that rise from `lowest` to `highest` by a constant factor; the run is left as it was.

    Every group's rate keeps its ratio to the optimizer's; momentum stays as configured, there is no warm-up.
    Losses are summed over ranks, so that all of them end at the same step.

    Args:
        run: as built, on every rank.
        lowest, highest: of the optimizer's rate, both > 0.
        num_steps: optimizer steps from one to the other, >= 2.

    Cost: `num_steps` optimizer steps, each of which makes the host read the loss.

    Source: Smith 2015, arXiv:1506.01186; stopping as in fast.ai's `lr_find`.
    """
    growth = (highest / lowest) ** (1 / (num_steps - 1))
    lrs = [lowest * growth**step for step in range(num_steps)]
    lrs, losses, ended = train_at(run, lrs)
    plan, first = run.train_loader.plan, _first_step(run, num_steps)
    epochs = plan.epoch_at(first + len(losses)) - plan.epoch_at(first) if plan.size is not None else None
    return RangeTest(lrs, losses, ended, epochs)


def train_at(run: Run, lrs: Sequence[float]) -> tuple[list[float], list[float], str]:
    """Train one step at each rate, up to where the loss diverges, and leave the run as it was.

    Returns:
        The rates, and the mean item loss of each step, before the step changed anything, over all ranks; and
        why it ended. Steps that fp16 leaves out are none: the rate is held over them.
    """
    first = _first_step(run, len(lrs))
    taken: list[float] = []
    losses: list[float] = []
    skipped_in_a_row = 0
    with preserving_state(run):
        base = reference_lr(run.optimizer, "initial_lr")
        run.schedule = Schedule(
            lambda step: lrs[min(step - first, len(lrs) - 1)] / base,
            None,
            warmup_steps=0,
            delay_steps=0,
        )
        run.progress.step = first
        trainer = Trainer(run)
        batches = rehearse(trainer, run.train_loader.steps(first, first + len(lrs)))
        run.display.start(0, len(lrs), None)
        for step in range(len(lrs)):
            batch = next(batches, None)
            if batch is None:
                return taken, losses, "the data ended"
            lr = lrs[step - (trainer.scaled.held_steps if trainer.scaled is not None else 0)]
            trainer.train(iter([batch]), first + step + 1)
            loss_sum, items = sum_and_read(trainer.window.sums(), run.device, run.ranks)
            trainer.window.clear()
            skipped_in_a_row = 0 if items else skipped_in_a_row + 1
            if skipped_in_a_row >= MOST_SKIPPED:
                return taken, losses, LOSS_DIVERGED
            if not items:
                continue
            loss = loss_sum / items
            if not math.isfinite(loss):
                return taken, losses, LOSS_DIVERGED
            taken.append(lr)
            losses.append(loss)
            means = running_mean(losses)
            run.display.progress(step + 1, 0.0, {"loss": means[-1], "lr": lr})
            if step >= LEAST_STEPS and has_diverged(means):
                return taken, losses, LOSS_DIVERGED
    return taken, losses, "at the highest rate"


def _first_step(run: Run, num_steps: int) -> int:
    """The step to start at: one at which everything has grown to full size, if anything grows."""
    return max(run.total_steps - num_steps, 0) if run.resolved.curriculum else 0
