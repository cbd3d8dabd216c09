"""Compare how soon runs reach a value of a metric: each variant against the first, paired by seed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ptfast.cli.run_ranking import SEED, Ranking, short_labels
from ptfast.core.errors import ConfigError, NumericsError
from ptfast.core.units import better_mode, duration
from ptfast.measure.experiment.verdicts import ALPHA, Effect, estimate, judge
from ptfast.report.html.run_files import RunFiles, is_finite, training_times
from ptfast.report.terminal.display import say, table
from ptfast.report.terminal.json_lines import emit

_WORDS = {"faster": "sooner", "slower": "later"}
HEADERS = ("variant", "reached", "steps", "time", "by steps", "by time", "verdict")


@dataclass(frozen=True)
class Target:
    """The value of a validation metric that runs must reach."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `accuracy=0.9`."""
        metric, _, number = re.sub(":(?=[^:]*$)", "=", text).rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not metric or not math.isfinite(value):
            hint = "Write metric=value, such as accuracy=0.9 or loss=0.5"
            raise ConfigError("C005", "no target", key="--target", value=text, suggestion=hint)
        return cls(metric.removeprefix("val."), value)

    def is_reached(self, value: float) -> bool:
        return value >= self.value if better_mode(self.metric) == "max" else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"


@dataclass(frozen=True)
class Taken:
    """The steps and the time a run took to the target."""

    steps: int
    train_s: float
    """Seconds without evaluation, saving and start-up."""


@dataclass(frozen=True)
class Lead:
    """How many times sooner a variant reaches the target than the first variant."""

    ratio: float
    """Over the seeds: above 1 if the variant is sooner, infinite if the first mostly misses."""
    low: float | None
    """Bounds of the 95 % interval; 0 and infinity if too few runs give a bound, None for one pair."""
    high: float | None
    effect: Effect | None
    """The same, if every seed of both reached the target and the ratios differ."""

    def __str__(self) -> str:
        known = (each for each in (self.ratio, self.low, self.high) if each is not None)
        ratio, *bounds = (f"{each:.2f}" if each < 99 else "99+" for each in known)
        text = f"{ratio}x" if self.ratio else "never"
        return f"{text} [{'-'.join(bounds)}]" if bounds else text


@dataclass
class TargetTimes:
    """How soon the runs of a variant, which differ only in their seeds, reached the target."""

    name: str
    taken: dict[int, Taken | None] = field(default_factory=dict)
    """Results by seed; None for a run that missed the target."""
    by_steps: Lead | None = None
    by_time: Lead | None = None

    def compare(self, first: TargetTimes) -> None:
        """Compute the leads over the `first` variant, over the seeds both have."""
        seeds = [seed for seed in self.taken if seed in first.taken]
        pairs = [(first.taken[seed], self.taken[seed]) for seed in seeds]
        self.by_steps = lead([(one and one.steps, other and other.steps) for one, other in pairs])
        self.by_time = lead([(one and one.train_s, other and other.train_s) for one, other in pairs])


def compare_to_target(ranking: Ranking, run_dirs: Sequence[Path], target: Target) -> list[list[str]]:
    """Print which variant reaches the target first, and return the rows of the table under `HEADERS`.

    Runs that stopped early without reaching it are ignored. A run whose loss diverged has missed it.

    Args:
        run_dirs: in the order of the variants; the others are compared with the first variant.
    """
    variants = _variants(ranking, run_dirs, target)
    if not variants:
        known = sorted(
            {name for run in ranking.runs for name, curves in run.curves.items() if "val" in curves}
        )
        why = next((str(run.summary["error"]) for run in ranking.runs if run.summary.get("error")), None)
        hint = f"There are: {', '.join(known)}" if known else why or "No run has evaluated a validation split"
        what = "no finished run has this metric"
        raise ConfigError("C005", what, key="--target", value=target.metric, suggestion=hint)
    first, *others = variants
    for variant in others:
        variant.compare(first)
    verdicts = judge([each.by_time and each.by_time.effect for each in others])
    rows: list[list[str]] = []
    for variant, verdict in zip(variants, ["", *verdicts], strict=True):
        leads = (str(each or "-") for each in (variant.by_steps, variant.by_time))
        against_first = (
            [*leads, _WORDS.get(verdict, verdict)] if variant is not first else ["1.00x", "1.00x", ""]
        )
        reached = [each for each in variant.taken.values() if each is not None]
        took = ["", ""]
        if reached:
            steps = statistics.median(each.steps for each in reached)
            took = [f"{steps:,.0f}", duration(statistics.median(each.train_s for each in reached))]
        rows.append([variant.name, f"{len(reached)} of {len(variant.taken)}", *took, *against_first])
    if emit("result", target=asdict(target), variants=[asdict(variant) for variant in variants]):
        return rows
    say()
    table(HEADERS, rows, title=f"to {target}")
    say(f"by steps, by time: how many times sooner than {first.name}, with its 95 % interval")
    if max(len(variant.taken) for variant in variants) == 1:
        say("one seed gives no interval; another seed may reverse the order")
    return rows


def _variants(ranking: Ranking, run_dirs: Sequence[Path], target: Target) -> list[TargetTimes]:
    """Return the variants with at least one run that counts, in the order of `run_dirs`."""
    variants = ranking.variants((SEED,))
    variants.sort(key=lambda variant: min(run_dirs.index(run.run_dir) for run in variant.runs))
    found: list[TargetTimes] = []
    for variant, words in zip(variants, short_labels([each.label for each in variants]), strict=True):
        times = TargetTimes(" ".join(words) or "as configured")
        for run in variant.runs:
            taken = _taken(run, target)
            missed = run.status in ("finished", "stopped") and target.metric in run.curves
            if taken is not None or missed or run.summary.get("exit_code") == NumericsError.exit_code:
                times.taken[int(run.config.get(SEED, 0))] = taken
        if times.taken:
            found.append(times)
    return found


def _taken(run: RunFiles, target: Target) -> Taken | None:
    """Return the steps and time a run took to the target; None if it has not reached it."""
    for record in run.records:
        value = record.get(target.metric)
        if record.get("split") == "val" and is_finite(value) and target.is_reached(value):
            return Taken(record["step"], training_times(run.records)[record["step"]])
    return None


def lead(pairs: Sequence[tuple[float | None, float | None]]) -> Lead | None:
    """Compare how soon runs of the first variant and of another reached the target; None marks a miss.

    A run that missed took longer than one that did not, so the ratio of such a pair is infinite or 0. If both
    missed, the ratio could be anything and widens the interval to both sides. If none missed, the result is
    the mean of the log ratios with Student's t interval; otherwise, or if all ratios are equal, the median
    with order statistics as its interval.

    Returns:
        None if every pair missed.
    """
    known: list[float] = []
    for first, other in pairs:
        if first is None and other is None:
            continue
        known.append(math.inf if first is None else 0.0 if other is None else first / other)
    count, unknown = len(pairs), len(pairs) - len(known)
    if not known:
        return None
    if count == 1:
        return Lead(known[0], None, None, None)
    if not unknown and 0 < min(known) < max(known) < math.inf:
        effect = estimate([math.log(ratio) for ratio in known])
        return Lead(effect.ratio, *effect.interval(), effect)
    # A value lies below the median with probability 1/2, so their number is binomial: with fewer than six
    # values, even the smallest and the largest do not enclose the median in 95 % of cases.
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
