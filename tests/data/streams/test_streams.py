"""Iterable data over ranks and workers: every sample once, the same batches whoever reads them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from running import same_bits
from streamed import (
    NUMBERS,
    Asks,
    Noisy,
    Plain,
    Sharded,
    build,
    over_ranks,
    some,
    values,
)
from torch.utils.data import get_worker_info

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.loaders import loader_choice
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.loaders.pipeline import LoaderOptions
from ptfast.data.sampling.sampler import Sharding
from ptfast.data.streams import stream_loaders
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.stream_loaders import digest, share_out, sum_of


def test_under_keep_two_ranks_of_three_workers_read_every_sample_exactly_once() -> None:
    """Six data workers of seven uneven shards, up to the end of the first pass, and the second likewise."""
    first, second = over_ranks(24, kind="workers", workers=3)
    assert [batch.num_samples for batch in first] == [batch.num_samples for batch in second]
    seen, passes = Counter[float](), 0
    for one, other in zip(first, second, strict=True):
        assert len(values(one)) + len(values(other)) == one.num_samples
        seen.update(values(one) + values(other))
        assert max(seen.values()) <= passes + 1
        if seen == Counter(dict.fromkeys(NUMBERS, passes + 1)):
            passes += 1
    assert passes >= 2


def test_two_processes_share_a_stream_and_go_on_to_the_same_bits(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["stream"] == NUMBERS
    assert two_ranks["stream resumes"]
    refusals = {name: two_ranks[f"stream {name}"] for name in ("OfRank", "LateOfRank", "Asks", "SaysSo")}
    for name in ("OfRank", "LateOfRank"):
        assert refusals[name].startswith(
            f"D008: data: {name} yields different samples on each rank, and does not say why"
        )
        assert 'Give it shared_by = "ranks" if it splits itself over ranks' in refusals[name]
    assert refusals["Asks"].startswith("D008: data: Asks yields the same to each of 6 workers: every sample")
    assert refusals["SaysSo"] == ""


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 1), (2, 2), (3, 3), (2, 6)])
def test_data_workers_that_all_read_the_same_are_noticed(workers: int, micro_batches: int) -> None:
    with pytest.raises(DataError, match=f"yields the same to each of {workers} workers") as caught:
        some(build(Asks(), kind="workers", workers=workers, micro_batches=micro_batches), 9)
    assert caught.value.code == "D008"
    # A lone data worker differs from none, and those of shards have parts of their own.
    assert len(some(build(Asks()), 9)) == 9
    assert len(some(build(Sharded(), kind="workers", workers=workers, micro_batches=micro_batches), 9)) == 9


def test_ranks_are_compared_once_and_not_at_each_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(stream_loaders, "on_all_ranks", lambda value, _: compared.append(value) or [value])
    batches = build(Sharded(), kind="workers", workers=2)
    first = some(batches, 3)
    assert some(batches, 3) == first
    assert len(compared) == 1


class Constant(Sharded):
    """Samples of which each is like any other: nothing tells who reads what."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(1), 1) for _ in super().__iter__())


def test_samples_that_are_all_alike_tell_nothing() -> None:
    assert len(some(build(Constant(), kind="workers", workers=2), 5)) == 5


def test_what_tells_samples_apart() -> None:
    image = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    samples: list[Any] = [
        (image, 1),
        (image.flip(0), 1),
        (image, 2),
        {"image": image, "label": 1},
        (image.permute(2, 1, 0).numpy(), "a text"),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.zeros(0),
    ]
    sums = [sum_of(sample) for sample in samples]
    assert len({*sums}) == len(samples)
    assert sum_of((image.clone(), 1)) == sums[0]
    assert digest(samples[:2]) != digest(reversed(samples[:2]))
    assert digest(samples[:1] * 3) == 0


def test_parts_do_not_depend_on_where_they_are_read() -> None:
    """One worker of each rank gives what ranks give that read by themselves."""
    alone, by_workers = over_ranks(9), over_ranks(9, kind="workers", workers=1)
    assert same_bits([list(map(values, rank)) for rank in alone], [list(map(values, r)) for r in by_workers])


