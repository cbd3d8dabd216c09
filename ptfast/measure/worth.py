"""What an ablation finds on one technique, and on the pick."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from ptfast.core.sections.section import Technique
from ptfast.measure.experiment.laboratory import TrialResult
from ptfast.measure.experiment.verdicts import Effect, Verdict

OUTSIDE_FAMILIES = ("checkpointing", "compile", "parallel")
OPTIMIZER = "optimizer="
WORKERS = "dataloader=workers"
OUTSIDE_KEYS = (WORKERS, "gradients.accumulate=", "backend.threads=", OPTIMIZER)
"""Techniques that stay out of the plan, as those that change the training do: they start processes, compile,
or change a step so much that other switches act differently beside them."""
PER_STEP = ("reduced", "training")
"""Classes whose faster steps need not reach the same loss sooner."""


@dataclass
class Worth:
    """The findings on one technique."""

    technique: Technique
    effect: Effect | None = None
    """On the speed, averaged over the other switches; None if it was not measured."""
    expected: float = 0.0
    """Expected log ratio, less what it owes to luck."""
    verdict: Verdict = "cannot tell"
    why: str = ""
    """Why it was not measured."""
    memory_bytes: float | None = None
    """Change of the peak."""
    loss_drift: float | None = None
    """Change of the mean loss over the first steps, as a part."""
    is_given: bool = False
    """The config as given has it on."""
    is_apart: bool = False
    """Measured beside the pick, not in the plan."""
    beside: list[float] = field(default_factory=list)
    """One value for each run beside the pick: the log ratio of speeds, or for an optimizer the log odds of
    its share of a step."""

    @property
    def verdict_text(self) -> str:
        """The verdict in words; techniques that change the result are only faster per step."""
        per_step = self.verdict == "faster" and self.technique.kind in PER_STEP
        return f"{self.verdict} per step" if per_step else self.verdict

    @property
    def is_outside(self) -> bool:
        """Whether it stays out of the plan."""
        technique = self.technique
        if technique.family in OUTSIDE_FAMILIES or technique.kind == "training":
            return True
        return "compiler" in technique.needs or any(word.startswith(OUTSIDE_KEYS) for word in technique.on)

    @property
    def starts_workers(self) -> bool:
        return any(word.startswith(WORKERS) for word in self.technique.on)

    @property
    def sets_optimizer(self) -> bool:
        return any(word.startswith(OPTIMIZER) for word in self.technique.on)

    def note(self, measured: TrialResult, base: TrialResult | None) -> None:
        """Note why a run with it failed, or by how much its first losses differ from those of `base`."""
        self.why = measured.why
        loss, of_base = measured.facts.get("loss"), base and base.facts.get("loss")
        if loss is not None and of_base:
            self.loss_drift = loss / of_base - 1
            if not math.isfinite(loss):
                self.why = "it diverges"


@dataclass
class Confirmation:
    """The pick, run again in fresh processes, whose logarithms of time deviate by `process_sd`."""

    over_plain: Effect
    over_given: Effect
    process_sd: float


def does_as(given: TrialResult | None, measured: TrialResult, plain: TrialResult | None) -> bool:
    """Return True if what a technique resolves to differs from plain and is so in the config as given."""
    of_given, own, of_plain = (
        each.facts.get("resolved", {}) if each else {} for each in (given, measured, plain)
    )
    changes = {name: value for name, value in own.items() if value != of_plain.get(name)}
    return bool(changes) and changes.items() <= of_given.items()


def optimizer_log_odds(measured: TrialResult) -> list[float]:
    """The log odds of the optimizer's share of a step in a run; empty where it is unknown."""
    shares = measured.facts.get("optimizers")
    if not shares:
        return []
    share = min(max(statistics.median(shares), 1e-4), 1 - 1e-4)
    return [math.log(share / (1 - share))]


def estimate_optimizers(findings: Sequence[Worth], pick: Sequence[float], sd: float, dof: float) -> None:
    """Estimate the effects of optimizers from their shares of a step.

    A share is measured within one process, so that most of the difference between two processes cancels.

    Args:
        pick: log odds of the share of the pick's own optimizer, one for each run.
        sd, dof: of the logarithm of whole steps, which stand in where no optimizer ran twice; without an `sd`
            nothing is estimated then.
    """
    runs = [pick, *(each.beside for each in findings)]
    if (own_dof := sum(len(each) - 1 for each in runs)) > 1:
        dof = own_dof
        squares = sum((value - statistics.fmean(each)) ** 2 for each in runs for value in each)
        sd = math.sqrt(squares / dof)
    elif not sd:
        return
    of_pick = 1 / (1 + math.exp(-statistics.fmean(pick)))
    for finding in findings:
        own = 1 / (1 + math.exp(-statistics.fmean(finding.beside)))
        se = sd * math.hypot(of_pick / math.sqrt(len(pick)), own / math.sqrt(len(finding.beside)))
        finding.effect = Effect(math.log((1 - own) / (1 - of_pick)), se, dof)


def in_blocks(findings: Sequence[Worth], optimizers_in_block: int) -> list[list[Worth]]:
    """Techniques by the block that measures them: three to a block, and after those the optimizers."""
    found: list[list[Worth]] = []
    for sets_optimizer, size in ((False, 3), (True, optimizers_in_block)):
        kin = [each for each in findings if each.sets_optimizer == sets_optimizer]
        found += [kin[start : start + size] for start in range(0, len(kin), size)]
    return found
