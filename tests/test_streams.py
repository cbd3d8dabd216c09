"""Iterable data over ranks and workers: every sample once, the same batches whoever reads them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Capture
from running import build_run, same_bits, summary, train, weights
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from ptfast.data import build_data, build_eval_loader, choice
from ptfast.data.alike import Digest, sum_of
from ptfast.data.choice import choose
from ptfast.data.iterable import IterableSource, shuffled
from ptfast.data.loaders import build_train_loader
from ptfast.data.prepare import build_prepare
from ptfast.data.streams import PartsLoader, StreamLoader, build_stream_loader, share_out
from ptfast.durations import Duration
from ptfast.errors import ConfigError, DataError
from ptfast.plan import BatchPlan, constant
from ptfast.run import StepBatch

SIZES = (7, 2, 11, 1, 5, 3, 4)
"""Samples in each shard of the data sets below."""
NUMBERS = [float(number) for number in range(sum(SIZES))]


class Plain(IterableDataset[Any]):
    """Numbers, in order, whoever asks."""

    num_classes = 2

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(number)]), int(number) % 2) for number in NUMBERS)


class Sharded(IterableDataset[Any]):
    """The same out of shards, which it shares out over the workers it hears of."""

    num_classes = 2

    def __init__(self, num_shards: int | None = None) -> None:
        if num_shards is not None:
            self.num_shards = num_shards

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = slice(0, None) if info is None else slice(info.id, None, info.num_workers)
        ends = itertools.accumulate(SIZES)
        for start, end in [(end - size, end) for end, size in zip(ends, SIZES, strict=True)][mine]:
            for number in range(start, end):
                yield torch.tensor([float(number)]), number % 2


class WithHeldOut(Sharded):
    """With a held-out split of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.val, self.test = Sharded(), TensorDataset(torch.tensor([[0.5], [2.5]]), torch.tensor([0, 1]))


class OfRank(Plain):
    """Another one on each rank, which it does not tell."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), torch.distributed.get_rank(), None)


class LateOfRank(Plain):
    """Another one on each rank, from the fourth sample on."""

    def __iter__(self) -> Iterator[Any]:
        numbers = islice(super().__iter__(), 3), islice(super().__iter__(), 3 + self.rank(), None, 2)
        return itertools.chain(*numbers)

    def rank(self) -> int:
        return torch.distributed.get_rank()


class SaysSo(LateOfRank):
    """The same, of which each worker of a rank has a part, and says so."""

    shared_by = "ranks"

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        return islice(super().__iter__(), info.id, None, info.num_workers)


class Asks(Plain):
    """Asks who reads, and yields all that it has to anybody."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        self.seen_by = info.id if info is not None else 0
        return super().__iter__()


class Noisy(Sharded):
    """With noise from the global generator, and shards in an order of the pass's own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for value, label in super().__iter__():
            yield value + 100 * self.epoch + torch.rand(1) / 2, label


def load(dataset: Any, **options: Any) -> Any:
    return build_data(dataset, val=Duration(10, "percent"), seed=0, task="auto", **options)


def build(dataset: Any, sums: Any = None, **options: Any) -> Any:
    """A loader of steps of six samples; `sums` in place of a process group."""
    source = IterableSource(dataset, 0) if isinstance(dataset, IterableDataset) else dataset
    data = load(Plain())
    prepare = build_prepare(
        source, data.info, device=torch.device("cpu"), normalize=False, channels_last=False, pin=False
    )
    given: dict[str, Any] = {"kind": "plain", "workers": 0, "rank": 0, "num_ranks": 1}
    given |= {"micro_batches": 2, "prefetch": 2, "threads": 1, "last": "keep", **options}
    plan = BatchPlan(None, constant(6))
    if sums is None:
        return build_stream_loader(source, prepare, plan, **given)
    hands = share_out(source, **{k: given[k] for k in ("kind", "workers", "rank", "num_ranks")})
    pools = {"prefetch": 2, "pin": False, "threads": 1}
    return PartsLoader(
        source, prepare, hands, plan, given["micro_batches"], last=given["last"], sums=sums, **pools
    )


def values(batch: StepBatch) -> list[float]:
    """The samples of a batch that count."""
    return [float(value) for data, number in batch.micro_batches for value in data[0].flatten()[:number]]


def some(loader: Any, num_steps: int, first: int = 0) -> list[list[float]]:
    with_closing = loader.steps(first, first + num_steps)
    found = [values(batch) for batch in with_closing]
    loader.close()
    return found


class Together:
    """Sums over ranks that are threads of this process, one of which runs at a time."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.running = threading.Barrier(num_ranks, timeout=20), threading.Lock()
        self.num_ranks, self.asked = num_ranks, list[list[list[int]]]()

    def of_rank(self) -> Callable[[Sequence[int]], Callable[[], list[int]]]:
        counter = itertools.count()

        def begin(numbers: Sequence[int]) -> Callable[[], list[int]]:
            turn = next(counter)
            if turn == len(self.asked):
                self.asked.append([])
            self.asked[turn].append(list(numbers))

            def finish() -> list[int]:
                self.running.release()
                self.barrier.wait()
                self.running.acquire()
                assert len(self.asked[turn]) == self.num_ranks
                return [sum(column) for column in zip(*self.asked[turn], strict=True)]

            return finish

        return begin


