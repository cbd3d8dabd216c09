"""Batches that grow: which samples make up each step, and what an epoch is in steps."""

from __future__ import annotations

import itertools

import pytest

from ptfast.core.batch_plan import BatchPlan, DropLast, Stages, constant, grow
from ptfast.core.durations import Duration


def walked(size: int, sizes: Stages, drop_last: DropLast, num_steps: int) -> list[tuple[int, int, int]]:
    """The batches of the first steps, taken one after another."""
    found, epoch, position = [], 0, 0
    for step in range(num_steps):
        batch = sizes.values[max(i for i, start in enumerate(sizes.starts) if start <= step)]
        if position >= size or (drop_last is True and position + batch > size):
            epoch, position = epoch + 1, 0
        found.append(
            (epoch, position, position + batch if drop_last == "pad" else min(position + batch, size))
        )
        position += batch
    return found


def test_stages_are_multiples_and_equally_long() -> None:
    assert grow(16, 32, 8, 100) == Stages((16, 24, 32), (0, 50, 100))
    assert grow(12, 32, 8, 90) == Stages((12, 16, 24, 32), (0, 30, 60, 90))
    assert grow(5, 8, 64, 7) == Stages((5, 8), (0, 7))
    stages = grow(16, 32, 8, 100)
    assert [stages.at(step) for step in (0, 49, 50, 99, 100, 10_000)] == [16, 16, 24, 24, 32, 32]


CASES = list(
    itertools.product(
        [(23, grow(2, 8, 2, 9)), (100, grow(3, 12, 3, 40)), (40, grow(10, 40, 10, 3)), (50, constant(8))],
        [False, True, "pad"],
    )
)


@pytest.mark.parametrize(("case", "drop_last"), CASES)
def test_batches_are_those_taken_one_after_another(case: tuple[int, Stages], drop_last: DropLast) -> None:
    size, sizes = case
    plan = BatchPlan(size, sizes, drop_last)
    assert [plan.batch(step) for step in range(80)] == walked(size, sizes, drop_last, 80)


@pytest.mark.parametrize(("case", "drop_last"), CASES)
def test_an_epoch_has_every_sample_once(case: tuple[int, Stages], drop_last: DropLast) -> None:
    size, sizes = case
    plan = BatchPlan(size, sizes, drop_last)
    for epoch in range(6):
        first, end = (plan.steps(Duration(n, "epochs"), None) if n else 0 for n in (epoch, epoch + 1))
        batches = [plan.batch(step) for step in range(first, end)]
        assert {e for e, _, _ in batches} == {epoch}
        seen = [sample for _, start, stop in batches for sample in range(start, stop)]
        assert seen == list(range(len(seen)))
        most = sizes.values[-1]
        fits: dict[DropLast, bool] = {
            False: len(seen) == size,
            True: size - most < len(seen) <= size,
            "pad": size <= len(seen) < size + most,
        }
        assert fits[drop_last]
        assert plan.epoch_of(first) == plan.epoch_of(end - 1) == (epoch, first, end)
        assert (plan.epoch_at(first), plan.epoch_at(end)) == (epoch, epoch + 1)
        assert plan.all_sizes() >= {stop - start for _, start, stop in batches}


def test_what_happens_every_epoch_happens_at_its_end() -> None:
    plan = BatchPlan(100, grow(10, 50, 10, 25))
    ends = list(plan.every(Duration(1, "epochs"), 40))
    walk = walked(100, plan.sizes, "keep", 41)
    assert ends == [step for step in range(1, 41) if walk[step][0] != walk[step - 1][0]]
    assert list(plan.every(Duration(100, "samples"), 40)) == ends
    assert list(plan.every(Duration(2, "epochs"), 40)) == ends[1::2]
    halves = plan.every(Duration(0.5, "epochs"), 40)
    assert set(ends) < set(halves)
    assert len(halves) == len(ends) * 2 + (halves[-1] > ends[-1])
    assert plan.every(Duration(7, "steps"), 40) == range(7, 41, 7)
    assert plan.every(Duration(50, "percent"), 40) == range(20, 41, 20)
    assert plan.every(Duration(0, "steps"), 40) == ()


def test_a_plan_that_does_not_grow_counts_as_ever() -> None:
    plan = BatchPlan(100, constant(8))
    assert plan.steps_per_epoch == 13
    assert plan.every(Duration(1, "epochs"), 60) == range(13, 61, 13)
    assert plan.steps(Duration(1.5, "epochs"), None) == 20
    assert plan.steps(Duration(96, "samples"), None) == 12
    assert plan.epoch_at(14) == 14 / 13


def test_data_without_a_length_is_one_endless_epoch() -> None:
    plan = BatchPlan(None, grow(2, 6, 2, 4))
    assert [plan.batch(step) for step in range(6)] == [
        (0, 0, 2),
        (0, 2, 4),
        (0, 4, 8),
        (0, 8, 12),
        (0, 12, 18),
        (0, 18, 24),
    ]
    assert plan.epoch_at(5) == 0
    with pytest.raises(ValueError, match="known length"):
        plan.steps(Duration(1, "epochs"), 10)
