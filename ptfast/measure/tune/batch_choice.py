"""The batch of a tuned run: what other sizes gain in samples a second, held against the gradient noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptfast.config.overrides import merge
from ptfast.measure.batch.batch_finder import scaled_rate
from ptfast.measure.batch.batch_search import BatchSearch, multiple
from ptfast.measure.batch.critical_batch import LEAST_STEPS, Critical
from ptfast.measure.batch.noise_forecast import NUM_STEPS, forecast_noise
from ptfast.measure.trials.arm_pool import OUT_OF_MEMORY
from ptfast.measure.trials.comparison import Arm, Comparison
from ptfast.measure.trials.session import Session
from ptfast.measure.trials.verdicts import Effect
from ptfast.report.terminal.display import say, table

FACTORS = (0.5, 2.0, 4.0)
"""Sizes that are tried, as multiples of the config's."""
SIZES_SHARE, NOISE_SHARE = 0.4, 0.5
"""Parts of what is left of the budget: for trying sizes, and then for the gradient noise."""
NOISE_STEP = 1.5
"""Steps that a step with its gradient noise takes as long as."""


@dataclass(frozen=True)
class BatchChoice:
    """A batch that should reach the same loss sooner.

    Args:
        values: of a recipe, the learning rate that goes with the size among them.
        comment: what was measured.
    """

    values: dict[str, Any]
    comment: list[str]


def choose_batch(session: Session, arm: Arm, folder: Path) -> BatchChoice | None:
    """Choose another batch size for a variant, where it should clearly reach the same loss sooner.

    Samples a second are measured in paired trials, and how many more samples a larger batch needs is
    predicted from the gradient noise of a short training. The size that promises most is measured again in
    new processes, and taken where the interval of the whole gain is above 1 there. Prints what it finds.

    Args:
        session: calibrated.
        folder: for files of processes.

    Returns:
        None where the size is to stay as it is.
    """
    composed, config = session.pool.config(arm)
    search = BatchSearch(composed, config, folder, 0.0)
    own = config.batch_size
    tried = _try_sizes(session, arm, search)
    measured = {size: each.effect for size, each in tried.items() if each.effect is not None}
    num_steps = 0
    if measured:
        step_s = NOISE_STEP * session.pool.step_s[arm]
        num_steps = min(NUM_STEPS, int(NOISE_SHARE * session.left_s / step_s))
    if num_steps < 2 * LEAST_STEPS:
        say(f"batch_size stays {own:,}: others were not reached, give a longer --budget")
        return None
    # Its processes hold memory, and would have to be started anew to measure again.
    session.pool.close()
    folder.mkdir()
    search.seen = _rates(tried, own)
    critical = forecast_noise(search, num_steps).critical
    gains = _gains(measured, critical, own)
    rows = [
        [f"{size:,}", each.why or _cell(each.effect), _cell(gains.get(size))] for size, each in tried.items()
    ]
    say()
    table(["batch", f"samples/s, to those of {own:,}", "sooner at the same loss"], rows)
    best = max(gains, key=lambda size: gains[size].log_ratio, default=own)
    if best != own and gains[best].log_ratio > 0:
        effect = session.compare(arm, _with_size(arm, best), fresh=True).effect
        gain = _gains({best: effect} if effect else {}, critical, own).get(best)
        say(f"batch_size={best} measured again: {_cell(effect)}, to the same loss {_cell(gain)}")
        if any(OUT_OF_MEMORY in each.why for each in tried.values()):
            # What a trial scraped through with may be missing in a run.
            session.pool.close()
            search.measure([best], rehearsed=True)
        if search.too_large is None and critical and gain and gain.interval()[0] > 1:
            lr_ratio = _bounded(critical).lr_ratio(best, own)
            values, comment = scaled_rate(config, best, lr_ratio)
            worth = f"batch_size={best}: {_cell(effect)} the samples a second, {_cell(gain)} to the same loss"
            return BatchChoice({"batch_size": best, **values}, [worth, *comment])
    say(f"no other batch is clearly sooner at the same loss: batch_size stays {own:,}")
    return None


def _try_sizes(session: Session, arm: Arm, search: BatchSearch) -> dict[int, Comparison]:
    """Compare other sizes with a variant's own."""
    own = search.config.batch_size
    sizes = sorted({multiple(round(own * factor), search.parts) for factor in FACTORS} - {own})
    tried: dict[int, Comparison] = {}
    end_s = session.left_s * (1 - SIZES_SHARE)
    for number, size in enumerate(sizes):
        seconds = max(session.least_s, (session.left_s - end_s) / (len(sizes) - number))
        with search.display.status(f"batch_size={size}"):
            tried[size] = session.compare(arm, _with_size(arm, size), seconds=seconds)
    return tried


def _rates(tried: Mapping[int, Comparison], own: int) -> dict[int, list[dict[str, Any]]]:
    """Samples per second of each size that was measured, as a search for the batch has them."""
    found: dict[int, list[dict[str, Any]]] = {}
    for size, each in tried.items():
        if each.effect is not None:
            rate = each.median(0, "samples") / each.median(0, "wall_s")
            found.setdefault(own, []).append({"samples_per_s": rate})
            found[size] = [{"samples_per_s": rate * each.effect.ratio}]
    return found


def _with_size(arm: Arm, size: int) -> Arm:
    return Arm(f"batch_size={size}", tuple(merge(arm.overrides, [f"batch_size={size}"])))


def _bounded(critical: Critical) -> Critical:
    """The critical batch, or its lower bound where that is all that is known of it."""
    return critical if critical.batch is not None else replace(critical, batch=critical.at_least, error=0.0)


def _gains(measured: Mapping[int, Effect], critical: Critical | None, own: int) -> dict[int, Effect]:
    """How much sooner each size is at the same loss, with the errors of its speed and of the noise.

    Where the critical batch is only known to be above some size, larger batches cost no more than by that
    bound; of smaller ones nothing can be said.
    """
    if critical is None or _bounded(critical).batch is None:
        return {}
    found: dict[int, Effect] = {}
    for size, effect in measured.items():
        if critical.batch is None and size < own:
            continue
        bounded = _bounded(critical)
        samples, farther = (at.steps_ratio(size, own) * size / own for at in (bounded, bounded.moved(1.0)))
        se = math.hypot(effect.se, math.log(farther / samples))
        found[size] = Effect(effect.log_ratio - math.log(samples), se, effect.dof)
    return found


def _cell(effect: Effect | None) -> str:
    if effect is None:
        return "cannot tell"
    low, high = effect.interval()
    return f"{effect.ratio:.2f}x [{low:.2f}-{high:.2f}]"
