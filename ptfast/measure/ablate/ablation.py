"""An ablation: every switch looked at alone, all of them in one designed experiment, the pick run again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ptfast.config.catalogue import CATALOGUE, Technique
from ptfast.config.overrides import merge
from ptfast.config.read import read_config
from ptfast.core.errors import EXIT_BUG, PtfastError, ReportedError
from ptfast.core.machine import usable_cores
from ptfast.measure.experiment.effects import Fit, fit
from ptfast.measure.experiment.laboratory import Laboratory, Measured
from ptfast.measure.experiment.plan import Block, Factor, Run, columns, draw_blocks
from ptfast.measure.trials.verdicts import Effect, Word, judge

PLAIN = ("preset=plain",)
CONFIRM, APART = 0.3, 0.15
"""Parts of the time after looking that confirm the pick, and that measure what stays out of the plan."""
GAIN = 0.005
"""A switch is picked if it is expected to gain this part."""
LEAST_BLOCKS = 3
OUTSIDE_FAMILIES = ("checkpointing", "compile", "parallel")
OUTSIDE_KEYS = ("dataloader=workers", "gradients.accumulate=", "optimizer=", "backend.threads=")
"""Families and words of techniques that stay out of the plan: they start processes, compile, or change what a
step is by so much that the others could not be told apart beside them."""
NOT_REACHED = "not reached"
NOTHING = "it changes nothing here"
SEED = 0


@dataclass
class Finding:
    """What was found of one technique.

    Args:
        effect: on the speed, with the others around it; None where it was not measured.
        expected: log ratio to expect, less what it owes to luck.
        why: why it was not measured.
        memory_bytes: change of the peak.
        loss_drift: change of the mean loss over the first steps, as a part.
        is_apart: measured beside the pick, not in the plan.
    """

    technique: Technique
    effect: Effect | None = None
    expected: float = 0.0
    verdict: Word = "cannot tell"
    why: str = ""
    memory_bytes: float | None = None
    loss_drift: float | None = None
    is_apart: bool = False

    def receipt(self) -> dict[str, Any]:
        """Its figures as plain values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("technique", "effect")}
        return {"technique": self.technique.name, **plain, "effect": _effect_receipt(self.effect)}


@dataclass
class Confirmed:
    """The pick, run again in fresh processes."""

    over_plain: Effect
    over_given: Effect
    same: list[float] = field(default_factory=list)
    """Log ratios of two processes of the pick, block by block."""

    def receipt(self) -> dict[str, Any]:
        """Its figures as plain values."""
        effects = {"over_plain": self.over_plain, "over_given": self.over_given}
        return {name: _effect_receipt(effect) for name, effect in effects.items()} | {"same": self.same}


