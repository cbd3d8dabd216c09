"""What paired rounds say: an effect with its interval, and verdicts over a family of comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Word = Literal["faster", "slower", "no difference", "cannot tell", "not applicable"]
EQUAL = 0.02
"""Two variants whose times differ by no more than this part are as quick as each other."""
ALPHA, INTERIM_ALPHA = 0.05, 0.001
"""Error of a family of verdicts; that at which a comparison may end before its time."""
POWER = 0.8
FUTILE = 0.25
"""Part of the variance between processes at which that of the rounds widens an interval by a tenth."""
LEAST_ROUNDS = 4
"""Fewer rounds give no verdict."""
PRIOR_SD, PRIOR_PAIRS = 0.005, 4
"""How far two processes of one config are apart, and how many observed pairs this assumption counts for."""
_RESAMPLES = 2000
_GRID = 20_001


@dataclass(frozen=True)
class Effect:
    """How much faster the second of two variants is, as the logarithm of a ratio of times.

    Args:
        log_ratio: above 0 where the second one is faster.
        se: its standard error.
        dof: degrees of freedom of that error, at least 1.
    """

    log_ratio: float
    se: float
    dof: float

    @property
    def ratio(self) -> float:
        """The speed-up: 1.20 is 20 % faster."""
        return math.exp(self.log_ratio)

    def interval(self, level: float = 1 - ALPHA) -> tuple[float, float]:
        """The interval of the speed-up that covers the true one in so large a part of all cases."""
        half = t_quantile((1 + level) / 2, self.dof) * self.se
        return math.exp(self.log_ratio - half), math.exp(self.log_ratio + half)

    @property
    def p_value(self) -> float:
        """How often two equal variants would come out as far apart."""
        if not self.se:
            return float(self.log_ratio == 0)
        return 2 * t_tail(abs(self.log_ratio) / self.se, self.dof)

    def is_equal(self, level: float = 1 - ALPHA) -> bool:
        """Return True if the whole interval is within `EQUAL` of 1."""
        low, high = self.interval(level)
        return low >= 1 - EQUAL and high <= 1 + EQUAL

    @property
    def is_clear(self) -> bool:
        """Return True if more rounds would hardly change the verdict.

        Looking after every round would find differences that are not there, were the bar not as high as
        Haybittle's and Peto's for trials that are looked at while they run (Peto et al. 1976).
        """
        return self.p_value < INTERIM_ALPHA or self.is_equal(1 - INTERIM_ALPHA)


@dataclass(frozen=True)
class ProcessSpread:
    """How far apart two processes of one config are, of which rounds within two processes see nothing.

    Where a process's memory lies and which cores its threads get stays as it is for as long as it lives, and
    a slower place looks like a slower variant. What A/A pairs show beyond their own error is combined with an
    assumption (`PRIOR_SD`) that counts as much as `PRIOR_PAIRS` pairs, as one or two pairs alone may come
    out equal by chance: the mean of a scaled inverse chi-squared prior and what was seen.

    Args:
        effects: of A/A pairs.
    """

    effects: tuple[Effect, ...] = ()

    @property
    def variance(self) -> float:
        """Of the logarithm of the ratio of their times."""
        seen = sum(max(0.0, effect.log_ratio**2 - effect.se**2) for effect in self.effects)
        return (PRIOR_PAIRS * PRIOR_SD**2 + seen) / self.dof

    @property
    def dof(self) -> int:
        """Degrees of freedom of the variance."""
        return PRIOR_PAIRS + len(self.effects)

    def widen(self, *pairs: Effect) -> Effect:
        """The effect of two variants from that of one or more pairs of their processes, each counting alike.

        What several pairs differ by counts as A/A pairs do. Degrees of freedom are by Welch-Satterthwaite.
        """
        count, spread = len(pairs), ProcessSpread((*self.effects, *_contrasts(pairs)))
        errors, between = [(pair.se / count) ** 2 for pair in pairs], spread.variance / count
        variance = math.fsum(errors) + between
        uncertainty = between**2 / spread.dof
        uncertainty += math.fsum(error**2 / pair.dof for error, pair in zip(errors, pairs, strict=True))
        log_ratio = statistics.fmean(pair.log_ratio for pair in pairs)
        return Effect(log_ratio, math.sqrt(variance), variance**2 / uncertainty)

    def hides(self, effect: Effect) -> bool:
        """Return True if more rounds of two processes would hardly narrow the interval of `effect`."""
        return effect.se**2 < self.variance * FUTILE

    def smallest_effect(self, round_sd: float, num_rounds: int) -> float:
        """The difference, as a part, that so many rounds find in 80 % of cases.

        Args:
            round_sd: deviation of a round's log ratio.
        """
        se = round_sd / math.sqrt(num_rounds)
        effect = self.widen(Effect(0.0, se, num_rounds - 1))
        quantiles = t_quantile(1 - ALPHA / 2, effect.dof) + t_quantile(POWER, effect.dof)
        return math.expm1(quantiles * effect.se)


def _contrasts(pairs: Sequence[Effect]) -> list[Effect]:
    """Differences between pairs of processes, independent and each as large by chance as an A/A pair's."""
    found: list[Effect] = []
    for count in range(1, len(pairs)):
        before, this, scale = pairs[:count], pairs[count], math.sqrt(count / (count + 1))
        difference = statistics.fmean(pair.log_ratio for pair in before) - this.log_ratio
        se = math.hypot(*(pair.se / count for pair in before), this.se)
        found.append(Effect(scale * difference, scale * se, this.dof))
    return found


