"""A session of paired trials: variants in processes of their own, measured in turns within a budget."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ptfast.config.files.frozen import redact
from ptfast.core import run_directory
from ptfast.core.devices import cpu_facts
from ptfast.core.errors import ConfigError, MachineError, PtfastError
from ptfast.core.machine import usable_cores
from ptfast.core.units import duration
from ptfast.measure.trials.arm_pool import OUT_OF_MEMORY, ArmPool
from ptfast.measure.trials.comparison import ORDER, Arm, Comparison
from ptfast.measure.trials.memory_guard import LESS_MEMORY
from ptfast.measure.trials.trial_process import reason
from ptfast.measure.trials.verdicts import LEAST_ROUNDS, ProcessSpread, judge

RECEIPT = "measure.json"
STRETCH_S, STRETCHES = 0.5, 100
"""Seconds of a stretch, or less where the budget would not have so many of them."""
MOST_ROUNDS, MOST_PAIRS = 40, 4
"""Rounds of two processes, and pairs of processes that a comparison in new ones may take."""
AA_SHARE = 0.4
"""Part of what is left of the budget after starting up that the A/A run may take."""
AA_ROUNDS = 8


class Session:
    """Measures variants of a config against each other, and keeps the raw figures.

    Every variant has a process of its own, which stays alive between rounds. A round trains the base, the
    other, the other and the base again, each for a stretch of about `stretch_s`; variants that process the
    same batches train as many steps. A comparison ends once its verdict is clear, or its time is up.

    Args:
        arguments: the user's words, over which those of an arm are laid.
        budget_s: seconds from now on.
        folder: for the files of the processes.
        stretch_s: seconds of a stretch, which is a step at least; by the budget if not given.
        on_round: called after each round of a comparison.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        budget_s: float,
        folder: Path,
        stretch_s: float | None = None,
        on_round: Callable[[Comparison], None] = lambda _: None,
    ) -> None:
        self.budget_s, self.stretch_s = budget_s, stretch_s or min(STRETCH_S, budget_s / STRETCHES)
        self.spread = ProcessSpread()
        self.aa: Comparison | None = None
        self.comparisons: list[Comparison] = []
        """The family whose verdicts are controlled together."""
        self.least_s = 0.0
        """Seconds that a comparison takes at least, starting a process included."""
        self.pool = ArmPool(list(arguments), folder)
        self.on_round, self._start_s = on_round, time.monotonic()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - self._elapsed_s

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def calibrate(self, base: Arm, *others: Arm) -> Comparison:
        """Measure two processes of one arm against each other: the noise that every verdict has to exceed.

        Args:
            others: that are compared first, and started together with it: a small budget is mostly starting.

        Raises:
            ConfigError: C005 where the budget is too small for anything after that.
            PtfastError, ReportedError: whatever stops the run in its first steps.
        """
        twin = Arm(f"{base.name} again", base.overrides, copy=1)
        self.aa = comparison = Comparison(base, twin)
        self.prepare(base, twin, *others)
        self._raise_if_lost(twin)
        start_s = self._elapsed_s
        self._measure(comparison, self.left_s * AA_SHARE, AA_ROUNDS)
        self._raise_if_lost(twin)
        rounds_s = (self._elapsed_s - start_s) / max(len(comparison.rounds), 1) * LEAST_ROUNDS
        self.least_s = start_s + rounds_s
        effect = comparison.process_effect
        if effect is None or self.left_s < (rounds_s if others else self.least_s):
            what = f"too little: starting takes {duration(start_s)}, and a comparison {duration(rounds_s)}"
            hint = f"Give {math.ceil(2 * start_s + 2 * rounds_s / AA_SHARE)}s or more"
            raise ConfigError("C005", what, key="--budget", value=f"{self.budget_s:g}s", suggestion=hint)
        self.spread = ProcessSpread((effect,))
        self.pool.end(twin)
        return comparison

    def describe_floor(self) -> list[str]:
        """What the A/A run showed, and the smallest effect that a comparison as long as it can see."""
        assert self.aa is not None
        effect = self.aa.process_effect
        assert effect is not None
        low, high = effect.interval()
        sd, count = statistics.stdev(self.aa.log_ratios()), len(self.aa.rounds)
        smallest = [
            f"{self.spread.smallest_effect(sd, rounds):.1%} in {rounds} rounds"
            for rounds in (count, 3 * count)
        ]
        lines = [
            f"A/A: two processes of {self.aa.base.name}: {effect.ratio:.3f}x [{low:.3f}-{high:.3f}]",
            f"smallest effect that can be seen: {', '.join(smallest)}",
        ]
        if disturbed := self.aa.disturbed():
            lines.append(
                f"interference in {len(disturbed)} of {count} rounds: {next(iter(disturbed.values()))}"
            )
        return lines

    def prepare(self, base: Arm, *arms: Arm) -> None:
        """Start the processes of arms that are about to be compared: together, as starting takes seconds.

        Raises:
            PtfastError, ReportedError: what stops the base.
        """
        self.pool.prepare(base, *arms)
        self._raise_if_lost(base)

    def compare(
        self, base: Arm, other: Arm, *, seconds: float | None = None, fresh: bool = False
    ) -> Comparison:
        """Measure `other` against `base`.

        What `other` cannot do here makes it `not applicable`, with the reason.

        Args:
            seconds: that this may take, starting up included; all that is left if not given.
            fresh: in new processes, in as many pairs of them as there is time for, up to `MOST_PAIRS`.

        Raises:
            PtfastError, ReportedError: what stops the base.
        """
        end_s = self._elapsed_s + min(seconds or math.inf, self.left_s)
        if fresh:
            self.pool.end(base, other)
        comparison = Comparison(base, other, self.spread)
        self.comparisons.append(comparison)
        if base.copy == other.copy and self.is_same(base, other):
            comparison.why = "changes nothing in this config"
        else:
            self.prepare(base, other)
            self._measure(comparison, end_s - self._elapsed_s, MOST_ROUNDS)
            while fresh and len(comparison.starts) < MOST_PAIRS and self._repeat(comparison, end_s):
                pass
        self._conclude(comparison)
        return comparison

    def confirm(self, comparison: Comparison, *, seconds: float) -> bool:
        """Add a further pair of processes to a comparison; return False where there was no time for them.

        What looks like a gain may be where the memory of one process lies. An arm that cannot be started
        again makes the comparison `not applicable`.

        Raises:
            PtfastError, ReportedError: what stops the base.
        """
        repeated = self._repeat(comparison, self._elapsed_s + min(seconds, self.left_s))
        self._conclude(comparison)
        return repeated

    def is_same(self, base: Arm, other: Arm) -> bool:
        """Return True if two arms mean the same config."""
        try:
            trees = [self.pool.config(arm)[0].tree for arm in (base, other)]
        except PtfastError:
            return False
        return {**trees[0], "preset": None} == {**trees[1], "preset": None}

    def write_receipt(self, path: Path, command: Sequence[str], **facts: Any) -> None:
        """Write raw figures, machine, versions, verdicts and the command to repeat it, whole or not at all.

        Args:
            facts: further entries.
        """
        run_directory.write_json(path, {"command": redact(command), **facts, **self.receipt()})

    def receipt(self) -> dict[str, Any]:
        """Raw figures, machine, versions and verdicts as plain values."""
        return {
            "environment": self._environment(),
            "budget_s": self.budget_s,
            "took_s": self._elapsed_s,
            "stretch_s": self.stretch_s,
            "aa": self.aa and self.aa.receipt(),
            "comparisons": [comparison.receipt() for comparison in self.comparisons],
        }

    def _raise_if_lost(self, arm: Arm) -> None:
        error = self.pool.lost.get(arm)
        if isinstance(error, MachineError) and error.what.startswith(OUT_OF_MEMORY):
            size = self.pool.config(arm)[1].batch_size
            raise MachineError(
                error.code, error.what, key="batch_size", value=size, suggestion=LESS_MEMORY
            ) from error
        if error:
            raise error

    def _measure(self, comparison: Comparison, seconds: float, most_rounds: int) -> None:
        """Add rounds until the verdict is clear, or the time or the rounds are used up."""
        arms, end_s = (comparison.base, comparison.other), self._elapsed_s + seconds
        comparison.warm = tuple(self.pool.warm[arm] for arm in arms)
        if any(arm in self.pool.lost for arm in arms):
            return
        num_steps, round_s = self._num_steps(arms), 0.0
        most_rounds += len(comparison.rounds)
        while len(comparison.rounds) < most_rounds and self._elapsed_s + round_s < end_s:
            start_s = self._elapsed_s
            stretches: list[dict[str, Any]] = []
            for arm in ORDER:
                figures = self.pool.train(arms[arm], num_steps[arm])
                if figures is None:
                    return
                stretches.append({"arm": arm} | figures)
            comparison.rounds.append(stretches)
            round_s = self._elapsed_s - start_s
            self.on_round(comparison)
            if comparison is not self.aa and self._is_settled(comparison):
                return

    def _is_settled(self, comparison: Comparison) -> bool:
        """Return True if more rounds would hardly change what two processes show."""
        within, effect = comparison.process_effect, comparison.effect
        if within is None or effect is None:
            return False
        return effect.is_clear or self.spread.hides(within)

    def _repeat(self, comparison: Comparison, end_s: float) -> bool:
        """Measure in two new processes; return False where either is lost, or there is no time for them."""
        arms = (comparison.base, comparison.other)
        if any(arm in self.pool.lost for arm in arms) or self._elapsed_s + self.least_s > end_s:
            return False
        self.pool.end(*arms)
        self.prepare(*arms)
        comparison.starts.append(len(comparison.rounds))
        self._measure(comparison, end_s - self._elapsed_s, MOST_ROUNDS)
        return True

    def _conclude(self, comparison: Comparison) -> None:
        """Note what has ended one of the two, and judge the family anew."""
        if not comparison.why:
            self._raise_if_lost(comparison.base)
            if error := self.pool.lost.get(comparison.other):
                comparison.why = reason(error).removesuffix(".")
        self._judge()

    def _num_steps(self, arms: Sequence[Arm]) -> list[int]:
        """Steps of a stretch of each of two: as many where batches are as large, else for as many samples."""
        sizes = [self.pool.warm[arm]["batch_size"] for arm in arms]
        sample_s = [max(self.pool.step_s[arm], 1e-6) / size for arm, size in zip(arms, sizes, strict=True)]
        stretch_samples = self.stretch_s / math.sqrt(math.prod(sample_s))
        return [max(1, round(stretch_samples / size)) for size in sizes]

    def _judge(self) -> None:
        """The verdicts of the family, anew: each comparison that is added makes the others' bar higher."""
        measured = [comparison for comparison in self.comparisons if not comparison.why]
        words = judge([comparison.effect for comparison in measured])
        for comparison, word in zip(measured, words, strict=True):
            comparison.verdict = word
        for comparison in self.comparisons:
            if comparison.why:
                comparison.verdict = "not applicable"

    def _environment(self) -> dict[str, Any]:
        """Versions and device, as a process of the session saw them, and the cores of this machine."""
        found = next((warm["environment"] for warm in self.pool.warm.values() if "environment" in warm), {})
        # Two machines of one name may differ in their CPUs' instruction sets.
        flags = "".join(cpu_facts("flags", "Features")[:1])
        digest = hashlib.sha256(flags.encode()).hexdigest()[:16]
        return found | {"usable_cores": usable_cores(), "cpu_flags_sha256": digest}
