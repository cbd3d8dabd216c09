"""`ptfast find lr`: the learning rate range test on any recipe, its curve, and the rate it advises."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, ParallelError
from ptfast.measure.experiment.trial import TrialRank, measure_once
from ptfast.measure.find.range_test import (
    FACTOR,
    LOSS_DIVERGED,
    range_test,
    run_trials,
    smooth,
    suggestions,
)
from ptfast.measure.outputs import check_outputs, label, picture, write_figures, write_recipe
from ptfast.optim.parameter_groups import reference_lr
from ptfast.report.terminal.display import build_display, say, table
from ptfast.training.build import build

PICTURE = "lr.png"
LOWEST, HIGHEST, NUM_STEPS, TRIAL_STEPS = 1e-6, 10.0, 140, 100
CURVE_ROWS, CURVE_WIDTH = 16, 40
"""Size of the curve in a terminal."""


def find_lr(
    composed: Composed,
    config: Config,
    arguments: Sequence[str],
    *,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
    num_steps: int = NUM_STEPS,
    trial_steps: int = TRIAL_STEPS,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Run the test and the trials, show the curve, write picture, figures and, if asked for, a recipe.

    Args:
        lowest, highest: learning rates of the first and the last step.
        num_steps: optimizer steps between them.
        trial_steps: optimizer steps of each trial at a single rate.

    Returns:
        0, or 8 if no rate trains; the figures are written anyway.
    """
    if not 0 < lowest < highest:
        what = f"does not lie between 0 and --to {highest:g}"
        raise ConfigError("C005", what, key="--from", value=f"{lowest:g}")
    check_outputs(out, write)
    keywords = {"lowest": lowest, "highest": highest, "num_steps": num_steps, "trial_steps": trial_steps}
    facts = measure(composed, config, keywords)
    name, chosen = label(config), facts["chosen"]
    _show(facts, name)
    folder = write_figures("find-lr", out, config, facts, "lr.json")
    if chosen is None:
        what = f"no learning rate of {lowest:.0e} to {highest:.0e} makes the loss fall"
        hint = "widen the range with --from, --to and --steps"
        if facts["trials"]:
            what = f"the loss diverges within {trial_steps} steps at each rate tried"
            hint = "clip gradients (gradients=clip), or begin lower with --to"
        say(f"ptfast: {what}. Look at labels, loss and inputs, {hint}", sys.stderr)
        return EXIT_FINDINGS
    draw(folder / PICTURE, facts, f"{name}: {facts['ended']}")
    if write is not None:
        # A rate for a reference batch is scaled to the batch again.
        rate = float(f"{chosen / facts['lr_scale']:.3g}")
        comment = [
            f"Learning rate {rate:g} for {name}, found by ptfast find lr",
            f"Best of {len(facts['trials'])} trials of {trial_steps} steps; of the curve: "
            + ", ".join(f"{rule} {lr:.2g}" for rule, lr in facts["suggestions"].items()),
        ]
        write_recipe(write, arguments, {"optimizer.lr": rate}, comment)
    return EXIT_OK


def measure(composed: Composed, config: Config, keywords: dict[str, Any]) -> dict[str, Any]:
    """Run test and trials in this process or on the config's ranks, and return their figures."""
    with tempfile.TemporaryDirectory(prefix="ptfast-") as name:
        if config.parallel.strategy == "single":
            results: list[dict[str, Any]] = []
            measure_lr(TrialRank(config, Path(name), Ranks(), send=results.append), **keywords)
            return results[0]
        results, killed = measure_once(measure_lr, composed, config, Path(name), keywords)
    if killed is not None:
        hint = "The system's memory may have run out"
        raise ParallelError("P001", f"a rank was killed by {killed}", suggestion=hint)
    return results[0]