def shrink(chosen: Effect, tried: Sequence[Effect]) -> float:
    """Log ratio to expect of an effect that was chosen for how large it came out.

    The best of several measurements owes a part of its lead to luck. True log ratios are taken as normal
    around 0, with the variance by which the measured ones exceed their errors: the expectation is then that
    of empirical Bayes (Efron and Morris 1975, https://doi.org/10.1080/01621459.1975.10479864).

    Args:
        tried: the effects among which it was chosen.
    """
    true = max(0.0, statistics.fmean(effect.log_ratio**2 - effect.se**2 for effect in tried))
    return chosen.log_ratio * true / (true + chosen.se**2) if true else 0.0


def estimate(log_ratios: Sequence[float], seed: int = 0) -> Effect:
    """The effect that rounds of two processes show.

    The location is Hodges' and Lehmann's (the median of the means of all pairs of rounds), which a single
    disturbed round hardly moves. Its error is that of a bootstrap over rounds. With few rounds a bootstrap is
    too narrow by the factor sqrt((n - 1) / n), and its percentiles by the difference between a normal and a t
    distribution as well: both are corrected for (Hesterberg 2015, arXiv:1411.5279).

    Args:
        log_ratios: of each round, two at least.
    """
    values = np.asarray(log_ratios, np.float64)
    count = len(values)
    draws = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    se = float(_locations(values[draws]).std()) * math.sqrt(count / (count - 1))
    return Effect(float(_locations(values[None])[0]), se, count - 1)


def _locations(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hodges' and Lehmann's estimate of each row."""
    first, second = np.triu_indices(samples.shape[1])
    return np.median((samples[:, first] + samples[:, second]) / 2, axis=1)


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Return for each hypothesis if it is rejected; `alpha` is the chance of any false rejection (Holm 1979).

    The smallest of m p-values is held against alpha / m, the next against alpha / (m - 1), up to the first
    that is larger.
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def judge(effects: Sequence[Effect | None]) -> list[Word]:
    """The verdict on each comparison of a family; None is one with too few rounds."""
    known = [effect for effect in effects if effect is not None]
    rejected = iter(holm([effect.p_value for effect in known]))
    return ["cannot tell" if effect is None else _word(effect, next(rejected)) for effect in effects]


def _word(effect: Effect, differs: bool) -> Word:
    if effect.is_equal():
        return "no difference"
    if not differs:
        return "cannot tell"
    return "faster" if effect.log_ratio > 0 else "slower"


def t_tail(t: float, dof: float) -> float:
    """The probability that Student's t lies above `t` >= 0.

    With t = sqrt(dof) tan(angle) its density becomes a power of the cosine, integrated by trapezoids.
    """
    angles = np.linspace(math.atan(t / math.sqrt(dof)), math.pi / 2, _GRID)
    return float(_areas(angles, dof)[-1]) / _whole(dof)


def t_quantile(p: float, dof: float) -> float:
    """The value that Student's t exceeds with probability 1 - p, for p >= 0.5."""
    angles = np.linspace(0.0, math.pi / 2, _GRID)
    angle = float(np.interp((p - 0.5) * _whole(dof), _areas(angles, dof), angles))
    return math.sqrt(dof) * math.tan(angle)


def _areas(angles: NDArray[np.float64], dof: float) -> NDArray[np.float64]:
    """The integral of a power of the cosine up to each angle but the first; 0 there."""
    density = np.cos(angles).clip(0.0) ** (dof - 1)
    return np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angles))])


def _whole(dof: float) -> float:
    """The same from -pi/2 to pi/2."""
    return math.sqrt(math.pi) * math.exp(math.lgamma(dof / 2) - math.lgamma((dof + 1) / 2))
