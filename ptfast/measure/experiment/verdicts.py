"""Effects with their intervals, and verdicts over a family of comparisons."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["faster", "slower", "no difference", "cannot tell", "not applicable"]
EQUAL = 0.02
"""Variants whose times differ by at most this fraction count as equal."""
ALPHA = 0.05
"""Error probability of a family of verdicts as a whole."""
_GRID = 20_001


@dataclass(frozen=True)
class Effect:
    """How much faster the second of two variants is, as the logarithm of a ratio of times."""

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

    def __str__(self) -> str:
        return "{:.2f}x [{:.2f}-{:.2f}]".format(self.ratio, *self.interval())

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "interval": self.interval()}

    @property
    def p_value(self) -> float:
        """Return the probability that two equal variants come out as far apart, by Student's t."""
        if not self.se:
            return float(self.log_ratio == 0)
        first = math.atan(abs(self.log_ratio) / self.se / math.sqrt(self.dof))
        areas, whole = _areas(np.linspace(first, math.pi / 2, _GRID), self.dof)
        return 2 * (float(areas[-1]) / whole)


def estimate(log_ratios: Sequence[float]) -> Effect:
    """Estimate the effect from pairs of runs: their mean and its standard error."""
    count = len(log_ratios)
    return Effect(statistics.fmean(log_ratios), statistics.stdev(log_ratios) / math.sqrt(count), count - 1)


def judge(effects: Sequence[Effect | None]) -> list[Verdict]:
    """Return the verdict on each comparison of a family; None marks one with too few rounds.

    The chance of calling any two equal variants different is `ALPHA` (Holm 1979): the smallest of m p-values
    is compared with ALPHA / m, the next with ALPHA / (m - 1), up to the first one that is larger.
    """
    p_values = {index: effect.p_value for index, effect in enumerate(effects) if effect is not None}
    differ: set[int] = set()
    for rank, index in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[index] > ALPHA / (len(p_values) - rank):
            break
        differ.add(index)
    verdicts: list[Verdict] = []
    for index, effect in enumerate(effects):
        low, high = effect.interval() if effect is not None else (0.0, math.inf)
        if low >= 1 - EQUAL and high <= 1 + EQUAL:
            verdicts.append("no difference")
        elif effect is None or index not in differ:
            verdicts.append("cannot tell")
        else:
            verdicts.append("faster" if effect.log_ratio > 0 else "slower")
    return verdicts


@functools.cache
def t_quantile(p: float, dof: float) -> float:
    """Return the value that Student's t exceeds with probability 1 - p, for p >= 0.5."""
    angles = np.linspace(0.0, math.pi / 2, _GRID)
    areas, whole = _areas(angles, dof)
    return math.sqrt(dof) * math.tan(float(np.interp((p - 0.5) * whole, areas, angles)))


def _areas(angles: NDArray[np.float64], dof: float) -> tuple[NDArray[np.float64], float]:
    """Return the integral of Student's density from the first angle to each, and over the whole range.

    With t = sqrt(dof) tan(angle) the density is a power of the cosine, integrated by trapezoids.
    """
    density = np.cos(angles).clip(0.0) ** (dof - 1)
    areas = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angles))])
    return areas, math.sqrt(math.pi) * math.exp(math.lgamma(dof / 2) - math.lgamma((dof + 1) / 2))
