"""Which samples make up each step, and what an epoch is in steps."""

from __future__ import annotations

import itertools

import pytest

from ptfast.core.batch_plan import BatchPlan, DropLast
from ptfast.core.durations import Duration


def walked(size: int, batch: int, drop_last: DropLast, num_steps: int) -> list[tuple[int, int, int]]:
    """The batches of the first steps, taken one after another."""
    found, epoch, position = [], 0, 0
    for _ in range(num_steps):
        if position >= size or (drop_last is True and position + batch > size):
            epoch, position = epoch + 1, 0
        found.append(
            (epoch, position, position + batch if drop_last == "pad" else min(position + batch, size))
        )
        position += batch
    return found


CASES = list(itertools.product([(23, 2), (100, 12), (40, 10), (50, 8)], [False, True, "pad"]))


@pytest.mark.parametrize(("case", "drop_last"), CASES)
def test_batches_are_those_taken_one_after_another(case: tuple[int, int], drop_last: DropLast) -> None:
    assert [BatchPlan(*case, drop_last).batch(step) for step in range(80)] == walked(*case, drop_last, 80)


@pytest.mark.parametrize(("case", "drop_last"), CASES)
def test_an_epoch_has_every_sample_once(case: tuple[int, int], drop_last: DropLast) -> None:
    size, most = case
    plan = BatchPlan(size, most, drop_last)
    for epoch in range(6):
        first, end = (plan.steps(Duration(n, "epochs"), None) if n else 0 for n in (epoch, epoch + 1))
        batches = [plan.batch(step) for step in range(first, end)]
        assert {e for e, _, _ in batches} == {epoch}
        seen = [sample for _, start, stop in batches for sample in range(start, stop)]
        assert seen == list(range(len(seen)))
        fits = {
            False: len(seen) == size,
            True: size - most < len(seen) <= size,
            "pad": size <= len(seen) < size + most,
        }
        assert fits[drop_last]
        assert plan.epoch_of(first) == plan.epoch_of(end - 1) == (epoch, first, end)
        assert (plan.epoch_at(first), plan.epoch_at(end)) == (epoch, epoch + 1)
        assert plan.all_sizes() == {stop - start for _, start, stop in batches}


def test_durations_in_steps() -> None:
    plan = BatchPlan(100, 8)
    assert plan.steps_per_epoch == 13
    assert plan.every(Duration(1, "epochs"), 60) == range(13, 61, 13)
    assert plan.every(Duration(7, "steps"), 40) == range(7, 41, 7)
    assert plan.every(Duration(50, "percent"), 40) == range(20, 41, 20)
    assert not plan.every(Duration(0, "steps"), 40)
    assert plan.steps(Duration(1.5, "epochs"), None) == 20
    assert plan.steps(Duration(96, "samples"), None) == 12
    assert plan.epoch_at(14) == 14 / 13


def test_data_without_a_length_is_one_endless_epoch() -> None:
    plan = BatchPlan(None, 6)
    assert [plan.batch(step) for step in range(3)] == [(0, 0, 6), (0, 6, 12), (0, 12, 18)]
    assert plan.epoch_at(5) == 0
    assert plan.all_sizes() == {6}
    with pytest.raises(ValueError, match="known length"):
        plan.steps(Duration(1, "epochs"), 10)
