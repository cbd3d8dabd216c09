"""`ptfast race`: trains every arm with the same seeds, in turns, and tells which reaches a target first."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptfast.config.files.frozen import redact
from ptfast.config.overrides import merge, parse, quoted
from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, NumericsError, ReportedError
from ptfast.core.units import better_mode, clock, duration
from ptfast.measure.experiment.verdicts import ALPHA, Effect, estimate, judge
from ptfast.measure.outputs import (
    OWN_KEYS,
    check_free,
    check_new,
    label,
    make_folder,
    picture,
    run_ptfast,
    write_figures,
)
from ptfast.report.html.run_files import training_times
from ptfast.report.loggers import METRICS_FILE, read_records
from ptfast.report.terminal.display import say, table, terminal_display

PICTURE = "race.png"
_WORDS = {"faster": "sooner", "slower": "later"}
_RATE = "optimizer.lr"


def race(
    arms: Sequence[Arm],
    target: RaceTarget,
    *,
    num_seeds: int,
    command: Sequence[str],
    tunes: bool = False,
    out: Path | None = None,
) -> int:
    """Race the arms, and show and write which reaches the target first.

    Args:
        command: repeats the race.
        tunes: give each arm its own learning rate first.
        out: folder of runs, receipt and picture.

    Raises:
        PtfastError, ReportedError: a run or a search for a rate fails. A loss may diverge.
    """
    check_new(out)
    folder = make_folder("race", out, arms[0].config)
    say(f"{len(arms)} arms, {num_seeds} seeds, {len(arms) * num_seeds} runs to {target}, in {folder}")
    code, racing = EXIT_OK, Race(arms, target, num_seeds, folder)
    try:
        if tunes:
            racing.arms = [_tuned(arm, folder / f"lr{number}") for number, arm in enumerate(arms, 1)]
        racing.run()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if not racing.finishes:
        return code
    _show(racing, "" if tunes else describe_rates(arms))
    facts = {
        "command": redact(command),
        "environment": run_directory.read_json(folder / "arm1-seed0" / run_directory.ENVIRONMENT),
        "target": asdict(target),
        "seeds": num_seeds,
        "rates_tuned": tunes,
        "arms": [{"name": arm.name, "overrides": redact(arm.words), "lr": arm.lr} for arm in racing.arms],
        "runs": [asdict(finish) for finish in racing.finishes],
        "sooner": {
            name: [each and asdict(each) for each in racing.leads(name)] for name in ("train_s", "steps")
        },
    }
    draw(folder / PICTURE, racing, f"{label(arms[0].config)}: {target}")
    write_figures("race", folder, None, facts)
    return code


class Race:
    """Trains every arm with seeds 0, 1, ..., each run in a process and a run directory of its own."""

    def __init__(self, arms: Sequence[Arm], target: RaceTarget, num_seeds: int, folder: Path) -> None:
        self.arms, self.target, self.num_seeds, self.folder = list(arms), target, num_seeds, folder
        self.finishes: list[Finish] = []

    def run(self) -> None:
        """Train seed by seed, and print how each run ended."""
        display, total = terminal_display(), len(self.arms) * self.num_seeds
        start_s, left_s = time.monotonic(), None
        for seed, (number, arm) in itertools.product(range(self.num_seeds), enumerate(self.arms)):
            done = len(self.finishes) + 1
            with display.status(f"run {done} of {total}: {arm.name}", left_s):
                finish = self._train(number, arm, seed)
            self.finishes.append(finish)
            left_s = (time.monotonic() - start_s) / done * (total - done)
            if finish.steps is not None and finish.train_s is not None:
                how = f"{self.target} after {finish.steps:,} steps, {duration(finish.train_s)}"
            else:
                best = "" if finish.best is None else f", best {finish.best:.4g}"
                how = ("diverged" if finish.ended == "diverged" else "missed it") + best
            eta = f"  eta {clock(left_s)}" if done < total else ""
            say(f"{done}/{total}  seed {seed}  {arm.name}: {how}{eta}")

    def figures(self, number: int, name: str) -> list[Any]:
        """A figure of each run of an arm, by seed; `steps` and `train_s` are None for a run that missed."""
        return [getattr(finish, name) for finish in self.finishes if finish.arm == number]

    def leads(self, figure: str) -> list[Lead | None]:
        """Each further arm against the first, by `train_s` or `steps`."""
        by_arm = [self.figures(number, figure) for number in range(len(self.arms))]
        # An interrupted race has more runs of the first arms.
        return [lead(by_arm[0][: len(other)], other[: len(by_arm[0])]) for other in by_arm[1:]]

    def _train(self, number: int, arm: Arm, seed: int) -> Finish:
        run_dir = self.folder / f"arm{number + 1}-seed{seed}"
        log, metric = run_dir.with_suffix(".log"), self.target.metric
        words = [*arm.words, f"seed={seed}", f"stop.metric={metric}", "stop.patience=null"]
        code, said = run_ptfast(["train", *words, f"run.dir={quoted(run_dir.absolute())}"], log)
        diverged = code == NumericsError.exit_code
        if code and not diverged:
            if "stop.metric=" in said and "no such figure" in said:
                hint = said.partition("no such figure. ")[2].rstrip(".")
                raise ConfigError("C005", "no such figure", key="--target", value=metric, suggestion=hint)
            raise ReportedError(said, max(code, 1))
        finish = read_finish(run_dir, self.target, number, seed, "diverged" if diverged else "finished")
        if finish.best is None and not diverged:
            what, hint = "the runs evaluate no validation split", "Leave out data.val=0"
            raise ConfigError("C011", what, key="--target", value=metric, suggestion=hint)
        return finish


def _tuned(arm: Arm, folder: Path) -> Arm:
    """The arm at the learning rate that `find lr` chooses for it."""
    log = folder.with_suffix(".log")
    code, said = run_ptfast(["find", "lr", *arm.words, "--out", str(folder)], log)
    if code:
        raise ReportedError(said, max(code, 1))
    found = run_directory.read_json(folder / "lr.json")
    lr = float(f"{found['chosen'] / found['lr_scale']:.3g}")
    say(f"{arm.name}: learning rate {lr:g} by find lr")
    words = merge(arm.words, [f"{_RATE}={lr:g}"])
    return Arm(words, arm.own, read_config(words)[1])


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

    @property
    def best_of(self) -> Callable[..., float | None]:
        """`max` or `min`, whichever is better for the figure."""
        return max if better_mode(self.metric) == "max" else min

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
    lines = read_records(folder / METRICS_FILE)
    train_s, metric = training_times(lines), target.metric
    total_steps = max(train_s)
    # A figure that is not finite is null there.
    lines = [line for line in lines if line["split"] == "val" and line.get(metric) is not None]
    values = {line["step"]: line[metric] for line in lines}
    best = target.best_of(values.values(), default=None)
    reached = (step for step, value in values.items() if target.best_of(value, target.value) == value)
    steps = next(reached, None)
    time_s = None if steps is None else train_s[steps]
    return Finish(arm, seed, steps, time_s, total_steps, train_s[total_steps], best, ended)


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


def _show(racing: Race, note: str) -> None:
    say()
    by_time, by_steps = racing.leads("train_s"), racing.leads("steps")
    verdicts = [_WORDS.get(each, each) for each in judge([each and each.effect for each in by_time])]
    rows: list[list[str]] = []
    for number, arm in enumerate(racing.arms):
        against_first = ["1.00x", "1.00x", ""]
        if number:
            leads = (str(found[number - 1] or "-") for found in (by_steps, by_time))
            against_first = [*leads, verdicts[number - 1]]
        steps, times = (list(filter(None, racing.figures(number, name))) for name in ("steps", "train_s"))
        took = [f"{statistics.median(steps):,.0f}", duration(statistics.median(times))] if steps else ["", ""]
        reached = f"{len(steps)} of {len(racing.figures(number, 'steps'))}"
        rows.append([arm.name, reached, *took, *against_first])
    table(["arm", "reached", "steps", "time", "by steps", "by time", "verdict"], rows)
    say(f"by steps, by time: how many times sooner than {racing.arms[0].name}, with its 95 % interval")
    if racing.num_seeds == 1:
        say("one seed gives no interval: another may turn the order around; --seeds 5 says")
    if note:
        say(note)


def draw(path: Path, racing: Race, title: str) -> None:
    """Write a PNG of a curve for each arm; ticks mark runs that ended without reaching the target."""
    panels = ("seconds of training", "train_s"), ("optimizer steps", "steps")
    with picture(path, title, 10, 4.5) as drawn:
        for axes, (x_label, figure) in zip(drawn.subplots(1, 2, sharey=True), panels, strict=True):
            for number, arm in enumerate(racing.arms):
                taken, ends = racing.figures(number, figure), racing.figures(number, f"total_{figure}")
                reached = sorted(value for value in taken if value is not None)
                shares = [count / max(len(taken), 1) for count in range(len(reached) + 1)]
                xs = [0.0, *reached, max([*ends, *reached], default=0.0)]
                # Curves that coincide stay visible: those below are wider.
                width, color = 2 + 2 * min(len(racing.arms) - 1 - number, 4), f"C{number}"
                axes.step(xs, [*shares, shares[-1]], where="post", color=color, lw=width, label=arm.name)
                missed = [end for value, end in zip(taken, ends, strict=True) if value is None]
                axes.plot(missed, [shares[-1]] * len(missed), "|", color=color, markersize=12, mew=2)
            axes.set_xlabel(x_label)
            axes.set_xlim(left=0)
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
        drawn.axes[0].set_ylabel("share of runs that have reached it")
        handles, labels = drawn.axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, fontsize=9, loc="outside lower center", ncols=min(len(labels), 3))


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    words: Sequence[str]
    """All its overrides, including those in common."""
    own: Sequence[str]
    config: Config

    @property
    def name(self) -> str:
        return " ".join(self.own) or "as configured"

    @property
    def lr(self) -> float | None:
        """Its learning rate; None if the optimizer has its own."""
        return self.config.optimizer.target.kwargs.get("lr")


def build_arms(arguments: Sequence[str], written: str | None) -> list[Arm]:
    """The arms that the words of a command mean, checked.

    `key=a,b` gives an arm for each value, several such words one for each combination. In `written`, spaces
    separate overrides and semicolons separate arms.
    """
    given = parse(arguments, sweep=True)
    check_free(given, {**OWN_KEYS, "seed": "--seeds"}, "a race")
    for argument in given:
        if argument.is_interval:
            hint = "List the values: key=a,b"
            raise ConfigError("C014", "an interval has no arms", key=argument.key, suggestion=hint)
    common = [word for word, argument in zip(arguments, given, strict=True) if not argument.is_sweep]
    swept = [[argument.at(value) for value in argument.values] for argument in given if argument.is_sweep]
    points = [[word.lstrip("+") for word in point] for point in itertools.product(*swept)]
    if written is not None:
        points = [[*point, *shlex.split(line)] for line in written.split(";") for point in points]
    if len(points) < 2:
        hint = 'Give several values: schedule=cosine,onecycle, or --arms "schedule=onecycle; epochs=5"'
        raise ConfigError("C016", "a race takes two arms", key="race", suggestion=hint)
    return [Arm(words, own, read_config(words)[1]) for own in points for words in [merge(common, own)]]


def describe_rates(arms: Sequence[Arm]) -> str:
    """A remark on the arms' learning rates where none was tuned; empty if each arm sets its own."""
    if all(any(word.lstrip("+").startswith(f"{_RATE}=") for word in arm.own) for arm in arms):
        return ""
    rates = ", ".join("none" if arm.lr is None else f"{arm.lr:g}" for arm in arms)
    tuned = "ptfast race --tune-lr gives each arm its own by find lr"
    return f"learning rates as configured ({rates}), which may suit one arm better; {tuned}"
