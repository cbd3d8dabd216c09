"""The stateless sampler: which samples make up which step of which rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.errors import DataError
from ptfast.data.sampling.sampler import (
    Sampler,
    Sharding,
    micro_batch_bounds,
    permutation,
    smallest_micro_batch,
)


def sampler(size: int, **changes: object) -> Sampler:
    given: Any = {
        "batch_size": 8,
        "micro_batches": 1,
        "rank": 0,
        "world_size": 1,
        "seed": 0,
        "drop_last": False,
    }
    given |= changes
    sharding = {name: given[name] for name in ("micro_batches", "rank", "world_size")}
    return Sampler(
        Sharding(BatchPlan(size, given["batch_size"], given["drop_last"]), **sharding), given["seed"]
    )


def test_the_known_order_does_not_change():
    assert permutation(0, 0, 10).tolist() == [4, 5, 8, 3, 7, 2, 0, 6, 1, 9]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000])
def test_a_permutation_holds_every_sample_once(size: int):
    assert sorted(permutation(5, 1, size).tolist()) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [permutation(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1)]
    fixed = [int((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(fixed) < 10


def test_micro_batches_are_cut_evenly():
    assert micro_batch_bounds(10, 4) == ((0, 2), (2, 5), (5, 7), (7, 10))
    assert micro_batch_bounds(2, 4) == ((0, 0), (0, 1), (1, 1), (1, 2))


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_covers_the_data_once(drop_last: bool):
    s = sampler(20, drop_last=drop_last)
    assert s.plan.steps_per_epoch == (2 if drop_last else 3)
    seen = np.concatenate(
        [share.indices for step in range(s.plan.steps_per_epoch) for share in s.step(step)[0]]
    )
    assert len(set(seen.tolist())) == len(seen) == (16 if drop_last else 20)
    assert s.step(s.plan.steps_per_epoch)[0][0].epoch == 1


@pytest.mark.parametrize(("size", "extra"), [(20, 4), (24, 0), (5, 3), (3, 5)])
def test_a_padded_epoch_ends_with_samples_of_its_beginning(size: int, extra: int):
    s = sampler(size, drop_last="pad", micro_batches=2)
    for epoch in (0, 1):
        steps = range(epoch * s.plan.steps_per_epoch, (epoch + 1) * s.plan.steps_per_epoch)
        found = [s.step(step) for step in steps]
        assert all(total == 8 for _, total in found)
        assert all([share.num_samples for share in shares] == [4, 4] for shares, _ in found)
        seen = np.concatenate([share.indices for shares, _ in found for share in shares])
        order = permutation(0, epoch, size)
        assert seen.tolist() == (order.tolist() * 3)[: size + extra]
    assert s.plan.all_sizes() == {8}


def test_ranks_take_runs_of_the_same_micro_batches_in_order():
    alone = sampler(23, micro_batches=4)
    pair = [sampler(23, micro_batches=4, rank=rank, world_size=2) for rank in (0, 1)]
    for step in range(7):
        shares, num_samples = alone.step(step)
        both = [s.step(step) for s in pair]
        assert all(total == num_samples for _, total in both)
        split = [share for part, _ in both for share in part]
        assert [s.num_samples for s in split] == [s.num_samples for s in shares]
        assert all(np.array_equal(a.indices, b.indices) for a, b in zip(split, shares, strict=True))


def test_an_empty_share_has_a_stand_in_that_counts_for_nothing():
    shares, num_samples = sampler(9, micro_batches=4).step(1)
    assert num_samples == 1
    assert [share.num_samples for share in shares] == [0, 0, 0, 1]
    assert all(len(share.indices) == 1 for share in shares)


def test_dropping_the_only_batch_is_refused():
    with pytest.raises(DataError, match=r"batch_size=8: 5 training samples do not fill one batch"):
        sampler(5, drop_last=True)
    assert sampler(5).plan.steps_per_epoch == 1


def test_no_samples_are_refused():
    with pytest.raises(DataError) as error:
        sampler(0)
    assert error.value.code == "D002"


@pytest.mark.parametrize(
    ("size", "batch_size", "micro_batches", "drop_last", "smallest"),
    [
        (17, 8, 1, False, 1),
        (17, 8, 1, True, 8),
        (16, 8, 4, False, 2),
        (18, 8, 2, False, 1),
        (5, 8, 2, False, 2),
    ],
)
def test_the_smallest_micro_batch(
    size: int, batch_size: int, micro_batches: int, drop_last: bool, smallest: int
):
    s = sampler(size, batch_size=batch_size, micro_batches=micro_batches, drop_last=drop_last)
    assert smallest_micro_batch(s.plan.all_sizes(), micro_batches) == smallest
    seen = [share.num_samples for step in range(s.plan.steps_per_epoch) for share in s.step(step)[0]]
    assert min(n for n in seen if n) == smallest