def over_ranks(num_steps: int, dataset: Any = Sharded, **options: Any) -> list[list[StepBatch]]:
    """The batches of two ranks that read together."""
    together = Together(2)
    found: dict[int, list[StepBatch]] = {}
    built = [build(dataset(), together.of_rank(), rank=r, num_ranks=2, **options) for r in range(2)]

    def run(rank: int) -> None:
        with together.running:
            batches = built[rank].steps(0, num_steps)
            found[rank] = list(islice(batches, num_steps))
            batches.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for loader in built:
        loader.close()
    return [found[0], found[1]]


def test_under_keep_two_ranks_of_three_workers_read_every_sample_exactly_once() -> None:
    """Six readers of seven uneven shards, up to the end of the first pass, and the second likewise."""
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
        assert refusals[name].startswith(f"D008: data: {name} yields other samples on each rank (in step 1)")
        assert 'Give it shared_by = "ranks" if it parts itself over ranks' in refusals[name]
    assert refusals["Asks"].startswith("D008: data: Asks yields the same to each of 6 readers: every sample")
    assert refusals["SaysSo"] == ""


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 1), (2, 2), (3, 6)])
def test_readers_that_all_read_the_same_are_noticed(workers: int, micro_batches: int) -> None:
    with pytest.raises(DataError, match=f"yields the same to each of {workers} readers") as caught:
        some(build(Asks(), kind="workers", workers=workers, micro_batches=micro_batches), 9)
    assert caught.value.code == "D008"
    # One reader has nobody to differ from, and readers of shards have parts of their own.
    assert len(some(build(Asks()), 9)) == 9
    assert len(some(build(Sharded(), kind="workers", workers=workers, micro_batches=micro_batches), 9)) == 9


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
    assert Digest().add(samples[:2]) != Digest().add(reversed(samples[:2]))
    assert Digest().add(samples[:1] * 3) == 0


def test_parts_do_not_depend_on_where_they_are_read() -> None:
    """One worker of each rank gives what ranks give that read by themselves."""
    alone, by_workers = over_ranks(9), over_ranks(9, kind="workers", workers=1)
    assert same_bits([list(map(values, rank)) for rank in alone], [list(map(values, r)) for r in by_workers])


def test_under_drop_all_ranks_end_a_pass_together_before_the_first_short_step() -> None:
    first, second = over_ranks(4, last="drop", micro_batches=2)
    sizes = [[len(values(batch)) for batch in rank] for rank in (first, second)]
    assert sizes == [[3] * 4] * 2
    # The second rank's three shards hold six samples.
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
        some(build(Plain(), micro_batches=4, kind="workers", workers=workers, rank=r, num_ranks=2), 4)
        for r in (0, 1)
    ]
    joined = [a + b for a, b in zip(*of_ranks, strict=True)]
    assert joined == expected[:4]


