"""What an ablation finds on one technique, and on the pick."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ptfast.core.sections.section import Technique
from ptfast.measure.experiment.laboratory import TrialResult
from ptfast.measure.experiment.verdicts import Effect, Verdict

OUTSIDE_FAMILIES = ("checkpointing", "compile", "parallel")
WORKERS = "dataloader=workers"
OUTSIDE_KEYS = (WORKERS, "gradients.accumulate=", "backend.threads=")
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
    """The log ratio of speeds in each run beside the pick."""

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
