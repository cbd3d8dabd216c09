"""The figures of an ablation: of one technique, and of the pick."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ptfast.core.sections.technique import Technique
from ptfast.measure.experiment.laboratory import Measured
from ptfast.measure.experiment.verdicts import Effect, Verdict

PER_STEP = ("reduced", "training")
"""Classes of which a faster step is not yet the same loss sooner."""


@dataclass
class Worth:
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
    verdict: Verdict = "cannot tell"
    why: str = ""
    memory_bytes: float | None = None
    loss_drift: float | None = None
    is_apart: bool = False
    log_ratios: list[float] = field(default_factory=list)
    """Of runs beside the pick, block by block."""

    @property
    def words(self) -> str:
        """The verdict in words; of what changes the result, on the step alone."""
        per_step = self.verdict == "faster" and self.technique.kind in PER_STEP
        return f"{self.verdict} per step" if per_step else self.verdict

    def note(self, measured: Measured, base: Measured | None) -> None:
        """Note why a run with it has failed, or by how much its first losses differ from those of `base`."""
        self.why = measured.why
        loss, of_base = measured.facts.get("loss"), base and base.facts.get("loss")
        if loss is not None and of_base:
            self.loss_drift = loss / of_base - 1
            if not math.isfinite(loss):
                self.why = "it diverges"

    def receipt(self) -> dict[str, Any]:
        """Its figures as plain values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("technique", "effect")}
        return {"technique": self.technique.name, **plain, "effect": _effect_receipt(self.effect)}


@dataclass
class Confirmed:
    """The pick, run again in fresh processes."""

    over_plain: Effect
    over_given: Effect
    process_sd: float
    """Deviation of processes of one config, as a logarithm."""

    def receipt(self) -> dict[str, Any]:
        """Its figures as plain values."""
        effects = {"over_plain": self.over_plain, "over_given": self.over_given}
        return {name: _effect_receipt(effect) for name, effect in effects.items()} | {
            "process_sd": self.process_sd
        }


def described(effect: Effect) -> str:
    """A speed-up with its interval: `1.20x [1.15-1.25]`."""
    return "{:.2f}x [{:.2f}-{:.2f}]".format(effect.ratio, *effect.interval())


def _effect_receipt(effect: Effect | None) -> dict[str, Any] | None:
    return (
        None if effect is None else {**asdict(effect), "ratio": effect.ratio, "interval": effect.interval()}
    )