def test_a_data_set_that_shares_itself_out_gets_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "spare_cores", lambda: 4)
    hands = share_out(IterableSource(Sharded(), 0), kind="workers", workers=3, rank=1, num_ranks=2)
    assert hands.in_parts
    assert hands.reason == "3 processes, the data set shares itself out over 6 readers"
    assert get_worker_info() is None
    chosen = choose(IterableSource(Sharded(), 0), kind="auto")
    assert (chosen.kind, chosen.workers) == ("workers", 3)
    chosen = choose(IterableSource(Sharded(num_shards=5), 0), kind="auto", num_ranks=2)
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
    with source.told(source_reader := _reader(rank=1, worker=2)):
        info: Any = get_worker_info()
        assert (info.id, info.num_workers) == (2, 3)
    dataset.shared_by = "readers"
    with IterableSource(dataset, 0).told(source_reader):
        info = get_worker_info()
        assert (info.id, info.num_workers) == (5, 6)
    dataset.shared_by = "shards"
    with pytest.raises(DataError, match='It is "none", "readers" or "ranks"'):
        _ = source.shared_by


def _reader(*, rank: int, worker: int) -> Any:
    from ptfast.data.iterable import Reader

    return Reader(rank, 2, worker, 3)


def test_more_readers_than_shards_are_refused() -> None:
    source = IterableSource(Sharded(num_shards=7), 0)
    with pytest.raises(
        ConfigError, match=r"8 readers, and .* 7 shards .* Use dataloader.workers=3"
    ) as caught:
        share_out(source, kind="workers", workers=4, rank=0, num_ranks=2)
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


def test_a_buffer_shuffles_and_loses_nothing() -> None:
    order = list(shuffled(iter(range(1000)), 64, seed=3))
    assert sorted(order) == list(range(1000))
    assert order == list(shuffled(iter(range(1000)), 64, seed=3))
    assert order != list(shuffled(iter(range(1000)), 64, seed=4))
    # None comes more than 63 early; most come within a few sizes.
    assert max(value - place for place, value in enumerate(order)) <= 63
    assert torch.corrcoef(torch.tensor([order[:64], list(range(64))], dtype=torch.float64))[0, 1] < 0.6
    assert list(shuffled(iter(range(9)), 1, seed=3)) == list(range(9))


def test_a_buffered_stream_is_the_same_for_any_workers_and_resumes() -> None:
    def loader(**options: Any) -> Any:
        source = load(Plain(), shuffle_buffer=8).train
        return build(source, micro_batches=2, **options)

    whole = some(loader(), 12)
    assert some(loader(kind="workers", workers=2), 12) == whole
    assert some(loader(), 5, first=7) == whole[7:]
    flat = [value for step in whole for value in step]
    assert flat[: len(NUMBERS)] != NUMBERS
    assert sorted(flat[: len(NUMBERS)]) == NUMBERS


def test_a_map_style_data_set_has_no_buffer() -> None:
    with pytest.raises(ConfigError, match=r"data.shuffle_buffer=8: this data is shuffled as a whole"):
        load(TensorDataset(torch.rand(20, 3), torch.arange(20) % 2), shuffle_buffer=8)


@pytest.mark.parametrize("workers", [0, 3])
def test_resuming_begins_with_the_pass_that_the_run_was_in(workers: int) -> None:
    def loader() -> Any:
        return build(Noisy(), kind="workers", workers=workers)

    one = loader()
    whole = [values(batch) for batch in one.steps(0, 20)]
    one.close()
    assert max(value for step in whole for value in step) > 200
    state = one.marks.state(14)
    assert state["epoch"] >= 2
    again = loader()
    note = again.marks.load(state, 14)
    assert (
        note == f"iterable data is read again from the start of its pass {state['epoch'] + 1} up to step 14"
    )
    assert some(again, 6, first=14) == whole[14:]
    assert "had cut otherwise" in loader().marks.load({**state, "readers": 9}, 14)