def measure_lr(trial: TrialRank, *, lowest: float, highest: float, num_steps: int, trial_steps: int) -> None:
    """Run the test and the trials on one rank."""
    config, bounds = trial.config, {"lowest": lowest, "highest": highest}
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(contextlib.closing(build_display(trial.ranks.rank)))
        run = build(config, ranks=trial.ranks, folder=trial.folder, display=display)
        stack.callback(run.close)
        test = range_test(run, num_steps=num_steps, **bounds)
        smoothed = smooth(test.losses)
        found, trials = suggestions(test.lrs, smoothed), dict[float, float]()
        if found:
            # Short runs did best half a decade below the lowest point of the curve: with SGD, AdamW and
            # LAMB, on images, text and digits.
            trials = run_trials(run, FACTOR * found["minimum/10"], num_steps=trial_steps, **bounds)
    actual = reference_lr(run.optimizer, "initial_lr")
    finite = {lr: loss for lr, loss in trials.items() if math.isfinite(loss)}
    trial.report(
        {
            **asdict(test),
            "smoothed": smoothed,
            "suggestions": found,
            "trials": [[lr, finite.get(lr)] for lr in sorted(trials)],
            "chosen": min(finite, key=finite.__getitem__) if finite else None,
            "lr": actual,
            "lr_scale": actual / config.optimizer.target.kwargs.get("lr", actual),
            "batch_size": run.batch_size,
            "trial_steps": trial_steps,
        }
    )


def _show(facts: dict[str, Any], name: str) -> None:
    lrs, smoothed = facts["lrs"], facts["smoothed"]
    lowest, spread = min(smoothed), (max(smoothed) - min(smoothed)) or 1.0
    rows: list[tuple[str, ...]] = []
    for step in range(0, len(smoothed), -(-len(smoothed) // CURVE_ROWS)):
        length = round(CURVE_WIDTH * (smoothed[step] - lowest) / spread)
        rows.append((f"{lrs[step]:.1e}", f"{smoothed[step]:.4g}", "*" * max(length, 1)))
    say()
    table(["rate", "loss, smoothed", "curve"], rows)
    rows = [(rule, f"{lr:.2g}", "") for rule, lr in facts["suggestions"].items()]
    for lr, loss in facts["trials"]:
        what = "trial, chosen" if lr == facts["chosen"] else "trial"
        rows.append((what, f"{lr:.2g}", LOSS_DIVERGED if loss is None else f"{loss:.4g}"))
    rows.append(("as configured", f"{facts['lr']:.2g}", ""))
    say()
    table(["learning rate", name, f"loss after {facts['trial_steps']} steps"], rows)
    say(f"{len(lrs)} steps of {facts['batch_size']} samples: {facts['ended']}")


def draw(path: Path, facts: dict[str, Any], title: str) -> None:
    """Write a PNG of the loss over the learning rate, with the suggested rates and the trials."""
    with picture(path, title, 8, 4.5) as figure:
        axes = figure.add_subplot()
        lrs, losses, smoothed, chosen = facts["lrs"], facts["losses"], facts["smoothed"], facts["chosen"]
        axes.plot(lrs, losses, ".", color="0.75", markersize=4, label="loss of a step")
        axes.plot(lrs[: len(smoothed)], smoothed, color="C0", lw=2, label="smoothed")
        for index, (rule, lr) in enumerate(facts["suggestions"].items(), 1):
            axes.axvline(lr, color=f"C{index}", ls=":", lw=1.4, label=f"{rule}: {lr:.2g}")
        trials = [(lr, loss) for lr, loss in facts["trials"] if loss is not None]
        after = f"after {facts['trial_steps']} steps at it"
        axes.plot(*zip(*trials, strict=True), "ks", markersize=5, label=after)
        axes.axvline(chosen, color="k", lw=1.6, label=f"chosen: {chosen:.2g}")
        axes.set_xscale("log")
        spread = max(smoothed) - min(smoothed)
        # Diverging losses would flatten the rest.
        lowest = min([*losses[: len(smoothed)], *(loss for _, loss in trials)])
        axes.set_ylim(lowest - 0.05 * spread, max(smoothed) + 0.25 * spread)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, loc="lower left")
