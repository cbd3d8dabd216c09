"""`ptfast find lr`: raise the learning rate until the loss diverges, then try single learning rates."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from ptfast.data.sampling.counter_draws import OwnGenerators
from ptfast.launch.launcher import resolve_world_size
from ptfast.measure.outputs import check_outputs, label, write_recipe, write_results
from ptfast.optim.parameter_groups import reference_lr
from ptfast.report.terminal.display import build_display, say, table
from ptfast.run import Run
from ptfast.techniques.schedule.scheduled_run import RunSchedule
from ptfast.training.build import build
from ptfast.training.loop.loss_accumulator import begin_sums
from ptfast.training.loop.step import Trainer
from ptfast.training.loop.updates import ScaledUpdate

CURVE_ROWS, CURVE_WIDTH = 16, 40
"""Size of the curve in the terminal."""
ENDINGS = {
    "range": "the highest learning rate was reached",
    "diverged": "the loss diverged",
    "data": "the data ended",
}
"""Why a range test ended, in words."""
SMOOTHING = 0.85
"""Weight of a step in the smoothed loss, relative to its neighbor's."""
START_STEPS = 10
"""Steps at the lowest learning rates, which change little; curves are judged only after them."""
EXPLODED = 1.5
"""The curve ends at the first loss above this multiple of the loss at the start."""
LEAST_FALL = 0.01
"""Smallest relative fall of the loss that counts as more than noise."""
DIVERGED = 4.0
"""Training has diverged when the smoothed loss is this multiple of its lowest value."""
FACTOR = math.sqrt(10)
"""Ratio of neighboring trials: half a decade, within which the loss depends little on the learning rate."""
MOST_TRIALS = 6
REPLACED = ("schedule", "ema", "callbacks", "debug_aids", "progress", "metrics", "best_metrics")
"""Attributes of a run that are replaced during a trial."""