def test_an_evaluation_reads_every_sample_once() -> None:
    data = load(WithHeldOut())
    assert data.note == "WithHeldOut: train of unknown length, val of unknown length, 2 test"
    shared: dict[str, Any] = {"batch_size": 4, "device": torch.device("cpu"), "normalize": False}
    for options in ({"kind": "plain"}, {"kind": "workers", "workers": 3}):
        loader: Any = build_eval_loader(
            data.val, data.info, rank=0, num_ranks=1, channels_last=False, **shared, **options
        )
        for _ in range(2):
            batches = [(batch.data[0].flatten(), batch.num_samples) for batch in loader]
            assert sorted(float(v) for inputs, number in batches for v in inputs[:number]) == NUMBERS
        loader.close()
    whole = load(Plain())
    of_ranks: list[list[Any]] = []
    for rank in range(3):
        loader = build_eval_loader(
            whole.train, whole.info, rank=rank, num_ranks=3, channels_last=False, **shared
        )
        of_ranks.append(list(loader))
    assert len({len(batches) for batches in of_ranks}) == 1
    seen = [float(v) for batches in of_ranks for data, n in batches for v in data[0].flatten()[:n]]
    assert sorted(seen) == NUMBERS


class Images(IterableDataset[Any]):
    """Images as torchvision has them."""

    num_classes = 2

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for number in range(12):
            yield torch.randint(256, (3, 4, 6), dtype=torch.uint8, generator=generator), number % 2


def test_images_of_a_stream_are_scaled() -> None:
    data = load(Images())
    prepare = build_prepare(
        data.train, data.info, device=torch.device("cpu"), normalize=True, channels_last=False, pin=False
    )
    loader = build_stream_loader(
        data.train,
        prepare,
        BatchPlan(None, constant(4)),
        micro_batches=1,
        kind="auto",
        workers=0,
        rank=0,
        num_ranks=1,
        last="keep",
        prefetch=2,
        threads=1,
    )
    assert isinstance(loader, StreamLoader)
    (batch,) = loader.steps(0, 1)
    expected = torch.stack([image for image, _ in islice(Images(), 4)]) / 255
    torch.testing.assert_close(batch.micro_batches[0].data[0], expected)


def test_a_run_trains_evaluates_and_resumes(in_tmp: Path, capsys: Capture) -> None:
    words = ("data=custom", "data._target_=test_streams.WithHeldOut", "model.hidden=[4]", "batch_size=6")
    words = (*words, "data.shuffle_buffer=4", "schedule=constant", "saving.every=4steps", "log_every=1")
    words = (
        *words,
        "dataloader=workers",
        "dataloader.workers=2",
        "data.normalize=false",
        "eval.every=6steps",
    )
    assert train(*words, "steps=14", "run.dir=whole") == 0
    assert "workers (2 processes, the data set shares itself out over 2 readers)" in capsys.readouterr().out
    assert train(*words, "steps=10", "run.dir=parts") == 0
    assert train(*words, "steps=14", "run.dir=parts", "run.resume=auto") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "iterable data is read again from the start of its pass 2 up to step 10" in out
    assert same_bits(weights(Path("parts")), weights(Path("whole")))
    assert summary(Path("whole"))["val"] == summary(Path("parts"))["val"]
    assert {"loss", "accuracy"} <= set(summary(Path("whole"))["test"])


def test_batches_that_grow_need_a_whole_stream(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=test_streams.Sharded", "batch_size=8", "steps=10")
    words = (*words, "curriculum=batch_size", "dataloader=workers", "dataloader.workers=2")
    with pytest.raises(ConfigError, match="cannot grow") as caught:
        build_run(tmp_path, *words)
    assert caught.value.key == "curriculum.batch_size_from"
    with pytest.raises(ConfigError, match="keep or drop"):
        build(Sharded(), kind="workers", workers=2, last="pad")


def test_the_loader_of_a_run_is_built_by_the_same_rules() -> None:
    data = load(Sharded())
    loader = build_train_loader(
        data,
        task_name="auto",
        batch_size=6,
        micro_batches=2,
        rank=0,
        num_ranks=1,
        seed=0,
        augment={},
        normalize=False,
        kind="workers",
        workers=2,
        prefetch=2,
        pin=False,
        last="keep",
        device=torch.device("cpu"),
        channels_last=False,
    )
    assert isinstance(loader, PartsLoader)
    assert loader.kind == "workers"
