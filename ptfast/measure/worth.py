"""The results of an ablation for one technique, and for the selected config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ptfast.core.sections.section import Technique
from ptfast.measure.experiment.laboratory import TrialResult
from ptfast.measure.experiment.verdicts import Effect, Verdict

OUTSIDE_FAMILIES = ("checkpointing", "compile", "parallel")
WORKERS = "dataloader=workers"
OUTSIDE_KEYS = (WORKERS, "gradients.accumulate=", "backend.threads=")
"""Overrides of techniques outside the plan: they start processes, or change a step so much that other
switches act differently."""
PER_STEP = ("reduced", "training")
"""Classes of techniques that may need more steps for the same loss."""


@dataclass
class Worth:
    """The results for one technique."""

    technique: Technique
    effect: Effect | None = None
    """Effect on speed, averaged over the other switches; None if not measured."""
    expected: float = 0.0
    """Expected log ratio, corrected for selection bias."""
    verdict: Verdict = "cannot tell"
    why: str = ""
    """The reason the technique was not measured."""
    memory_bytes: float | None = None
    """Change in peak memory."""
    loss_drift: float | None = None
    """Relative change of the mean loss over the first steps."""
    is_apart: bool = False
    """Whether it is measured on top of the selected config, not in the plan."""

    @property
    def is_faster_per_step(self) -> bool:
        """Whether steps are faster, but the same loss may need more of them."""
        return self.verdict == "faster" and self.technique.kind in PER_STEP

    @property
    def is_outside(self) -> bool:
        """Whether it is measured outside the plan."""
        technique = self.technique
        if technique.family in OUTSIDE_FAMILIES or technique.kind == "training":
            return True
        return "compiler" in technique.needs or any(word.startswith(OUTSIDE_KEYS) for word in technique.on)

    @property
    def starts_workers(self) -> bool:
        return any(word.startswith(WORKERS) for word in self.technique.on)

    def note(self, measured: TrialResult, base: TrialResult | None) -> None:
        """Record why its run failed, or how much the first losses differ from those of `base`."""
        self.why = measured.why
        loss, of_base = measured.facts.get("loss"), base and base.facts.get("loss")
        if loss is not None and of_base:
            self.loss_drift = loss / of_base - 1
            if not math.isfinite(loss):
                self.why = "it diverges"


@dataclass
class Confirmation:
    """The selected config, run again in fresh processes; `process_sd` is the spread of their log times."""

    over_plain: Effect
    over_given: Effect
    process_sd: float
