"""What races show: when each run reached the target, and how much sooner an arm does than the first."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptfast.core.errors import ConfigError
from ptfast.core.units import better_mode
from ptfast.measure.trials.verdicts import ALPHA, Effect, estimate
from ptfast.report.html.run_files import training_times
from ptfast.report.loggers import METRICS_FILE

_RESAMPLES = 4000


@dataclass(frozen=True)
class Target:
    """A figure of the validation split to be reached: from below where more is better, else from above."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `accuracy:0.9`.

        Raises:
            ConfigError: C005 for anything else.
        """
        metric, _, number = text.rpartition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not metric or not math.isfinite(value):
            hint = "Write metric:value, such as accuracy:0.9 or loss:0.5"
            raise ConfigError("C005", "no target", key="--target", value=text, suggestion=hint)
        return cls(metric.removeprefix("val."), value)

    def better(self, value: float, than: float) -> bool:
        """Return True if `value` is at least as good."""
        return value >= than if better_mode(self.metric) == "max" else value <= than

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"


@dataclass(frozen=True)
class Finish:
    """One run of a race, at its end.

    Args:
        steps, train_s: to the target, and seconds of training until then; None where it was not reached.
        total_steps, total_train_s: of the whole run.
        best: the best figure of any evaluation; None without one.
        ended: how the run ended.
    """

    arm: int
    seed: int
    steps: int | None
    train_s: float | None
    total_steps: int
    total_train_s: float
    best: float | None
    ended: str = "finished"


def read_finish(folder: Path, target: Target, arm: int, seed: int, ended: str = "finished") -> Finish:
    """When the run in a folder has reached the target.

    Time is that of training: evaluations, saving and starting up are left out.

    Raises:
        ConfigError: C005 where the run has evaluated, and there is no such figure.
    """
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    train_s = training_times(lines)
    total_steps = max(train_s)
    reached: int | None = None
    best: float | None = None
    for line in lines:
        if line["split"] != "val":
            continue
        if target.metric not in line:
            known = ", ".join(name for name in line if name not in ("step", "epoch", "split"))
            what, hint = "the runs have no such figure", f"There are: {known}"
            raise ConfigError("C005", what, key="--target", value=target.metric, suggestion=hint)
        value = line[target.metric]
        if best is None or target.better(value, best):
            best = value
        if reached is None and target.better(value, target.value):
            reached = line["step"]
    time_s = None if reached is None else train_s[reached]
    return Finish(arm, seed, reached, time_s, total_steps, train_s[total_steps], best, ended)


@dataclass(frozen=True)
class Lead:
    """How many times sooner an arm reaches the target than the first one.

    Args:
        ratio: median over the seeds: above 1 where it is sooner, infinite where the first arm mostly misses.
        low, high: interval of 95 %; None for a single pair.
        pairs: seeds with which one of the two at least reached it.
        effect: the same, where both reached it with every seed.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: int
    effect: Effect | None

    def receipt(self) -> dict[str, Any]:
        """It as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "effect"}


def lead(first: Sequence[float | None], other: Sequence[float | None]) -> Lead | None:
    """Compare what runs took to the target, paired by seed; None marks a miss.

    A run that missed has taken longer than one that did not, however long: the ratio of such a pair is
    infinite or 0, which a median can count. Pairs in which both missed say nothing and are left out. Where
    none missed, the ratio is the median of the means of all pairs of seeds, in logarithms, with the error of
    a bootstrap over seeds and Student's t; else the median with the percentiles of a bootstrap over seeds.

    Returns:
        None where no pair says anything.
    """
    pairs = [(a, b) for a, b in zip(first, other, strict=True) if a is not None or b is not None]
    if not pairs:
        return None
    ratios = [math.inf if a is None else 0.0 if b is None else a / b for a, b in pairs]
    if len(pairs) == 1:
        return Lead(ratios[0], None, None, 1, None)
    if all(0 < ratio < math.inf for ratio in ratios):
        effect = estimate([math.log(ratio) for ratio in ratios])
        low, high = effect.interval()
        return Lead(effect.ratio, low, high, len(pairs), effect)
    values, count = np.asarray(ratios), len(ratios)
    draws = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
    samples = np.sort(values[draws], axis=1)
    # Between two values in the middle there may be no mean: each end of the interval takes its own.
    lows, highs = np.sort(samples[:, (count - 1) // 2]), np.sort(samples[:, count // 2])
    at = int(ALPHA / 2 * _RESAMPLES)
    ordered = sorted(ratios)
    middle = (ordered[(count - 1) // 2], ordered[count // 2])
    ratio = middle[0] if middle[0] == middle[1] else sum(middle) / 2
    return Lead(ratio, float(lows[at]), float(highs[-1 - at]), count, None)
