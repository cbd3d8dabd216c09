"""Effects of paired rounds, their intervals and the verdicts on a family of them."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from ptfast.measure.trials.verdicts import (
    PRIOR_PAIRS,
    PRIOR_SD,
    Effect,
    ProcessSpread,
    estimate,
    holm,
    judge,
    shrink,
    t_quantile,
    t_tail,
)


@pytest.mark.parametrize(
    ("p", "dof", "value"), [(0.975, 1, 12.7062), (0.975, 3, 3.18245), (0.9995, 4, 8.61030), (0.8, 9, 0.88340)]
)
def test_students_t_is_that_of_tables(p: float, dof: float, value: float) -> None:
    assert t_quantile(p, dof) == pytest.approx(value, rel=1e-4)
    assert t_tail(value, dof) == pytest.approx(1 - p, rel=1e-3)


def test_the_location_is_the_median_of_pairwise_means() -> None:
    # Means of the pairs of 0, 1, 5, with themselves: 0, 0.5, 2.5, 1, 3, 5.
    assert estimate([0.0, 1.0, 5.0]).log_ratio == 1.75
    # Where it is the mean, its error is the usual one: that of two values, half their distance.
    assert estimate([0.0, 1.0]).se == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("count", [4, 10])
def test_the_interval_covers_the_truth(count: int) -> None:
    generator = np.random.default_rng(count)
    covered = 0
    for seed in range(200):
        low, high = estimate(generator.normal(0.1, 0.02, count).tolist(), seed).interval()
        covered += low <= math.exp(0.1) <= high
    # 95 % of 200 are 190, with a deviation of 3.
    assert covered >= 181


def test_what_processes_differ_by_is_added() -> None:
    assumed = ProcessSpread()
    assert assumed.variance == pytest.approx(PRIOR_SD**2)
    seen = ProcessSpread((Effect(0.05, 0.03, 7),))
    by_hand = (PRIOR_PAIRS * PRIOR_SD**2 + 0.05**2 - 0.03**2) / (PRIOR_PAIRS + 1)
    assert seen.variance == pytest.approx(by_hand)
    widened = seen.widen(Effect(0.1, 0.02, 5))
    assert widened.se == pytest.approx(math.sqrt(0.02**2 + by_hand))
    assert 1 <= widened.dof <= 5 + seen.dof
    # Processes that are no further apart than their own error say nothing.
    assert ProcessSpread((Effect(0.01, 0.03, 7),)).variance < assumed.variance
    assert (
        seen.smallest_effect(0.02, 4) > assumed.smallest_effect(0.02, 4) > assumed.smallest_effect(0.02, 16)
    )


def test_several_pairs_of_processes_tell_how_far_apart_they_are() -> None:
    """Processes that differ by four times what is assumed: one pair is too sure of itself, four are less."""
    generator, covered, widths = np.random.default_rng(0), {1: 0, 4: 0}, {1: 0.0, 4: 0.0}
    for _ in range(200):
        aa, *effects = generator.normal(0, 4 * PRIOR_SD, 5) + generator.normal(0, 0.005, 5)
        spread = ProcessSpread((Effect(aa, 0.005, 7),))
        for count in covered:
            low, high = spread.widen(*(Effect(each, 0.005, 7) for each in effects[:count])).interval()
            covered[count] += low <= 1 <= high
            widths[count] += high - low
    assert covered[4] >= 150 > covered[1]
    assert widths[4] < 0.75 * widths[1]
    # Two pairs by hand: their half difference is one more draw of what two processes differ by.
    two = ProcessSpread().widen(Effect(0.04, 0.01, 7), Effect(0.0, 0.01, 7))
    spread = (PRIOR_PAIRS * PRIOR_SD**2 + 0.04**2 / 2 - 0.01**2) / (PRIOR_PAIRS + 1)
    assert two.log_ratio == pytest.approx(0.02)
    assert two.se**2 == pytest.approx((0.01**2 + spread) / 2)


def test_holm_by_hand() -> None:
    assert holm([]) == []
    # 0.01 <= 0.05 / 4, 0.02 > 0.05 / 3: what follows is not looked at.
    assert holm([0.04, 0.01, 0.03, 0.02]) == [False, True, False, False]
    # 0.012 <= 0.05 / 4, 0.016 <= 0.05 / 3, 0.024 <= 0.05 / 2, 0.05 <= 0.05.
    assert holm([0.024, 0.05, 0.012, 0.016]) == [True] * 4


def test_verdicts() -> None:
    sure, slow, level, lost = (
        Effect(x, se, 20) for x, se in ((0.2, 0.01), (-0.2, 0.01), (0.005, 0.003), (0.1, 0.1))
    )
    assert judge([sure, slow, level, lost, None]) == [
        *("faster", "slower", "no difference", "cannot tell", "cannot tell")
    ]
    assert [effect.is_clear for effect in (sure, slow, level, lost)] == [True, True, True, False]
    # p = 0.02 is a finding alone, and none among others.
    doubtful = Effect(0.1, 0.04, 20)
    assert judge([doubtful]) == ["faster"]
    assert judge([doubtful, lost, lost, lost])[0] == "cannot tell"


def test_equal_variants_are_seldom_told_apart() -> None:
    """40 sessions whose processes differ by as much as is assumed: wrong at most 4 times, as is promised."""
    generator = np.random.default_rng(0)
    words: list[str] = []
    for seed in range(40):
        pairs = [
            estimate((generator.normal(0, PRIOR_SD) + generator.normal(0, 0.01, 8)).tolist(), seed)
            for _ in range(2)
        ]
        words += judge([ProcessSpread((pairs[0],)).widen(pairs[1])])
    assert sum(word in ("faster", "slower") for word in words) <= 4


def test_the_best_of_many_promises_no_more_than_it_holds() -> None:
    generator = np.random.default_rng(0)
    raw, expected = [], []
    for _ in range(300):
        true = generator.normal(0, 0.05, 12)
        tried = [Effect(float(each), 0.05, 20) for each in true + generator.normal(0, 0.05, 12)]
        best = max(range(12), key=lambda number: tried[number].log_ratio)
        raw.append(tried[best].log_ratio - true[best])
        expected.append(shrink(tried[best], tried) - true[best])
    assert statistics.fmean(raw) > 0.04
    assert abs(statistics.fmean(expected)) < 0.005
    assert shrink(Effect(0.01, 0.05, 20), [Effect(0.01, 0.05, 20)]) == 0
