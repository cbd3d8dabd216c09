"""Counter-based draws: functions of (seed, epoch, index, stream) and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from ptfast.data.sampling import counter_draws

INDICES = np.arange(100_000)
MOST = 1 << 32


def test_known_values_do_not_change():
    # A change here changes every batch of every resumed run.
    assert counter_draws.bits(0, 0, np.arange(3), 0).tolist() == [
        8865259441270742529,
        16243450829873959913,
        7691045517760467747,
    ]
    assert counter_draws.integers(7, 3, np.arange(8), counter_draws.CROP_X, 9).tolist() == [
        2,
        0,
        2,
        3,
        5,
        8,
        5,
        1,
    ]


def test_a_draw_does_not_depend_on_the_batch_it_is_in():
    whole = counter_draws.integers(1, 2, INDICES, counter_draws.FLIP, MOST)
    some = np.array([5, 99_999, 0, 5])
    assert np.array_equal(counter_draws.integers(1, 2, some, counter_draws.FLIP, MOST), whole[some])
    assert np.array_equal(
        counter_draws.integers(1, 2, some.reshape(2, 2), counter_draws.FLIP, MOST), whole[some].reshape(2, 2)
    )


def test_the_largest_range_is_filled_evenly():
    drawn = counter_draws.integers(3, 0, INDICES, counter_draws.CROP_X, MOST)
    assert drawn.min() >= 0
    counts = np.histogram(drawn, 50, (0, MOST))[0]
    assert counts.sum() == len(INDICES)
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)


def test_integers_take_every_value_equally_often():
    counts = np.bincount(counter_draws.integers(3, 0, INDICES, counter_draws.CROP_X, 9), minlength=9)
    assert len(counts) == 9
    assert np.abs(counts - 100_000 / 9).max() < 5 * np.sqrt(100_000 / 9)


@pytest.mark.parametrize(
    "other",
    [
        (1, 0, counter_draws.CROP_X),
        (0, 1, counter_draws.CROP_X),
        (0, 0, counter_draws.CROP_Y),
        (-1, 0, counter_draws.CROP_X),
    ],
)
def test_seed_epoch_and_stream_give_unrelated_draws(other: tuple[int, int, int]):
    seed, epoch, stream = other
    one, two = (
        counter_draws.integers(0, 0, INDICES, counter_draws.CROP_X, MOST),
        counter_draws.integers(seed, epoch, INDICES, stream, MOST),
    )
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.015


def test_neighboring_indices_are_unrelated():
    u = counter_draws.integers(0, 0, INDICES, counter_draws.CROP_X, MOST)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.015


def test_integers_refuse_a_range_they_cannot_draw_from():
    with pytest.raises(ValueError, match="high"):
        counter_draws.integers(0, 0, INDICES, 0, 0)


def test_numbers_below_one_are_even_and_known():
    drawn = counter_draws.uniform(3, 0, INDICES, counter_draws.ROTATION)
    assert 0 <= drawn.min() < 1e-3
    assert 1 - 1e-3 < drawn.max() < 1
    assert np.abs(np.histogram(drawn, 50, (0, 1))[0] - 2000).max() < 5 * np.sqrt(2000)
    # The same bits as the integers, seen more finely.
    assert np.array_equal(
        (drawn * MOST).astype(np.int64), counter_draws.integers(3, 0, INDICES, counter_draws.ROTATION, MOST)
    )
