"""Two variants held against each other: what each stretch of each round took, and what that comes to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ptfast.measure.trials.system_load import interference
from ptfast.measure.trials.verdicts import LEAST_ROUNDS, Effect, ProcessSpread, Word, estimate

ORDER = (0, 1, 1, 0)
"""The variants of a round, in the order they are measured: what drifts evenly weighs on both alike."""


@dataclass(frozen=True)
class Arm:
    """A variant of a config; those of the same overrides are one.

    Args:
        name: as tables show it.
        overrides: `key=value` and `group=option` words over those of the user.
        copy: tells apart two of the same overrides, each with a process of its own.
    """

    name: str = field(compare=False)
    overrides: tuple[str, ...] = ()
    copy: int = 0


@dataclass
class Comparison:
    """A base and another variant, measured in turns.

    Args:
        spread: how far apart two processes of one config are.
    """

    base: Arm
    other: Arm
    spread: ProcessSpread = field(default_factory=ProcessSpread)
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)
    """What `time_stretch` has reported of the four stretches of each round, in `ORDER`."""
    starts: list[int] = field(default_factory=lambda: [0])
    """How many rounds there were before each pair of processes."""
    warm: tuple[dict[str, Any], ...] = ()
    """What it has reported of building and warming up each of the two."""
    why: str = ""
    """Why there is nothing to measure; empty where there is."""
    verdict: Word = "cannot tell"
    """Among the family of comparisons that its session has made."""

    @property
    def unit(self) -> str:
        """What time is held against: `tokens`, without padding, of data that has them, else `samples`."""
        stretches = [stretch for each in self.rounds for stretch in each]
        return "tokens" if stretches and all(stretch["tokens"] for stretch in stretches) else "samples"

    def log_ratios(self, figure: str = "wall_s") -> list[float]:
        """How much less the second variant takes of a figure per unit, in logarithms, by round."""
        unit = self.unit
        costs = [
            [math.log(max(each[figure], 1e-9) / each[unit]) for each in stretches]
            for stretches in self.rounds
        ]
        signs = [1 if arm == 0 else -1 for arm in ORDER]
        return [math.fsum(map(math.prod, zip(signs, row, strict=True))) / 2 for row in costs]

    @property
    def process_effects(self) -> list[Effect]:
        """What rounds show of each pair of processes that had enough of them."""
        ratios, ends = self.log_ratios(), [*self.starts[1:], len(self.rounds)]
        parts = [ratios[start:end] for start, end in zip(self.starts, ends, strict=True)]
        return [estimate(part) for part in parts if len(part) >= LEAST_ROUNDS]

    @property
    def process_effect(self) -> Effect | None:
        """What they show of the latest pair; None where there are too few yet."""
        ratios = self.log_ratios()[self.starts[-1] :]
        return estimate(ratios) if len(ratios) >= LEAST_ROUNDS else None

    @property
    def effect(self) -> Effect | None:
        """What they show of the two variants: two processes of one config differ, too."""
        effects = self.process_effects
        return self.spread.widen(*effects) if effects else None

    def median(self, arm: int, figure: str) -> float:
        """The median of a figure over the stretches of the first variant (0) or the second (1)."""
        return statistics.median(each[figure] for each in self._stretches(arm))

    @property
    def memory_change_bytes(self) -> int:
        """How much more memory the second variant took at its peak."""
        base, other = (max(each["peak_memory_bytes"] for each in self._stretches(arm)) for arm in (0, 1))
        return other - base

    @property
    def memory_ratio(self) -> float:
        """How many times the memory that training takes above a built run, the base's over the other's."""
        base, other = (
            max(each["peak_memory_bytes"] for each in self._stretches(arm)) - self.warm[arm]["built_bytes"]
            for arm in (0, 1)
        )
        return base / max(other, 1)

    @property
    def loss_drift(self) -> float | None:
        """Relative difference of the mean loss over the first steps, which both took on the same batches."""
        losses = [warm.get("losses", []) for warm in self.warm]
        count = min(map(len, losses), default=0)
        if not count or self.warm[0]["batch_size"] != self.warm[1]["batch_size"]:
            return None
        base, other = (statistics.fmean(each[:count]) for each in losses)
        return (other - base) / abs(base) if base else None

    @property
    def pays_after_steps(self) -> int | None:
        """Steps after which a longer first step has paid; None where it is no longer, or never does."""
        first_s = [warm["first_step_s"] for warm in self.warm]
        step_s = [self.median(arm, "wall_s") / self.median(arm, "steps") for arm in (0, 1)]
        if first_s[1] <= first_s[0] or step_s[1] >= step_s[0]:
            return None
        return math.ceil((first_s[1] - first_s[0]) / (step_s[0] - step_s[1]))

    def disturbed(self) -> dict[int, str]:
        """Rounds during which something else took part of the machine, from 1, and what."""
        highest = max((s["system"]["mhz"] or 0.0 for each in self.rounds for s in each), default=0.0)
        found: dict[int, str] = {}
        for number, stretches in enumerate(self.rounds, 1):
            words = [interference(each["system"], highest) for each in stretches]
            if any(words):
                found[number] = max(words, key=len)
        return found

    def receipt(self) -> dict[str, Any]:
        """All of it, as plain values."""
        effect = self.effect
        figures: dict[str, Any] = {"verdict": self.verdict, "why": self.why}
        if effect is not None:
            low, high = effect.interval()
            figures |= {"speedup": effect.ratio, "low": low, "high": high, "p_value": effect.p_value}
            figures |= {"unit": self.unit, "memory_change_bytes": self.memory_change_bytes}
            figures |= {"loss_drift": self.loss_drift, "pays_after_steps": self.pays_after_steps}
        return {
            "base": {"name": self.base.name, "overrides": self.base.overrides},
            "other": {"name": self.other.name, "overrides": self.other.overrides},
            **figures,
            "interference": self.disturbed(),
            "order": ["base" if arm == 0 else "other" for arm in ORDER],
            "warm_up": [{k: v for k, v in warm.items() if k != "environment"} for warm in self.warm],
            "process_starts": self.starts,
            "rounds": self.rounds,
        }

    def _stretches(self, arm: int) -> Sequence[dict[str, Any]]:
        return [s for each in self.rounds for s, of in zip(each, ORDER, strict=True) if of == arm]