class Ablation:
    """Measures techniques within the budget of a laboratory.

    Args:
        arguments: the user's words, which hold in every trial.
        on_stage: called with a line as something is done.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        arguments: Sequence[str],
        on_stage: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.laboratory, self.arguments, self._on_stage = laboratory, list(arguments), on_stage
        self.findings: list[Finding] = []
        self.factors: list[Factor] = []
        self.blocks: list[Block] = []
        self.times: list[list[float]] = []
        self.fitted: Fit | None = None
        self.picked: list[Technique] = []
        self.confirmed: Confirmed | None = None
        self.plain: Measured | None = None
        self.look_s = 0.0
        """Seconds to build a trial and to train its first steps."""
        self._members: list[list[Finding]] = []
        """The techniques of each factor, those of level 1 first."""
        self._allowed: dict[Run, bool] = {}

    def begin(self) -> Measured:
        """Build plain and the config as given, as one trial each, whose errors are the user's.

        Raises:
            PtfastError, ReportedError: whatever stops them in their first steps.
        """
        for words in (self._words([]), self.arguments):
            read_config(words)
        plain, given = self.laboratory.look([self._words([]), self.arguments])
        start_s = self.laboratory.left_s
        self.laboratory.look([self._words([])])
        self.look_s = start_s - self.laboratory.left_s
        for each in (plain, given):
            if each.why:
                raise ReportedError(f"ptfast: {each.why}", EXIT_BUG)
        self.plain = plain
        return plain

    def look(self, techniques: Sequence[Technique]) -> None:
        """Build each technique alone over plain, and sort out what fails or changes nothing."""
        self.findings = [Finding(technique) for technique in techniques]
        plain = _tree(self._words([]))
        waiting = []
        for finding in self.findings:
            try:
                if _tree(self._words([finding.technique])) == plain:
                    finding.why = NOTHING
            except PtfastError as error:
                finding.why = str(error.what)
            if not finding.why:
                waiting.append(finding)
        for start in range(0, len(waiting), 4):
            chunk = waiting[start : start + 4]
            found = self.laboratory.look([self._words([finding.technique]) for finding in chunk])
            for finding, measured in zip(chunk, found, strict=True):
                self._note_look(finding, measured)
            self._on_stage(f"looked at {min(start + 4, len(waiting))} of {len(waiting)} switches alone")
        for finding in self.findings:
            finding.is_apart = not finding.why and _is_outside(finding.technique)
        self._group()

    def needed_s(self, num_techniques: int) -> float:
        """Seconds for looking at so many techniques, and for the fewest blocks after that."""
        block_s = 4 * (self.look_s + self.laboratory.turn_s * self.laboratory.passes)
        return num_techniques * self.look_s + 2 * LEAST_BLOCKS * block_s

    def run(self) -> None:
        """Measure the plan, what stays out of it, and the pick again, as far as the budget goes."""
        start_s = self.laboratory.left_s
        self.measure_plan((CONFIRM + (APART if self.apart else 0.0)) * start_s)
        self.measure_apart(CONFIRM * start_s)
        self.confirm()

    def conclude(self) -> None:
        """Estimate what there is, after an interruption."""
        if self.blocks and self.fitted is None:
            self._estimate()

    def receipt(self) -> dict[str, Any]:
        """Every run, its figures and how far it is trusted, as plain values."""
        fitted, confirmed, laboratory = self.fitted, self.confirmed, self.laboratory
        weights = iter(fitted.weights if fitted is not None else ())
        environment = (self.plain.facts if self.plain else {}).get("environment", {})
        return {
            "environment": environment | {"usable_cores": usable_cores()},
            "budget_s": laboratory.budget_s,
            "took_s": laboratory.budget_s - laboratory.left_s,
            "turn_s": laboratory.turn_s,
            "passes": laboratory.passes,
            "seed": SEED,
            "factors": [asdict(factor) for factor in self.factors],
            "plan": [[list(run) for run in block] for block in self.blocks],
            "weights": list(weights),
            "process_sd": self.process_sd,
            "findings": [finding.receipt() for finding in self.findings],
            "pick": [technique.name for technique in self.picked],
            "predicted_speedup": self.predicted,
            "confirmed": None if confirmed is None else confirmed.receipt(),
            "best": self.pick_words if self.best_is_pick else [],
            "blocks": [[measured.receipt() for measured in block] for block in laboratory.blocks],
        }

    @property
    def apart(self) -> list[Finding]:
        """What is measured beside the pick."""
        return [finding for finding in self.findings if finding.is_apart]

    def measure_plan(self, reserve_s: float) -> None:
        """Measure blocks of the plan until `reserve_s` are left, and estimate every effect."""
        if not self.factors:
            return
        for block in draw_blocks(self.factors, SEED, is_allowed=self._is_allowed):
            if (
                self.laboratory.left_s - self.laboratory.block_s < reserve_s
                and len(self.blocks) >= LEAST_BLOCKS
            ):
                break
            found = self.laboratory.measure([self._words(self._techniques(run)) for run in block])
            self.blocks.append(block)
            self.times.append([math.nan if each.time is None else each.time for each in found])
            memory = [each.facts.get("peak_memory_bytes", math.nan) for each in found]
            self._memory.append([float(value) for value in memory])
            self._on_stage(
                f"block {len(self.blocks)}: {4 * len(self.blocks)} runs of {len(self.factors)} factors"
            )
        self._estimate()

    def measure_apart(self, reserve_s: float) -> None:
        """Measure each technique outside the plan in a block with the pick; pick it if it is a clear gain."""
        for finding in self.apart:
            if self.laboratory.left_s - 1.5 * self.laboratory.block_s < reserve_s:
                finding.why = NOT_REACHED
                continue
            base, other = self._words(self.picked), self._words([*self.picked, finding.technique])
            try:
                read_config(other)
            except PtfastError as error:
                finding.why = str(error.what)
                continue
            found = self.laboratory.measure([base, other, other, base])
            finding.effect = self._paired(found)
            if finding.effect is None:
                finding.why = next((each.why for each in found if each.why), "it gave no time")
            elif finding.effect.interval()[0] > 1 and self.is_allowed(finding.technique):
                self.picked.append(finding.technique)
            self._on_stage(f"{finding.technique.name} beside the pick")
        self._judge()

    def confirm(self) -> None:
        """Run the pick again in fresh processes, against plain and the config as given."""
        factor = Factor("config", ("plain", "given", "pick"))
        pick = self._words(self.picked)
        words = {0: self._words([]), 1: self.arguments, 2: pick}
        blocks: list[Block] = []
        times: list[list[float]] = []
        same: list[float] = []
        order = (2, 0, 1, 2)
        while len(blocks) < LEAST_BLOCKS or self.laboratory.left_s > self.laboratory.block_s:
            found = self.laboratory.measure([words[level] for level in order])
            blocks.append(((order[0],), (order[1],), (order[2],), (order[3],)))
            values = [math.nan if each.time is None else each.time for each in found]
            times.append(values)
            mine = [value for value, level in zip(values, order, strict=True) if level == 2]
            same.append(mine[0] - mine[1])
            order = (order[1], order[2], order[3], order[0])
            self._on_stage(f"confirming: block {len(blocks)}")
            if not all(math.isfinite(value) for value in values) and len(blocks) >= LEAST_BLOCKS:
                break
        fitted = fit([factor], blocks, times, spare_dof=2)
        given, picked = fitted.effects
        if given is None or picked is None:
            return
        over_given = Effect(picked.log_ratio - given.log_ratio, picked.se, picked.dof)
        self.confirmed = Confirmed(picked, over_given, [value for value in same if math.isfinite(value)])

    @property
    def promised(self) -> float | None:
        """The speed-up over plain that the pick was confirmed at; None where it was not."""
        return self.confirmed.over_plain.ratio if self.confirmed is not None else None

    @property
    def predicted(self) -> float:
        """The speed-up over plain that the plan predicts of the pick."""
        return math.exp(sum(f.expected for f in self.findings if f.technique in self.picked))

    @property
    def best_is_pick(self) -> bool:
        """Return True if the pick is not slower than the config as given."""
        return self.confirmed is not None and self.confirmed.over_given.log_ratio >= 0 and bool(self.picked)

    @property
    def pick_words(self) -> list[str]:
        """Overrides of the pick over the user's words."""
        words: list[str] = [*PLAIN]
        for technique in self.picked:
            words = merge(words, technique.on)
        return words

    @property
    def process_sd(self) -> float | None:
        """By how much two processes of one config differ, as a part."""
        return math.sqrt(2) * self.fitted.residual_sd if self.fitted is not None else None

    def is_allowed(self, technique: Technique) -> bool:
        """Return True if a technique may be in the best config without being asked for.

        What leaves the result as it is may, up to rounding. Lower precision may where the config as given has
        some, and what changes the training where that very thing is on there.
        """
        if technique.kind in ("exact", "reordered"):
            return True
        reduced = [each for each in CATALOGUE if each.kind == "reduced" and each.on]
        kin = reduced if technique.kind == "reduced" else [technique]
        given = _tree(self.arguments)
        return any(_tree_or_none(merge(self.arguments, each.on)) == given for each in kin)

    def _note_look(self, finding: Finding, measured: Measured) -> None:
        finding.why = measured.why
        loss, plain = measured.facts.get("loss"), self.plain and self.plain.facts.get("loss")
        if loss is None or not plain:
            return
        finding.loss_drift = loss / plain - 1
        if not math.isfinite(loss):
            finding.why = "it diverges"

    def _group(self) -> None:
        """The factors of the plan: a switch each, or the alternatives of a group."""
        self._members, self._memory = [], list[list[float]]()
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            if finding.why or finding.is_apart:
                continue
            name = finding.technique.alternatives or finding.technique.name
            groups.setdefault(name, []).append(finding)
        self._members = list(groups.values())
        self.factors = [
            Factor(name, ("plain", *(finding.technique.name for finding in members)))
            for name, members in groups.items()
        ]

    def _techniques(self, run: Run) -> list[Technique]:
        return [
            members[level - 1].technique for members, level in zip(self._members, run, strict=True) if level
        ]

    def _is_allowed(self, run: Run) -> bool:
        """Return True if a combination makes a config that is valid."""
        if run not in self._allowed:
            self._allowed[run] = _tree_or_none(self._words(self._techniques(run))) is not None
        return self._allowed[run]

    def _words(self, techniques: Sequence[Technique]) -> list[str]:
        words = merge(self.arguments, PLAIN)
        for technique in techniques:
            words = merge(words, technique.on)
        return words

    def _estimate(self) -> None:
        """Effects, what to expect of each, and the pick."""
        self.fitted = fitted = fit(self.factors, self.blocks, self.times)
        memory = fit(self.factors, self.blocks, self._memory)
        for place, (factor, level) in enumerate(columns(self.factors)):
            finding = self._members[factor][level - 1]
            finding.effect, finding.expected = fitted.effects[place], fitted.shrunk[place]
            if finding.effect is None:
                finding.why = "no combination with it could be run"
            if (change := memory.effects[place]) is not None:
                finding.memory_bytes = -change.log_ratio
        for members in self._members:
            best = max(members, key=lambda finding: finding.expected)
            if best.expected > GAIN and self.is_allowed(best.technique):
                self.picked.append(best.technique)
        self._judge()

    def _paired(self, found: Sequence[Measured]) -> Effect | None:
        """The effect of the second and third trial of a block over the first and last."""
        times = [each.time for each in found]
        if any(time is None for time in times):
            return None
        first, second, third, last = (float(time or 0.0) for time in times)
        difference = (first + last - second - third) / 2
        if self.fitted is not None:
            known = next(effect for effect in self.fitted.effects if effect is not None)
            return Effect(difference, self.fitted.residual_sd, known.dof)
        spread = statistics.pstdev([first - last, second - third]) or abs(first - last)
        return Effect(difference, max(spread, 1e-6), 1)

    def _judge(self) -> None:
        words = judge([finding.effect for finding in self.findings])
        for finding, word in zip(self.findings, words, strict=True):
            finding.verdict = "not applicable" if finding.why else word


def _effect_receipt(effect: Effect | None) -> dict[str, Any] | None:
    return (
        None if effect is None else {**asdict(effect), "ratio": effect.ratio, "interval": effect.interval()}
    )


def _is_outside(technique: Technique) -> bool:
    if technique.family in OUTSIDE_FAMILIES or "compiler" in technique.needs:
        return True
    return any(word.startswith(OUTSIDE_KEYS) for word in technique.on)


def _tree(words: Sequence[str]) -> dict[str, object]:
    composed, _ = read_config(words)
    return {**composed.tree, "preset": None}


def _tree_or_none(words: Sequence[str]) -> dict[str, object] | None:
    try:
        return _tree(words)
    except PtfastError:
        return None
