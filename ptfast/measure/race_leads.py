"""When a run of a race reached the target, and how much sooner one arm did than another."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptfast.core.errors import ConfigError
from ptfast.core.units import better_mode
from ptfast.measure.experiment.verdicts import ALPHA, Effect, estimate
from ptfast.report.html.run_files import training_times
from ptfast.report.loggers import METRICS_FILE


@dataclass(frozen=True)
class RaceTarget:
    """The value that a figure of the validation split has to reach."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> RaceTarget:
        """Read `accuracy:0.9`."""
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
    """One run of a race, at its end."""

    arm: int
    seed: int
    steps: int | None
    """To the target; None if it was not reached."""
    train_s: float | None
    """To the target, without evaluation, saving and start-up."""
    total_steps: int
    total_train_s: float
    best: float | None
    """Of any evaluation; None without one."""
    ended: str = "finished"


def read_finish(folder: Path, target: RaceTarget, arm: int, seed: int, ended: str = "finished") -> Finish:
    """Read when the run in a folder reached the target."""
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    train_s = training_times(lines)
    total_steps = max(train_s)
    reached: int | None = None
    best: float | None = None
    for line in lines:
        if line["split"] != "val" or target.metric not in line:
            continue
        value = line[target.metric]
        if best is None or target.better(value, best):
            best = value
        if reached is None and target.better(value, target.value):
            reached = line["step"]
    time_s = None if reached is None else train_s[reached]
    return Finish(arm, seed, reached, time_s, total_steps, train_s[total_steps], best, ended)


@dataclass(frozen=True)
class Lead:
    """How many times sooner an arm reaches the target than the first one."""

    ratio: float
    """Median over the seeds: above 1 if it is sooner, infinite if the first arm mostly misses."""
    low: float | None
    """Bounds of the 95 % interval; 0 and infinity if too few runs give a bound, None for one pair."""
    high: float | None
    effect: Effect | None
    """The same, if both reached the target with every seed and the ratios differ."""

    def __str__(self) -> str:
        figures = (each for each in (self.ratio, self.low, self.high) if each is not None)
        ratio, *bounds = (f"{each:.2f}" if each < 99 else "99+" for each in figures)
        text = f"{ratio}x" if self.ratio else "never"
        return f"{text} [{'-'.join(bounds)}]" if bounds else text


def lead(first: Sequence[float | None], other: Sequence[float | None]) -> Lead | None:
    """Compare what runs took to the target, paired by seed; None marks a miss.

    A run that missed took longer than one that did not, so the ratio of such a pair is infinite or 0. If both
    missed, the ratio could be anything and widens the interval to both sides. If none missed, the ratio is
    the median of the means of all pairs of seeds, in logarithms, with the error of a bootstrap over seeds and
    Student's t; otherwise, or if all ratios are equal, the median, with order statistics as its interval.

    Returns:
        None if every pair missed.
    """
    known: list[float] = []
    for mine, theirs in zip(first, other, strict=True):
        if mine is None and theirs is None:
            continue
        known.append(math.inf if mine is None else 0.0 if theirs is None else mine / theirs)
    count, unknown = len(first), len(first) - len(known)
    if not known:
        return None
    if count == 1:
        return Lead(known[0], None, None, None)
    if not unknown and 0 < min(known) < max(known) < math.inf:
        effect = estimate([math.log(ratio) for ratio in known])
        return Lead(effect.ratio, *effect.interval(), effect)
    # A value lies below the median with probability 1/2, so the number that do is binomial: with fewer than
    # six values even the smallest and the largest do not enclose the median in 95 % of cases.
    tail, place = 0.0, None
    for below in range(count // 2):
        tail += math.comb(count, below) / 2**count
        if tail > ALPHA / 2:
            break
        place = below
    low, high = 0.0, math.inf
    if place is not None:
        low = sorted([*known, *[0.0] * unknown])[place]
        high = sorted([*known, *[math.inf] * unknown])[-1 - place]
    return Lead(statistics.median(known), low, high, None)
