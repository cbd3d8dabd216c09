"""An ablation: try each switch alone, vary all in one designed experiment, and confirm the best config."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache

from ptfast.config.catalogue import CATALOGUE
from ptfast.config.overrides import merge
from ptfast.config.read import read_config
from ptfast.core.errors import PtfastError, ReportedError
from ptfast.core.sections.section import Technique
from ptfast.measure.experiment.laboratory import NOT_REACHED, Comparison, Laboratory, TrialResult
from ptfast.measure.experiment.plan import (
    Block,
    Factor,
    Fit,
    Run,
    blocks_to_tell_apart,
    columns,
    draw_blocks,
    fit,
    separable,
)
from ptfast.measure.experiment.trial import WARM_S, WARM_STEPS
from ptfast.measure.experiment.verdicts import Effect, judge
from ptfast.measure.experiment.warm_parent import LEAST_TURNS, Request
from ptfast.measure.worth import Confirmation, Worth
from ptfast.report.terminal.display import terminal_display

PLAIN = ("preset=plain",)
CONFIRM, APART = 0.3, 0.3
"""Shares of the time left after the first trials: for the confirmation; at most, for separate techniques."""
POOR_FIT = 2.0
"""The plan fits poorly if its error is this many times the difference between processes of one config."""
GAIN = 0.005
"""Smallest expected gain for which a switch is selected."""
LEAST_BLOCKS = 3
NOTHING = "it changes nothing here"
REJECTED = "it cannot be combined with the selected config"
SEED = 0


class Ablation:
    """Measures techniques within the budget of a laboratory, and reports progress on the terminal."""

    def __init__(self, laboratory: Laboratory, arguments: Sequence[str]) -> None:
        self.laboratory, self.arguments = laboratory, list(arguments)
        self.findings: list[Worth] = []
        self.apart: list[Worth] = []
        self.process_sd: float | None = None
        """The typical difference between two processes of one config, as a fraction."""
        self.factors: list[Factor] = []
        self.blocks: list[Block] = []
        self.fitted = Fit([], [], math.inf, 1)
        self.selected: list[Technique] = []
        self.confirmed: Confirmation | None = None
        self._on_top = Comparison([], {})
        """The techniques outside the plan, each on top of the selected config."""
        self.plain: TrialResult | None = None
        self._is_given: Callable[[Technique], bool]
        """Returns whether the given config uses a technique."""
        self._try_s = self._missing_s = 0.0
        """Seconds to build a trial and train its first steps; seconds of budget that the plan lacks."""
        self.not_reached = NOT_REACHED
        """The reason to show for techniques that were not measured within the budget."""
        self._members: list[list[Worth]] = []
        """The techniques of each factor, starting with level 1."""

    def begin(self) -> TrialResult:
        """Build plain and the given config, one trial each; raise their errors as the user's run would."""
        configs = [self._words([]), self.arguments]
        for words in configs:
            read_config(words)
        found = self.laboratory.try_configs(configs)
        start_s = self.laboratory.left_s
        self.laboratory.try_configs(configs[:1])
        self._try_s = start_s - self.laboratory.left_s
        for each in found:
            each.raise_failure()
        self.plain = found[0]
        tree = _tree(self.arguments)
        self._is_given = cache(lambda technique: _tree_or_none(merge(self.arguments, technique.on)) == tree)
        step_s, turn_s = (self.plain.facts.get(name, 0.0) for name in ("step_s", "least_turn_s"))
        warm_s = min(Request.warm_s, max(WARM_S, WARM_STEPS * step_s))
        timed_s = max(self.laboratory.timed_s, LEAST_TURNS * turn_s)
        self.laboratory.block_s = 4 * (self._try_s + warm_s + timed_s)
        return self.plain

    def try_each(self, techniques: Sequence[Technique]) -> None:
        """Build plain with each technique alone; techniques that work and change something become factors."""
        self.findings = [Worth(technique) for technique in techniques]
        plain = _tree(self._words([]))
        for finding in self.findings:
            try:
                if _tree(self._words([finding.technique])) == plain:
                    finding.why = NOTHING
            except PtfastError as error:
                finding.why = str(error.what)
            # Other switches act differently with reduced precision: keep it apart if it cannot be selected.
            is_reduced = finding.technique.kind == "reduced" and not self._is_allowed(finding.technique)
            finding.is_apart = not finding.why and (finding.is_outside or is_reduced)
        # Candidates for selection come first, because the budget may not reach all. Blocks with workers take
        # long, because each turn first uses up prefetched batches.
        self.apart = [finding for finding in self.findings if finding.is_apart]
        self.apart.sort(
            key=lambda each: (each.technique.kind in ("training", "reduced"), each.starts_workers)
        )
        waiting = [finding for finding in self.findings if not finding.why and not finding.is_apart]
        for start in range(0, len(waiting), 4):
            chunk = waiting[start : start + 4]
            places = f"{start + 1} to {start + len(chunk)} of {len(waiting)}"
            with self._status(f"trying switches {places}, each alone"):
                found = self.laboratory.try_configs([self._words([finding.technique]) for finding in chunk])
            for finding, measured in zip(chunk, found, strict=True):
                finding.note(measured, self.plain)
        groups: dict[str, list[Worth]] = {}
        for finding in waiting:
            if not finding.why:
                name = finding.technique.alternatives or finding.technique.name
                groups.setdefault(name, []).append(finding)
        self._members = list(groups.values())
        for name, members in groups.items():
            self.factors.append(Factor(name, ("plain", *(each.technique.name for each in members))))

    def needed_s(self, techniques: Sequence[Technique]) -> float:
        """Return the seconds to try the techniques of the plan, and to measure the fewest blocks."""
        num_tried = sum(not Worth(technique).is_outside for technique in techniques)
        return num_tried * self._try_s + 2 * LEAST_BLOCKS * self.laboratory.block_s

    def run(self) -> None:
        """Measure the plan, the techniques outside it and the selected config within the budget."""
        start_s = self.laboratory.left_s
        apart_s = min(APART * start_s, 2 * self._apart_s)
        self._measure_plan(CONFIRM * start_s + apart_s)
        self._measure_apart(start_s)
        self._confirm()
        self._judge()
        for finding in self.apart:
            finding.why = finding.why or (NOT_REACHED if finding.effect is None else "")
        for finding in self.findings:
            if finding.why == NOT_REACHED:
                finding.why = self.not_reached

    @property
    def measured(self) -> list[tuple[Worth, Effect]]:
        """Return the measured techniques, the fastest first."""
        found = [(each, each.effect) for each in self.findings if each.effect is not None and not each.why]
        return sorted(found, key=lambda pair: -pair[1].log_ratio)

    def _measure_plan(self, reserve_s: float) -> None:
        """Measure blocks until `reserve_s` are left, or longer if separating all effects needs more."""
        if not self.factors:
            return
        laboratory, once_s = self.laboratory, self._apart_s
        num_affordable = (laboratory.left_s - once_s) / laboratory.block_s - LEAST_BLOCKS
        self._missing_s = (blocks_to_tell_apart(self.factors) - num_affordable) * laboratory.block_s
        self.factors = separable(self.factors, num_affordable)
        for finding in itertools.chain(*self._members[len(self.factors) :]):
            finding.why = NOT_REACHED
        self._members = self._members[: len(self.factors)]
        enough = blocks_to_tell_apart(self.factors)

        def words_of(run: Run) -> list[str]:
            levels = zip(self._members, run, strict=True)
            return self._words([members[level - 1].technique for members, level in levels if level])

        is_allowed = cache(lambda run: _tree_or_none(words_of(run)) is not None)
        for block in draw_blocks(self.factors, SEED, is_allowed):
            # Always leave time for the shortest confirmation and one measurement of each separate technique.
            least_s = LEAST_BLOCKS * laboratory.block_s + once_s
            if len(self.blocks) >= enough:
                least_s = reserve_s
            if len(self.blocks) >= LEAST_BLOCKS and laboratory.left_s - laboratory.block_s < least_s:
                break
            with self._status(f"measuring the plan: block {len(self.blocks) + 1}"):
                laboratory.measure([words_of(run) for run in block])
            self.blocks.append(block)
        self.estimate()

    def estimate(self) -> None:
        """Estimate the effects and expected gains of all switches, and select a config."""
        runs = self.laboratory.blocks[: len(self.blocks)]
        self.fitted = fitted = fit(self.factors, self.blocks, [[run.time for run in found] for found in runs])
        peaks = [[each.facts.get("peak_memory_bytes", math.nan) for each in found] for found in runs]
        memory = fit(self.factors, self.blocks, peaks)
        for place, (factor, level) in enumerate(columns(self.factors)):
            finding = self._members[factor][level - 1]
            finding.effect, finding.expected = fitted.effects[place], fitted.shrunk[place]
            if finding.effect is None:
                finding.why = "no combination with it could be run"
            if (change := memory.effects[place]) is not None:
                finding.memory_bytes = -change.log_ratio
        chosen = map(self._choose, self._members)
        self.selected = [finding.technique for finding in chosen if finding is not None]
        self._judge()

    def _measure_apart(self, start_s: float) -> None:
        """Measure techniques outside the plan on top of the selected config; select the best clear gain."""
        for finding in self.apart:
            if _tree_or_none(self._words([*self.selected, finding.technique])) is None:
                finding.why = REJECTED
        waiting = {each.technique.name: each for each in self.apart if not each.why}
        others = {name: self._words([*self.selected, each.technique]) for name, each in waiting.items()}
        self._on_top = comparison = Comparison(self._words(self.selected), others)
        once_s, kept_s = self._apart_s, LEAST_BLOCKS * self.laboratory.block_s
        with self._status(f"measuring {len(waiting)} techniques on top of the best"):
            # Only the first round may use time reserved for the confirmation.
            once = math.ceil(len(waiting) / 3)
            comparison.measure(self.laboratory, least=0, most=once, keep_s=kept_s)
            comparison.measure(self.laboratory, least=0, keep_s=max(kept_s, CONFIRM * start_s))
        for block in comparison.blocks:
            for name, run in block:
                if name in waiting:
                    waiting[name].note(run, block[0][1])
        more_s = max((once_s + kept_s) / (CONFIRM + APART) - start_s, 10.0)
        needed_s = self.laboratory.budget_s + max(self._missing_s, 0.0) + more_s
        self.not_reached = f"not reached: give --budget {10 * math.ceil(needed_s / 10)}s"
        for name, finding in waiting.items():
            finding.why = finding.why or comparison.why(name)
        self._judge()
        gains = [
            (each, effect)
            for each, effect in self.measured
            if each.is_apart and effect.interval()[0] > 1 and self._is_allowed(each.technique)
        ]
        if gains:
            best, effect = max(gains, key=lambda gain: gain[1].interval()[0])
            group = best.technique.alternatives
            kept = [each for each in self.selected if group is None or each.alternatives != group]
            self.selected = [*kept, best.technique]
            best.expected = effect.log_ratio

    def _confirm(self) -> None:
        """Run the selected config again in fresh processes, against plain and the config as given."""
        others = {"plain": self._words([]), "given": self.arguments}
        comparison = Comparison(self._words(self.selected), others)
        with self._status("confirming the selected config"), contextlib.suppress(ReportedError):
            comparison.measure(self.laboratory, least=LEAST_BLOCKS)
        effects, fitted = comparison.effects()
        if effects.keys() == others.keys():
            self.confirmed = Confirmation(-effects["plain"], -effects["given"], fitted.residual_sd)

    def _judge(self) -> None:
        """Compute all verdicts, given the spread between processes of one config."""
        # If the plan fits poorly, take the spread from the confirmation.
        sd, dof = self.fitted.residual_sd, self.fitted.dof
        if self.confirmed is not None and (self.fits_poorly or not math.isfinite(sd)):
            sd, dof = self.confirmed.process_sd, self.confirmed.over_plain.dof
        self.process_sd = math.sqrt(2) * sd if math.isfinite(sd) else None
        effects, _ = self._on_top.effects()
        for finding in self.apart if self.process_sd is not None else ():
            if (effect := effects.get(finding.technique.name)) is not None:
                num_runs = len(self._on_top.runs(finding.technique.name))
                finding.effect = Effect(effect.log_ratio, sd * math.sqrt(2 / num_runs), dof)
        verdicts = judge([finding.effect for finding in self.findings])
        for finding, verdict in zip(self.findings, verdicts, strict=True):
            finding.verdict = "not applicable" if finding.why else verdict

    @property
    def predicted(self) -> float:
        """The predicted speed-up of the selected config over plain."""
        return math.exp(sum(f.expected for f in self.findings if f.technique in self.selected))

    @property
    def best_words(self) -> list[str]:
        """Return the overrides that select the best config; empty if the given config is faster."""
        is_selected = self.confirmed is not None and self.confirmed.over_given.log_ratio >= 0
        return _switched_on(self.selected) if is_selected and self.selected else []

    @property
    def fits_poorly(self) -> bool:
        """Return True if switches interact more than expected by chance."""
        if self.confirmed is None or self.confirmed.over_plain.dof <= 1:
            return False
        residual_sd = self.fitted.residual_sd
        return math.isfinite(residual_sd) and residual_sd > POOR_FIT * self.confirmed.process_sd

    def _choose(self, members: Sequence[Worth]) -> Worth | None:
        """Return the alternative that the given config uses, unless another one is clearly faster."""

        def expected(finding: Worth | None) -> float:
            return 0.0 if finding is None else finding.expected

        allowed = [each for each in members if self._is_allowed(each.technique)]
        given = next((each for each in allowed if self._is_given(each.technique)), None)
        best, gain = max([None, *allowed], key=expected), GAIN
        if given is not None and given.effect is not None:
            gain = math.log(given.effect.interval()[1] / given.effect.ratio)
        return best if expected(best) > expected(given) + gain else given

    def _is_allowed(self, technique: Technique) -> bool:
        """Return True if a technique may be in the best config."""
        if technique.kind in ("exact", "reordered"):
            return True
        # Reduced precision is allowed if the given config uses any; other techniques, if it uses them.
        reduced = [each for each in CATALOGUE if each.kind == "reduced" and each.on]
        return any(map(self._is_given, reduced if technique.kind == "reduced" else [technique]))

    @property
    def _apart_s(self) -> float:
        """Seconds to measure each technique outside the plan once, three in each block."""
        return math.ceil(sum(not each.why for each in self.apart) / 3) * self.laboratory.block_s

    def _status(self, text: str) -> AbstractContextManager[None]:
        return terminal_display().status(text, self.laboratory.left_s)

    def _words(self, techniques: Sequence[Technique]) -> list[str]:
        return merge(self.arguments, _switched_on(techniques))


def _switched_on(techniques: Sequence[Technique]) -> list[str]:
    """Return overrides that switch on exactly these techniques."""
    return merge(PLAIN, [word for technique in techniques for word in technique.on])


def _tree(words: Sequence[str]) -> dict[str, object]:
    composed, _ = read_config(words)
    return {**composed.tree, "preset": None}


def _tree_or_none(words: Sequence[str]) -> dict[str, object] | None:
    with contextlib.suppress(PtfastError):
        return _tree(words)
    return None
