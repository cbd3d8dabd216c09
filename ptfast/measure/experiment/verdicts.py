"""Effects with their intervals, and verdicts over a family of comparisons."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

Verdict = Literal["faster", "slower", "no difference", "cannot tell", "not applicable"]
EQUAL = 0.02
"""Variants whose times differ by at most this fraction count as equal."""
ALPHA = 0.05
"""Probability of any error in a family of verdicts."""
_GRID = 20_001


@dataclass(frozen=True)
class Effect:
    """The speed-up of the second of two variants over the first, as the log of a ratio of times."""

    log_ratio: float
    """Above 0 if the second one is faster."""
    se: float
    dof: float
    """Degrees of freedom of the error, at least 1."""

    @property
    def ratio(self) -> float:
        """The speed-up: 1.20 is 20 % faster."""
        return math.exp(self.log_ratio)

    def interval(self, level: float = 1 - ALPHA) -> tuple[float, float]:
        """The confidence interval of the speed-up."""
        half = t_quantile((1 + level) / 2, self.dof) * self.se
        return math.exp(self.log_ratio - half), math.exp(self.log_ratio + half)

    def __neg__(self) -> Effect:
        return Effect(-self.log_ratio, self.se, self.dof)

    def __str__(self) -> str:
        return "{:.2f}x [{:.2f}-{:.2f}]".format(self.ratio, *self.interval())

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "interval": self.interval()}


def estimate(log_ratios: Sequence[float]) -> Effect:
    """Estimate the effect from pairs of runs: their mean and its standard error."""
    count = len(log_ratios)
    return Effect(statistics.fmean(log_ratios), statistics.stdev(log_ratios) / math.sqrt(count), count - 1)


def judge(effects: Sequence[Effect | None]) -> list[Verdict]:
    """Return the verdict on each comparison of a family; None marks one with too few rounds.

    The chance of calling any two equal variants different is `ALPHA` (Holm 1979): of m effects, those whose
    interval at level 1 - ALPHA / m excludes 1 differ; this is repeated with the remaining effects.
    """
    unsure = {index: effect for index, effect in enumerate(effects) if effect is not None}
    count = 0
    while len(unsure) != count:
        count = len(unsure)
        intervals = {index: effect.interval(1 - ALPHA / count) for index, effect in unsure.items()}
        unsure = {index: unsure[index] for index, (low, high) in intervals.items() if low <= 1 <= high}
    verdicts: list[Verdict] = []
    for index, effect in enumerate(effects):
        low, high = effect.interval() if effect is not None else (0.0, math.inf)
        if low >= 1 - EQUAL and high <= 1 + EQUAL:
            verdicts.append("no difference")
        elif effect is None or index in unsure:
            verdicts.append("cannot tell")
        else:
            verdicts.append("faster" if effect.log_ratio > 0 else "slower")
    return verdicts


@functools.cache
def t_quantile(p: float, dof: float) -> float:
    """Return the value that Student's t exceeds with probability 1 - p, for p >= 0.5.

    With t = sqrt(dof) tan(angle) the density is a power of the cosine, integrated by trapezoids.
    """
    angles = np.linspace(0.0, math.pi / 2, _GRID)
    density = np.cos(angles).clip(0.0) ** (dof - 1)
    areas = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angles))])
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(dof / 2) - math.lgamma((dof + 1) / 2))
    return math.sqrt(dof) * math.tan(float(np.interp((p - 0.5) * whole, areas, angles)))