def test_under_drop_all_ranks_end_a_pass_together_before_the_first_short_step() -> None:
    first, second = over_ranks(4, drop_last=True, micro_batches=2)
    sizes = [[len(values(batch)) for batch in rank] for rank in (first, second)]
    assert sizes == [[3] * 4] * 2
    # The second rank's three shards contain six samples.
    numbers = [sorted(values(a) + values(b)) for a, b in zip(first, second, strict=True)]
    assert numbers[:2] == numbers[2:]
    assert len({*numbers[0], *numbers[1]}) == 12


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_stream_that_is_not_shared_out_is_the_same_for_any_workers(workers: int) -> None:
    expected = some(build(Plain(), micro_batches=3), 12)
    assert some(build(Plain(), micro_batches=3, kind="workers", workers=workers), 12) == expected
    flat = [value for step in expected for value in step]
    assert flat == [*itertools.islice(itertools.cycle(NUMBERS), 72)]
    of_ranks = [
        some(build(Plain(), micro_batches=4, kind="workers", workers=workers, rank=r, world_size=2), 4)
        for r in (0, 1)
    ]
    joined = [a + b for a, b in zip(*of_ranks, strict=True)]
    assert joined == expected[:4]


def on_two_ranks(workers: int) -> tuple[Sharding, LoaderOptions]:
    sharding = Sharding(BatchPlan(None, 6), 2, 1, 2)
    return sharding, LoaderOptions(torch.device("cpu"), kind="workers", workers=workers)


def test_a_data_set_that_shares_itself_out_gets_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_choice, "spare_cores", lambda: 4)
    workers, in_parts, reason = share_out(IterableSource(Sharded(), 0), *on_two_ranks(3))
    assert workers == 3
    assert in_parts
    assert reason == "3 processes, the dataset shares itself out over 6 data workers"
    assert get_worker_info() is None
    chosen = choose(IterableSource(Sharded(), 0), kind="auto")
    assert (chosen.kind, chosen.workers) == ("workers", 3)
    chosen = choose(IterableSource(Sharded(num_shards=5), 0), kind="auto", world_size=2)
    assert (chosen.kind, chosen.workers) == ("workers", 2)
    chosen = choose(IterableSource(Plain(), 0), kind="auto")
    assert (chosen.kind, chosen.workers) == ("plain", 0)
    # A second process would only read the same again.
    assert choose(IterableSource(Plain(), 0), kind="workers").workers == 1
    assert choose(IterableSource(Plain(), 0), kind="workers", workers=2).workers == 2


def test_what_a_data_set_says_of_itself_counts() -> None:
    dataset: Any = Sharded()
    dataset.shared_by = "none"
    assert IterableSource(dataset, 0).shared_by == "none"
    dataset.shared_by = "ranks"
    source = IterableSource(dataset, 0)
    with source.as_worker(worker := _worker(rank=1, worker=2)):
        info: Any = get_worker_info()
        assert (info.id, info.num_workers) == (2, 3)
    dataset.shared_by = "readers"
    with IterableSource(dataset, 0).as_worker(worker):
        info = get_worker_info()
        assert (info.id, info.num_workers) == (5, 6)
    dataset.shared_by = "shards"
    with pytest.raises(DataError, match='It is "none", "workers" or "ranks"'):
        _ = source.shared_by


def _worker(*, rank: int, worker: int) -> Any:
    from ptfast.data.streams.iterable import DataWorker

    return DataWorker(rank, 2, worker, 3)


def test_more_data_workers_than_shards_are_refused() -> None:
    source = IterableSource(Sharded(num_shards=7), 0)
    with pytest.raises(
        ConfigError, match=r"8 data workers, and .* 7 shards .* Use dataloader.workers=3"
    ) as caught:
        share_out(source, *on_two_ranks(4))
    assert caught.value.code == "C011"


def test_workers_without_a_shard_are_no_trouble() -> None:
    loader = build(Sharded(), kind="workers", workers=9)
    first_pass = [value for step in some(loader, 8) for value in step][: len(NUMBERS)]
    assert sorted(first_pass) == NUMBERS


def test_a_data_set_that_no_other_process_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_start_method", lambda: "spawn")
    dataset: Any = Sharded()
    build(dataset, kind="workers", workers=2).close()
    dataset.change = lambda value: value
    with pytest.raises(
        DataError, match=r"cannot be sent to worker processes, which start by spawn"
    ) as caught:
        build(dataset, kind="workers", workers=2)
    assert caught.value.code == "D008"


@pytest.mark.slow
def test_workers_that_are_not_forked_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = some(build(Noisy(), kind="workers", workers=2), 8)
    monkeypatch.setattr("torch.multiprocessing.get_start_method", lambda: "spawn")
    assert some(build(Noisy(), kind="workers", workers=2), 8) == expected
