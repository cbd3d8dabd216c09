"""Effects, their intervals and the verdicts on a family of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ptfast.measure.experiment.verdicts import (
    Effect,
    estimate,
    judge,
    t_quantile,
)


@pytest.mark.parametrize(
    ("p", "dof", "value"), [(0.975, 1, 12.7062), (0.975, 3, 3.18245), (0.9995, 4, 8.61030), (0.8, 9, 0.88340)]
)
def test_students_t_is_that_of_tables(p: float, dof: float, value: float) -> None:
    assert t_quantile(p, dof) == pytest.approx(value, rel=1e-4)
    assert Effect(0.0, 1.0, dof).interval(2 * p - 1)[1] == pytest.approx(math.exp(value), rel=1e-2)


def test_an_effect_is_the_mean_of_its_pairs() -> None:
    effect = estimate([0.0, 1.0, 5.0])
    assert (effect.log_ratio, effect.dof) == (2.0, 2)
    assert effect.se == pytest.approx((7 / 3) ** 0.5)


@pytest.mark.parametrize("count", [4, 10])
def test_the_interval_covers_the_truth(count: int) -> None:
    generator = np.random.default_rng(count)
    covered = 0
    for _ in range(200):
        low, high = estimate(generator.normal(0.1, 0.02, count).tolist()).interval()
        covered += low <= math.exp(0.1) <= high
    # 95 % of 200 are 190, with a standard deviation of 3.
    assert covered >= 181


def test_holm_with_known_p_values() -> None:
    def of(p_values: list[float]) -> list[Effect]:
        return [Effect(t_quantile(1 - p / 2, 20), 1.0, 20) for p in p_values]

    assert judge([]) == []
    # 0.01 <= 0.05 / 4, 0.02 > 0.05 / 3: what follows is not looked at.
    doubtful = "cannot tell"
    assert judge(of([0.04, 0.01, 0.03, 0.02])) == [doubtful, "faster", doubtful, doubtful]
    # 0.012 <= 0.05 / 4, 0.016 <= 0.05 / 3, 0.024 <= 0.05 / 2, 0.049 <= 0.05.
    assert judge(of([0.024, 0.049, 0.012, 0.016])) == ["faster"] * 4


def test_verdicts() -> None:
    sure, slow, level, lost = (
        Effect(x, se, 20) for x, se in ((0.2, 0.01), (-0.2, 0.01), (0.005, 0.003), (0.1, 0.1))
    )
    assert judge([sure, slow, level, lost, None]) == [
        *("faster", "slower", "no difference", "cannot tell", "cannot tell")
    ]
    # p = 0.02 is a finding alone, but not among others.
    doubtful = Effect(0.1, 0.04, 20)
    assert judge([doubtful]) == ["faster"]
    assert judge([doubtful, lost, lost, lost])[0] == "cannot tell"
