"""`ptfast tune`: the settings that are quickest together, written as a recipe for this machine."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ptfast.config.applicability import ThisMachine
from ptfast.config.files.overlay import check_out, check_overlay, write_overlay
from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core.devices import machine_name
from ptfast.core.errors import EXIT_OK
from ptfast.core.machine import spare_cores, usable_cores
from ptfast.core.run import Resolved
from ptfast.measure.batch.batch_finder import check_batch_search
from ptfast.measure.found import label, make_folder
from ptfast.measure.trials.comparison import Arm, Comparison
from ptfast.measure.trials.session import RECEIPT, Session
from ptfast.measure.trials.verdicts import Effect
from ptfast.measure.tune.batch_choice import choose_batch
from ptfast.report.terminal.display import build_display, say, table

SINGLES_SHARE, TOGETHER_SHARE = 0.6, 0.6
"""Parts of what is left of the budget: for settings one by one, and then for several together."""
BATCH_SHARE = 0.4
"""Part of the budget for trying other batch sizes."""
MOST_TOGETHER = 16
"""Sets of settings that the first round of the halving takes."""
AT_ONCE = 2
"""Processes that are started together."""
LEAST_GAIN = 0.005
"""A setting that gains less by its estimate is not tried together with others."""
Words = tuple[str, ...]
MOST_WORKERS = 8


def tune(
    config: Config,
    arguments: Sequence[str],
    *,
    budget_s: float,
    compiles: bool = False,
    batches: bool = False,
    write: Path,
    out: Path | None = None,
) -> int:
    """Search for the settings under which a recipe trains the most samples per second here.

    Loader, threads, number formats, layout, kernels, and with `compiles` compilation: first each setting by
    itself against the run as it is, then those that may gain together, in rounds of which each takes twice
    the time for the better half (successive halving: Jamieson, Talwalkar 2016, arXiv:1502.07943). All of it
    in paired trials. The winner is measured again in new processes, against the run as it is, and is written
    only where it is faster there: of many, the one that measured best has had luck, too.

    Args:
        arguments: the user's words.
        budget_s: seconds for all of it.
        batches: try other batch sizes, too, and weigh them with the gradient noise.
        write: file of the recipe.
        out: folder of the receipt; None for a new one under `run.root`.

    Returns:
        0.

    Raises:
        ConfigError: C005 for a budget in which nothing can be measured; C011 where there is no batch size.
        PtfastError: whatever stops the run in its first steps.
    """
    if batches:
        check_batch_search(config, "--batch")
    check_overlay(write)
    check_out(out)
    flags = ["--budget", f"{budget_s:g}s", "--write", str(write)]
    flags += ["--compile"] * compiles + ["--batch"] * batches
    command = ["ptfast", "tune", *arguments, *flags]
    with tempfile.TemporaryDirectory(prefix="ptfast-") as scratch:
        search = Tuner(config, arguments, budget_s, Path(scratch), compiles=compiles, batches=batches)
        with search.session:
            try:
                faster = search.run()
                base = faster[0] if faster else search.start
                batch = choose_batch(search.session, base, Path(scratch) / "noise") if batches else None
            except KeyboardInterrupt:
                search.show()
                raise
            finally:
                if search.session.comparisons:
                    folder = make_folder(config, "tune", out)
                    search.session.write_receipt(folder / RECEIPT, command)
                    say(f"figures: {folder}")
    if faster is None and batch is None:
        say("no recipe is written")
        return EXIT_OK
    machine = machine_name(config.device)
    comment = [f"{label(config)}, tuned for {machine}", *(search.lines(*faster) if faster else ())]
    values: dict[str, Any] = {"tuned_for": machine}
    if batch is not None:
        comment += batch.comment
        values |= batch.values
    called = write_overlay(write, merge(list(arguments), base.overrides), values, comment)
    say(f"wrote {write}; train with it: ptfast train +recipe={called}")
    return EXIT_OK


class Tuner:
    """The search, and what it has measured."""

    def __init__(
        self,
        config: Config,
        arguments: Sequence[str],
        budget_s: float,
        scratch: Path,
        *,
        compiles: bool,
        batches: bool,
    ) -> None:
        self.config, self.compiles, self.batches = config, compiles, batches
        self._reserve_s = 0.0
        self.display = build_display()
        self.session = Session(arguments, budget_s=budget_s, folder=scratch)
        self.start = Arm("as it is")
        self.not_reached: list[Arm] = []
        self.measured: dict[Arm, Comparison] = {}
        """The last comparison of each set of settings with the start."""

    def run(self) -> tuple[Arm, Effect] | None:
        """The settings that are fastest, and their gain measured again; None where none is clear."""
        session = self.session
        with self.display.status("measuring the noise", session.left_s):
            session.calibrate(self.start)
        say("\n".join(session.describe_floor()))
        self._reserve_s = BATCH_SHARE * session.left_s if self.batches else 0.0
        warm = session.pool.warm[self.start]
        resolved = Resolved(**warm["resolved"])
        found = dimensions(self.config, resolved, ThisMachine(), compiles=self.compiles)
        singles = [[Arm(_named(words), words) for words in settings] for settings in found.values()]
        everything = list(itertools.chain.from_iterable(singles))
        self._measure(everything, SINGLES_SHARE)
        promising = [best for arms in singles if (best := max(arms, key=self.gain)) and self._gains(best)]
        contenders = self._halve(_together(promising)) if len(promising) > 1 else []
        self.show()
        if not promising:
            say("nothing that was tried is faster")
            return None
        return self._confirmed(max([*contenders, *promising], key=self.gain))

    def gain(self, arm: Arm) -> float:
        """The logarithm of the speed-up over the start; minus infinity where it cannot run."""
        effect = self.measured[arm].effect if arm in self.measured else None
        return -math.inf if effect is None else effect.log_ratio

    def worth(self, arm: Arm) -> float:
        """The speed-up over the start by the measurement that the search went by."""
        return math.exp(self.gain(arm))

    def show(self) -> None:
        """Print a table of what was measured, the fastest first."""
        rows = []
        for arm in sorted(self.measured, key=self.gain, reverse=True):
            comparison = self.measured[arm]
            effect = comparison.effect
            speed, spread = ("", "")
            if effect is not None:
                low, high = effect.interval()
                speed, spread = f"{effect.ratio:.2f}x", f"{low:.2f}-{high:.2f}"
            rows.append([arm.name, speed, spread, comparison.why or comparison.verdict])
        if rows:
            table(["setting", "speed-up", "95 %", "verdict"], rows)
        if self.not_reached:
            say(f"not reached, give a longer --budget: {', '.join(arm.name for arm in self.not_reached)}")

    def lines(self, winner: Arm, effect: Effect) -> list[str]:
        """What the winner is worth, and each of its settings by itself, for a comment."""
        singles = [arm for arm in self.measured if set(arm.overrides) <= set(winner.overrides)]
        low, high = effect.interval()
        whole = f"{effect.ratio:.2f} times [{low:.2f}-{high:.2f}] as fast as untuned; each by itself:"
        shown = [arm for arm in singles if arm != winner or len(singles) == 1]
        return [whole, *(f"  {arm.name}: {self.worth(arm):.2f}x" for arm in shown)]

    def _confirmed(self, winner: Arm) -> tuple[Arm, Effect] | None:
        """Measure the winner again, in new processes; returns it and its gain, None if that is not clear."""
        with self.display.status(f"measuring {winner.name} again", self.session.left_s):
            seconds = self.session.left_s - self._reserve_s
            effect = self.session.compare(self.start, winner, seconds=seconds, fresh=True).effect
        if effect is None:
            say(f"{winner.name} was not measured again: give a longer --budget")
            return None
        low, high = effect.interval()
        say(f"promised {self.worth(winner):.2f}x, measured again {effect.ratio:.2f}x [{low:.2f}-{high:.2f}]")
        if low <= 1:
            say("that is not clearly faster than the run as it is")
            return None
        return winner, effect

    def _gains(self, arm: Arm) -> bool:
        """Return True if it is worth trying together with others."""
        comparison = self.measured.get(arm)
        effect = comparison.effect if comparison else None
        return effect is not None and effect.log_ratio > max(LEAST_GAIN, effect.se)

    def _halve(self, arms: list[Arm]) -> list[Arm]:
        """Measure sets of settings in rounds, the better half of which goes on to the next."""
        num_rounds = max(1, math.ceil(math.log2(len(arms))))
        for number in range(num_rounds):
            self._measure(arms, TOGETHER_SHARE / (num_rounds - number))
            if number < num_rounds - 1:
                arms = sorted(arms, key=self.gain, reverse=True)[: math.ceil(len(arms) / 2)]
        return arms

    def _measure(self, arms: Sequence[Arm], share: float) -> None:
        """Compare each with the start, within a part of the time that is left but for measuring one again."""
        own_s = self.session.left_s - self.session.least_s - self._reserve_s
        end_s = self.session.left_s - share * own_s
        for number, arm in enumerate(arms):
            if self.session.left_s < end_s + self.session.least_s:
                self.not_reached += [arm for arm in arms[number:] if arm not in self.measured]
                return
            what = f"{arm.name} ({number + 1} of {len(arms)})"
            with self.display.status(what, self.session.left_s):
                if arm not in self.session.pool.alive:
                    self.session.prepare(self.start, *arms[number : number + AT_ONCE])
                seconds = max(self.session.least_s, (self.session.left_s - end_s) / (len(arms) - number))
                comparison = self.session.compare(self.start, arm, seconds=seconds)
            if comparison.effect is not None or arm not in self.measured:
                self.measured[arm] = comparison


def _together(promising: Sequence[Arm]) -> list[Arm]:
    """Every set of two or more of the settings, the largest first, up to so many."""
    sets = (
        chosen for size in range(len(promising), 1, -1) for chosen in itertools.combinations(promising, size)
    )
    chosen_words = [sum((arm.overrides for arm in chosen), ()) for chosen in sets]
    return [Arm(_named(words), words) for words in chosen_words[:MOST_TOGETHER]]


def _named(words: Words) -> str:
    return " ".join(words)


def dimensions(
    config: Config, resolved: Resolved, machine: ThisMachine, *, compiles: bool
) -> dict[str, list[Words]]:
    """What can be set in a run, each in other ways than the run has, by overrides that this machine can run.

    Args:
        resolved: what `auto` became in it.
        compiles: try compiling, which takes long to begin.
    """
    found = {
        "precision": list(_precisions(config, machine)),
        "matrix products": _matmul(config),
        "layout": _other("rewrites.channels_last", resolved.channels_last),
        "optimizer step": _fused(config, resolved),
        "threads": list(_threads(resolved)),
        "loader": list(_loaders(resolved)),
        "checkpointing": [("checkpointing=none",)] if resolved.checkpointed else [],
        "compile": list(_compilations(config, machine)) if compiles else [],
    }
    return {name: settings for name, settings in found.items() if settings}


def _precisions(config: Config, machine: ThisMachine) -> Iterator[Words]:
    chosen = config.precision.mode
    if chosen != "fp32":
        yield ("precision=fp32",)
    if chosen == "fp32" and machine.lacks("half") is None:
        yield ("precision=amp",)
    if chosen != "tf32" and machine.lacks("nvidia_tf32") is None:
        yield ("precision=tf32",)


def _matmul(config: Config) -> list[Words]:
    if config.precision.mode != "fp32" or config.precision.matmul_precision != "highest":
        return []
    return [("precision.matmul_precision=auto",)]


def _fused(config: Config, resolved: Resolved) -> list[Words]:
    if "fused" not in config.optimizer.target.kwargs:
        return []
    return _other("optimizer.fused", resolved.optimizer == "fused")


def _threads(resolved: Resolved) -> Iterator[Words]:
    if resolved.device != "cpu":
        return
    most = max(1, usable_cores() // max(1, resolved.num_ranks))
    for count in sorted({1, max(1, most // 2), most} - {resolved.threads}):
        yield (f"backend.threads={count}",)


def _loaders(resolved: Resolved) -> Iterator[Words]:
    kind, spare = resolved.dataloader, spare_cores()
    if kind == "packed":
        return
    if kind != "memory":
        yield ("dataloader=memory",)
    if kind != "device" and resolved.device == "cuda":
        yield ("dataloader=device",)
    if kind != "plain" or resolved.read_ahead:
        yield ("dataloader=plain", "dataloader.read_ahead=false")
    if spare > 1 and resolved.device == "cpu" and not resolved.read_ahead and kind in ("plain", "memory"):
        yield (f"dataloader={kind}", "dataloader.read_ahead=true")
    for count in sorted({1, spare, 2 * spare}):
        if count <= MOST_WORKERS and (kind, resolved.workers) != ("workers", count):
            yield ("dataloader=workers", f"dataloader.workers={count}")


def _compilations(config: Config, machine: ThisMachine) -> Iterator[Words]:
    if machine.lacks("compiler") is None:
        for mode in ("blocks", "model"):
            if config.compile.mode != mode:
                yield (f"compile={mode}",)


def _other(key: str, chosen: bool | None) -> list[Words]:
    """The other of two settings; none where there is no choice."""
    return [] if chosen is None else [(f"{key}={str(not chosen).lower()}",)]