def find_lr(
    config: Config,
    arguments: Sequence[str],
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    num_steps: int = 140,
    trial_steps: int = 100,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Run the range test and the trials, show the curve, and write the results and, if requested, a recipe.

    Args:
        lowest, highest: learning rates of the first and the last step.
        num_steps: optimizer steps between them.
        trial_steps: optimizer steps of each trial at one learning rate.

    Returns:
        0, or 8 if training fails at every learning rate; the results are written in both cases.
    """
    if not 0 < lowest < highest:
        what = f"does not lie between 0 and --to {highest:g}"
        raise ConfigError("C005", what, key="--from", value=f"{lowest:g}")
    check_outputs(out, write)
    facts = measure(config, lowest=lowest, highest=highest, num_steps=num_steps, trial_steps=trial_steps)
    name, chosen = label(config), facts["chosen"]
    _show(facts)
    write_results("find-lr", out, config, facts, "lr.json")
    if chosen is None:
        what = f"no learning rate of {lowest:.0e} to {highest:.0e} makes the loss decrease"
        hint = "widen the range with --from, --to and --steps"
        if facts["trials"]:
            what = f"the loss diverges within {trial_steps} steps at each learning rate tried"
            hint = "clip gradients (gradients=clip), or lower --to"
        say(f"ptfast: {what}. Check labels, loss and inputs; {hint}", sys.stderr)
        return EXIT_FINDINGS
    if write is not None:
        # Undo the scaling to the batch size, because training scales the learning rate again.
        lr = float(f"{chosen / facts['lr_scale']:.3g}")
        comment = [f"Learning rate {lr:g} for {name}, found by ptfast find lr"]
        comment += [f"Best of {len(facts['trials'])} trials of {trial_steps} steps, one learning rate each."]
        write_recipe(write, arguments, {"optimizer.lr": lr}, comment)
    return EXIT_OK


def measure(
    config: Config, *, lowest: float, highest: float, num_steps: int, trial_steps: int
) -> dict[str, Any]:
    """Run the range test and the trials in this process, with the same micro-batches as on all ranks."""
    if config.parallel.strategy != "single":
        micro_batches = config.micro_batches or resolve_world_size(config) * config.gradients.accumulate
        gradients = config.gradients.model_copy(update={"accumulate": 1})
        config = config.model_copy(update={"micro_batches": micro_batches, "gradients": gradients})
    bounds = {"lowest": lowest, "highest": highest}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptfast-"))
        display = stack.enter_context(contextlib.closing(build_display()))
        run = build(config, ranks=Ranks(), folder=Path(folder), display=display)
        stack.callback(run.close)
        test = range_test(run, num_steps=num_steps, **bounds)
        smoothed = smooth(test.losses)
        start, trials = start_lr(test.lrs, smoothed), dict[float, float]()
        if start is not None:
            trials = run_trials(run, start, num_steps=trial_steps, **bounds)
        actual = reference_lr(run.optimizer, "initial_lr")
        finite = {lr: loss for lr, loss in trials.items() if math.isfinite(loss)}
        return {
            **asdict(test),
            "smoothed": smoothed,
            "trials": [[lr, finite.get(lr)] for lr in sorted(trials)],
            "chosen": min(finite, key=finite.__getitem__) if finite else None,
            "lr": actual,
            "lr_scale": actual / config.optimizer.target.kwargs.get("lr", actual),
            "batch_size": run.batch_size,
            "trial_steps": trial_steps,
        }


@dataclass(frozen=True)
class RangeTest:
    lrs: list[float]
    losses: list[float]
    """Mean item loss of each step, computed before its update."""
    ended: str
    """A key of `ENDINGS`."""


def range_test(run: Run, *, lowest: float, highest: float, num_steps: int) -> RangeTest:
    """Train while the learning rate rises from `lowest` by a constant factor; then restore the run.

    Learning rates of groups keep their ratios; momentum stays as configured, and there is no warm-up.
    Source: Smith 2015, arXiv:1506.01186; stopping as in fast.ai's `lr_find`.
    """
    growth = (highest / lowest) ** (1 / (num_steps - 1))
    return train_at(run, [lowest * growth**step for step in range(num_steps)])


def train_at(run: Run, lrs: Sequence[float]) -> RangeTest:
    """Train one step at each learning rate until the loss diverges, then restore the run."""
    # Train as in the last steps, where inputs that grow during training have their full size.
    first = max(run.total_steps - len(lrs), 0) if run.choices.get("curriculum") else 0
    taken, losses, means = list[float](), list[float](), list[float]()
    total, weight, skipped_in_a_row, ended = 0.0, 0.0, 0, "range"
    with preserving_state(run):
        base = reference_lr(run.optimizer, "initial_lr")
        run.schedule = RunSchedule(lambda step: lrs[min(step - first, len(lrs) - 1)] / base)
        run.progress.step = first
        trainer = Trainer(run)
        batches = trainer.warm_up(run.train_loader.steps(first, first + len(lrs)))
        run.display.start(0, len(lrs), None)
        for step in range(len(lrs)):
            batch = next(batches, None)
            if batch is None:
                ended = "data"
                break
            lr = lrs[step - trainer.update.schedule_lag]
            trainer.train(iter([batch]), first + step + 1)
            loss_sum, items = begin_sums(trainer.losses.sums(), run.device, run.ranks).read()
            trainer.losses.clear()
            skipped_in_a_row = 0 if items else skipped_in_a_row + 1
            if not items and skipped_in_a_row < ScaledUpdate.limit:
                continue
            loss = loss_sum / items if items else math.nan
            if not math.isfinite(loss):
                ended = "diverged"
                break
            taken.append(lr)
            losses.append(loss)
            # The mean with exponentially decaying weights.
            total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
            means.append(total / weight)
            run.display.progress(step + 1, 0.0, {"loss": means[-1], "lr": lr})
            low, now = min(means), means[-1]
            # Near 0, even four times the lowest loss is a small change.
            if step >= START_STEPS and now > DIVERGED * low and now > low + 0.5 * (means[0] - low):
                ended = "diverged"
                break
    return RangeTest(taken, losses, ended)


@contextlib.contextmanager
def preserving_state(run: Run) -> Iterator[None]:
    """Train inside without callbacks; restore weights, optimizer, progress and random states afterwards.

    Cost: a copy of weights and optimizer state on the device.
    """
    saved = ("optimizer", "scaler")
    parts = {"model": run.model} | {name: run.stateful[name] for name in saved if name in run.stateful}
    states = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
    replaced = {name: getattr(run, name) for name in REPLACED}
    run.progress = replace(run.progress)
    run.metrics, run.best_metrics = dict(run.metrics), dict(run.best_metrics)
    run.ema, run.callbacks, run.debug_aids = None, [], []
    was_training = run.model.training
    try:
        on_device = torch.random.fork_rng([run.device] if run.device.type == "cuda" else [])
        with on_device, OwnGenerators().in_place():
            yield
    finally:
        for name, value in replaced.items():
            setattr(run, name, value)
        run.optimizer.zero_grad(set_to_none=True)
        run.optimizer.state.clear()
        for name, part in parts.items():
            part.load_state_dict(states[name])
        run.model.train(was_training)


def smooth(losses: Sequence[float]) -> list[float]:
    """Return two-sided exponential means of losses, which do not lag like running means.

    The curve ends before the first loss far above the first losses, because it would dominate its neighbors.
    """
    limit = EXPLODED * statistics.median(losses[:START_STEPS])
    steps = range(START_STEPS, len(losses))
    losses = losses[: next((step for step in steps if losses[step] > limit), len(losses))]
    places = np.arange(len(losses))
    weights = SMOOTHING ** np.abs(np.subtract.outer(places, places))
    return (weights @ losses / weights.sum(axis=1)).tolist()


def start_lr(lrs: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Return the learning rate half a decade below the lowest point of a curve; None if it never falls.

    Short runs did best there, with SGD, AdamW and LAMB, on images, text and digits.
    """
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    if lowest < 2 or smoothed[0] - smoothed[lowest] < LEAST_FALL * smoothed[0]:
        return None
    return FACTOR * (lrs[lowest] / 10)


def run_trials(
    run: Run, start: float, *, lowest: float, highest: float, num_steps: int
) -> dict[float, float]:
    """Return losses of short runs by learning rate, searching from `start` until both neighbors are worse.

    A range test, whose model was trained at lower rates first, finds the order of magnitude; trials on the
    same batches resolve small differences. Diverged losses are infinite. The run is restored afterwards.

    Cost: 3 to 6 trials of `num_steps` optimizer steps.
    """

    def loss_at(lr: float) -> float:
        test = train_at(run, [lr] * num_steps)
        diverged = test.ended == "diverged" or not test.losses
        loss = math.inf if diverged else statistics.mean(test.losses[-max(len(test.losses) // 4, 1) :])
        found = f"loss {loss:.4g}" if math.isfinite(loss) else ENDINGS["diverged"]
        run.display.note(f"  learning rate {lr:.2g}: {found}")
        return loss

    run.display.note(f"trials of {num_steps} steps each")
    return descend(loss_at, start, lowest, highest)


def descend(
    loss_at: Callable[[float], float], start: float, lowest: float, highest: float
) -> dict[float, float]:
    """Return losses by learning rate, from `start` toward the better neighbor until none is better."""
    losses = {start: loss_at(start)}
    # If a learning rate diverges, do not try higher ones.
    for factor in (1 / FACTOR,) if math.isinf(losses[start]) else (FACTOR, 1 / FACTOR):
        here = start
        while len(losses) < MOST_TRIALS and lowest <= here * factor <= highest:
            neighbor = here * factor
            losses[neighbor] = loss_at(neighbor)
            if losses[neighbor] >= losses[here] and not math.isinf(losses[here]):
                break
            here = neighbor
        if here != start:
            break
    return losses


def _show(facts: dict[str, Any]) -> None:
    lrs, smoothed = facts["lrs"], facts["smoothed"]
    lowest, spread = min(smoothed), (max(smoothed) - min(smoothed)) or 1.0
    rows: list[list[str]] = []
    for step in range(0, len(smoothed), -(-len(smoothed) // CURVE_ROWS)):
        length = round(CURVE_WIDTH * (smoothed[step] - lowest) / spread)
        rows.append([f"{lrs[step]:.1e}", f"{smoothed[step]:.4g}", "*" * max(length, 1)])
    say()
    table(["learning rate", "loss, smoothed", "curve"], rows)
    say(f"{len(lrs)} steps of {facts['batch_size']} samples: {ENDINGS[facts['ended']]}")
    if (chosen := facts["chosen"]) is not None:
        say(f"\nchosen {chosen:.2g} by {len(facts['trials'])} trials; as configured: {facts['lr']:.2g}")
