"""The learning rate range test: the rate rises step by step until the loss diverges."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from ptfast.optim.build_optimizer import load_optimizer
from ptfast.optim.parameter_groups import reference_lr
from ptfast.run import Run
from ptfast.techniques.schedule.scheduled_run import LrSchedule
from ptfast.training.loss_window import MOST_SKIPPED, sum_and_read
from ptfast.training.step import Trainer

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


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential means to both sides of each step, which unlike running ones do not lag behind.

    The curve ends before the first loss that lies far above those of the start: one that explodes would hide
    its neighbours.
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


def suggestions(lrs: Sequence[float], smoothed: Sequence[float]) -> dict[str, float]:
    """Learning rates that a curve suggests, by the rule that finds them; empty where it never falls.

    `steepest` is where the loss falls fastest by the logarithm of the rate. `valley` is the middle between
    where a quarter of the fall is done for good and where the loss is lowest. `minimum/10` is a tenth of the
    rate at which it is lowest, just before it rises again.

    Args:
        smoothed: loss at each of the first of the rates.
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


HIDDEN = ("schedule", "ema", "callbacks", "watchers", "progress", "figures", "best_figures")
"""Attributes of a run that are replaced during a trial."""


@contextmanager
def preserving_state(run: Run) -> Iterator[None]:
    """Train `run` inside this, without callbacks, and find weights, optimizer, progress and draws as before.

    Cost: a copy of weights and optimizer state on the device.
    """
    model, optimizer = copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    scaler = run.precision.scaler
    scaling = copy.deepcopy(scaler.state_dict()) if scaler is not None else {}
    kept = {name: getattr(run, name) for name in HIDDEN}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    run.progress = replace(run.progress)
    run.figures, run.best_figures = dict(run.figures), dict(run.best_figures)
    run.ema, run.callbacks, run.watchers = None, [], []
    was_training = run.model.training
    try:
        with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for name, value in run.model.state_dict().items():
                value.copy_(model[name])
        run.optimizer.zero_grad(set_to_none=True)
        run.optimizer.state.clear()
        load_optimizer(run.optimizer, optimizer)
        if scaler is not None:
            scaler.load_state_dict(scaling)
        for name, value in kept.items():
            setattr(run, name, value)
        run.model.train(was_training)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


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
        The rates and the losses of the steps that count, and why it ended.
    """
    first = _first_step(run, len(lrs))
    taken: list[float] = []
    losses: list[float] = []
    means: list[float] = []
    """Running, by exponentially falling weights."""
    total = weight = 0.0
    skipped_in_a_row = 0
    with preserving_state(run):
        base = reference_lr(run.optimizer, "initial_lr")
        run.schedule = LrSchedule(
            lambda step: lrs[min(step - first, len(lrs) - 1)] / base,
            None,
            warmup_steps=0,
            delay_steps=0,
        )
        run.progress.step = first
        trainer = Trainer(run)
        batches = trainer.warm_up(run.train_loader.steps(first, first + len(lrs)))
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
            if not items and skipped_in_a_row < MOST_SKIPPED:
                continue
            loss = loss_sum / items if items else math.nan
            if not math.isfinite(loss):
                return taken, losses, LOSS_DIVERGED
            taken.append(lr)
            losses.append(loss)
            total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
            means.append(total / weight)
            run.display.progress(step + 1, 0.0, {"loss": means[-1], "lr": lr})
            low, now = min(means), means[-1]
            # Where losses come near to 0, four times the lowest is little.
            risen = now > DIVERGED * low and now > low + 0.5 * (means[0] - low)
            if step >= LEAST_STEPS and risen:
                return taken, losses, LOSS_DIVERGED
    return taken, losses, "at the highest rate"


def _first_step(run: Run, num_steps: int) -> int:
    """The step to start at: one at which everything has grown to full size, if anything grows."""
    return max(run.total_steps - num_steps, 0) if run.resolved.curriculum else 0


FACTOR = math.sqrt(10)
"""Between neighbours: half a decade. Within it the loss hardly depends on the rate."""
MOST_TRIALS = 6


def run_trials(
    run: Run, start: float, *, lowest: float, highest: float, num_steps: int
) -> dict[float, float]:
    """Train anew at single rates, beginning with `start`, until those beside the best one are worse.

    A range test has a few steps at each rate, after all that the lower ones have taught the model: it finds
    the decade. A trial trains at one rate from the start, and every trial on the same batches, so that
    small differences count. The run is left as it was.

    Args:
        lowest, highest: rates that are not to be passed.

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
