"""The ledger of a run: every second of its wall time booked on what it went to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import build_run, same_bits, summary, train
from torch import Tensor, nn

from ptfast.config.read import read_config
from ptfast.core import clock as clocks
from ptfast.core.clock import CAUSES, SAMPLED, STEP, Clock, DeviceClock
from ptfast.core.protocols import Callback
from ptfast.launch.rank_main import Outcome, RankPart
from ptfast.training.fit import fit

LATE_S = 0.02


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host's time in seconds, for the test to set."""
    now = [0.0]
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    return now


def test_time_goes_to_one_cause_after_another(now: list[float]) -> None:
    clock = Clock(age_s=3.0)
    now[0] = 1.0
    clock.to("forward")
    now[0] = 1.5
    clock.to("backward")
    now[0] = 2.5
    clock.to(None)
    now[0] = 2.75
    clock.to("forward")
    now[0] = 3.0
    budget = clock.ledger()
    assert tuple(budget) == CAUSES
    expected = {"start_up": 4.0, "forward": 0.75, "backward": 1.0, "unexplained": 0.25}
    assert {cause: seconds for cause, seconds in budget.items() if seconds} == expected
    assert sum(budget.values()) == clock.elapsed_s() == 6.0


def test_what_happens_while_warming_up_is_one_cause(now: list[float]) -> None:
    clock = Clock()
    now[0] = 1.0

    def warm_up() -> None:
        with clock.gathering("warm_up"):
            for cause in ("data", "forward", None, "optimizer"):
                clock.to(cause)
                now[0] += 1.0
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        warm_up()
    assert dict(clock.seconds) == {"start_up": 1.0, "warm_up": 4.0}
    now[0] += 0.5
    clock.to("saving")
    now[0] += 0.25
    assert clock.ledger()["unexplained"] == 0.5


class Queue:
    """A device that works through what it is asked for one after the other, while the host goes on."""

    def __init__(self, now: list[float]) -> None:
        self.now, self.free_s, self.waits, self.made = now, 0.0, 0, 0

    def work(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.now[0]) + seconds

    def event(self) -> Any:
        self.made += 1
        return Event(self)


class Event:
    """The moment at which the device gets to it."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self) -> None:
        self.at_s = max(self.queue.free_s, self.queue.now[0])

    def query(self) -> bool:
        return self.at_s <= self.queue.now[0]

    def synchronize(self) -> None:
        self.queue.waits += 1
        self.queue.now[0] = max(self.queue.now[0], self.at_s)

    def elapsed_time(self, end: Event) -> float:
        assert end.at_s <= self.queue.now[0], "the host would have to wait"
        return (end.at_s - self.at_s) * 1e3


def train_on(queue: Queue, clock: Clock, num_steps: int, host_s: dict[str, float]) -> None:
    """Steps of 1 s forward, 2 s backward and 0.5 s optimizer on the device, and of the host's `host_s`."""
    for _ in clock.waiting(iter(range(num_steps))):
        queue.now[0] += host_s.get("data", 0.0)
        for cause, seconds in (("forward", 1.0), ("backward", 2.0), ("optimizer", 0.5)):
            clock.to(cause)
            queue.now[0] += host_s.get(cause, 0.001)
            queue.work(seconds)
        if "callbacks" in host_s:
            clock.to("callbacks")
            queue.now[0] += host_s["callbacks"]
    clock.to("logging")
    queue.now[0] += 0.25
    clock.to(None)


def device_clock(now: list[float]) -> tuple[Queue, DeviceClock]:
    queue, before = Queue(now), Clock()
    now[0] = 5.0
    return queue, DeviceClock(before, queue.event)


def test_a_busy_device_tells_what_it_is_busy_with(now: list[float]) -> None:
    """Whatever the host does in the meantime, waiting for batches included, costs nothing."""
    queue, clock = device_clock(now)
    train_on(queue, clock, 3 * SAMPLED, {"data": 0.5, "optimizer": 1.5, "callbacks": 0.5})
    budget = clock.ledger()
    assert queue.waits == 1
    assert queue.made < 6 * 5 + 3
    # Before the device has work, the host reads the first batch; at the end its last callback is alone.
    steps = 3 * SAMPLED * 3.5 + 0.5
    assert budget["start_up"] == 5.0
    assert budget["logging"] == pytest.approx(0)
    shares = {"forward": 1 / 3.5, "backward": 2 / 3.5, "optimizer": 0.5 / 3.5, "data": 0, "callbacks": 0}
    for cause, share in shares.items():
        assert budget[cause] == pytest.approx(share * steps, abs=0.01 * steps), cause
    assert sum(budget.values()) == pytest.approx(clock.elapsed_s())
    assert budget["unexplained"] == pytest.approx(0)


@pytest.mark.parametrize("cause", ["data", "forward", "optimizer", "callbacks"])
def test_a_device_that_waits_tells_what_it_waits_for(now: list[float], cause: str) -> None:
    queue, clock = device_clock(now)
    train_on(queue, clock, 2 * SAMPLED, {cause: 20.0})
    without = {"data": 0.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.5, "callbacks": 0.0}
    budget = clock.ledger()
    # What the device still has to do goes on beside the host's delay, whichever row that is in.
    waited = budget[cause] - 2 * SAMPLED * without[cause]
    assert waited >= 2 * SAMPLED * (20.0 - 3.5)
    assert sum(budget[name] for name in without if name != cause) <= 2 * SAMPLED * 3.6
    assert budget["unexplained"] == pytest.approx(0)


def test_a_device_that_waits_for_the_host_to_log_tells_so(now: list[float]) -> None:
    """And a callback at the end of an epoch; lines in between make no one wait for the device."""
    queue, clock = device_clock(now)
    for _ in range(4):
        train_on(queue, clock, SAMPLED, {})
        for cause, seconds in (("logging", 1.0 * SAMPLED * 3.5 + 0.5), ("callbacks", 2.0), (None, 0.0)):
            clock.to(cause)
            now[0] += seconds
    assert queue.waits == 0
    assert len(clock._marks) < 20
    budget = clock.ledger()
    assert queue.waits == 1
    assert budget["callbacks"] == pytest.approx(8.0)
    assert budget["logging"] == pytest.approx(4 * 0.8, abs=0.01)
    assert budget["backward"] == pytest.approx(4 * SAMPLED * 2.0, rel=0.01)
    assert budget["unexplained"] == pytest.approx(0)


def test_steps_before_a_wait_may_hold_none_that_is_timed(now: list[float]) -> None:
    """As where every step is logged and saved; their time waits for one that is."""
    queue, clock = device_clock(now)
    for _ in range(SAMPLED + 3):
        train_on(queue, clock, 1, {})
        clock.to("saving")
        now[0] += 1.0
        clock.to(None)
    budget = clock.ledger()
    assert queue.made < 12
    assert budget["backward"] == pytest.approx(2.0 * (SAMPLED + 3), rel=0.01)
    assert budget["saving"] == pytest.approx(1.0 * (SAMPLED + 3))
    assert budget["unexplained"] == pytest.approx(0)


def test_the_pace_of_a_device_is_that_of_its_events(now: list[float]) -> None:
    """Not that of a host which is ahead; what goes to warm-up in between does not count."""
    queue, clock = device_clock(now)
    begin = clock.moment()
    queue.work(8.0)
    now[0] += 0.5
    end = clock.moment()
    now[0] += 10.0
    assert clock.between(begin, end) == pytest.approx(8.0)
    begin = clock.moment()
    with clock.gathering("warm_up"):
        now[0] += 3.0
    queue.work(1.0)
    end = clock.moment()
    now[0] += 1.0
    assert clock.between(begin, end) == pytest.approx(1.0)


def test_a_device_that_waits_for_a_transfer(now: list[float]) -> None:
    """Its wait counts within the wait for data, and makes no step of its own."""
    queue, clock = device_clock(now)

    def loads() -> Iterator[int]:
        for number in range(2 * SAMPLED):
            now[0] += 1.0
            clock.to("transfer")
            queue.work(2.0)
            clock.to("data")
            yield number

    for _ in clock.waiting(loads()):
        clock.to("forward")
        queue.work(1.0)
    clock.to("logging")
    budget = clock.ledger()
    assert budget["transfer"] == pytest.approx(2 * budget["forward"])
    assert clock._steps == 2 * SAMPLED + 1
    assert budget["unexplained"] == pytest.approx(0)


def test_a_device_that_has_failed_does_not_hide_why(now: list[float]) -> None:
    _, clock = device_clock(now)

    def fails() -> None:
        raise RuntimeError("CUDA error")

    clock.to("data")
    clock.to("forward")
    clock._event = lambda: type("Broken", (), {"record": lambda _: fails()})()
    now[0] += 2.0
    clock.to("closing")
    now[0] += 1.0
    budget = clock.ledger()
    assert budget["closing"] == 1.0
    assert budget["unexplained"] == 2.0


class Late(nn.Module):
    """A network that is late."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(64, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(LATE_S)
        return self.last(inputs.flatten(1))


class SlowToStart(Late):
    """A network that is very late, once."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.__dict__.setdefault("starts", True):
            time.sleep(25 * LATE_S)
            self.starts = False
        return super().forward(inputs)


class LateSgd(torch.optim.SGD):
    """An optimizer that is late."""

    def step(self, closure: Any = None) -> None:
        time.sleep(LATE_S)
        super().step()


class LateCallback(Callback):
    """A callback that is late."""

    def on_step(self, run: Any, step: int) -> None:
        time.sleep(LATE_S)


class LateRows:
    """A dataset that is late with every batch of four."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(LATE_S / 4)
        return torch.full((64,), float(index)), index % 3


class LateStream(torch.utils.data.IterableDataset[Any]):
    """The same without an end."""

    num_classes = 3

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        rows = LateRows()
        return (rows[index] for index in itertools.count())


MLP = ("model.hidden=[8]",)
PLANTED = {
    "a dataset": ("data", *MLP, "data=custom", "data._target_=test_clock.LateRows", "data.val=4samples"),
    "a stream": ("data", *MLP, "data=custom", "data._target_=test_clock.LateStream"),
    "a model": ("forward", "model=custom", "model._target_=test_clock.Late"),
    "a model, accumulating": (
        *("forward", "model=custom", "model._target_=test_clock.Late", "micro_batches=2"),
        *("gradients.clip_norm=1", "ema=ema"),
    ),
    "an optimizer": ("optimizer", *MLP, "optimizer=sgd", "optimizer._target_=test_clock.LateSgd"),
    "a callback": ("callbacks", *MLP, "callbacks=[{_target_: test_clock.LateCallback}]"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_late_is_booked_where_it_is_late(tmp_path: Path, planted: str) -> None:
    cause, *words = PLANTED[planted]
    words += ["batch_size=4", "steps=8", "log_every=3", "eval.every=8steps", "dataloader=plain"]
    run = build_run(tmp_path, *words)
    fit(run)
    budget = run.clock.ledger()
    # The first step is one of warming up, and what the second consists of is counted.
    assert budget["warm_up"] >= LATE_S
    assert budget[cause] >= 6 * LATE_S
    assert sum(budget[other] for other in (*STEP, "unexplained") if other != cause) < 6 * LATE_S


def test_a_throughput_leaves_the_warm_up_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the step that is counted; of seconds it says nothing."""
    model = ("model=custom", "model._target_=test_clock.SlowToStart")
    run = build_run(tmp_path, *model, "batch_size=4", "steps=8", "log_every=4", "dataloader=plain")
    lines: list[dict[str, Any]] = []
    run.logger = SimpleNamespace(log=lines.append, flush=lambda: None)
    fit(run)
    windows = [line for line in lines if line["split"] == "train"]
    # 4 samples in 20 ms; with the first step it would be 16 in 580 ms.
    assert all(40 < window["samples_per_s"] < 200 for window in windows)
    assert [window["step_s"] for window in windows] == [
        pytest.approx(4 / window["samples_per_s"]) for window in windows
    ]
    part = RankPart(read_config(model)[1], run.folder, run.ranks, run.display, run.clock, run=run)
    assert part.summary(Outcome("finished", 0))["train_samples_per_s"] is None
    monkeypatch.setattr("ptfast.core.run_records.LEAST_S", 0.0)
    assert 40 < part.summary(Outcome("finished", 0))["train_samples_per_s"] < 200


def test_compiling_in_a_later_step_slows_no_throughput(now: list[float]) -> None:
    clock = Clock()
    begun_s = clock.moment()[0]
    for cause, seconds in (("forward", 1.0), ("warm_up", 8.0), ("forward", 1.0), (None, 0.0)):
        clock.to(cause)
        now[0] += seconds
    assert clock.moment()[0] - begun_s == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_late_on_a_gpu_is_booked_where_it_is_late(tmp_path: Path, planted: str) -> None:
    cause, *words = PLANTED[planted]
    words += ["batch_size=4", "steps=21", "log_every=20", "eval.every=21steps", "dataloader=plain"]
    run = build_run(tmp_path, *words, "device=cuda")
    fit(run)
    budget = run.clock.ledger()
    assert budget[cause] >= 0.8 * 20 * LATE_S
    assert abs(budget["unexplained"]) < 0.02 * run.clock.elapsed_s()


def test_the_marks_change_no_bit(tmp_path: Path) -> None:
    words = (*MLP, "model.dropout=0.2", "batch_size=64", "micro_batches=2", "steps=5", "data.val=0")
    runs = [build_run(tmp_path / name, *words) for name in ("told", "untold")]
    vars(runs[1].clock)["to"] = lambda cause: None
    for run in runs:
        fit(run)
    assert runs[0].clock.seconds["forward"] > 0
    assert not runs[1].clock.seconds["forward"]
    assert same_bits(dict(runs[0].model.state_dict()), dict(runs[1].model.state_dict()))


def test_a_rank_that_waits_for_another_books_it_as_that(two_ranks: dict[str, Any]) -> None:
    """The second one's forward pass is late by 10 ms in each of two micro-batches a step."""
    ddp, fsdp = two_ranks["ledger ddp"], two_ranks["ledger fsdp"]
    assert ddp["gradient_sync"] >= 0.15
    assert ddp["forward"] + ddp["backward"] + ddp["optimizer"] < 0.15
    # Weights are gathered where they are needed.
    assert fsdp["forward"] + fsdp["backward"] + fsdp["gradient_sync"] >= 0.15
    assert fsdp["gradient_sync"] > 0


def test_a_run_accounts_for_its_wall_time(in_tmp: Path) -> None:
    """Here by the clock of the wall around it; a run that goes on has a ledger of its own."""
    words = (*MLP, "schedule=constant", "batch_size=64", "log_every=4", "run.dir=run", "eval.every=9steps")
    for steps in (9, 18):
        start = time.time()
        assert train(*words, f"steps={steps}", "run.resume=auto") == 0
        wall_s = time.time() - start
        result = summary(Path("run"))
        budget = result["time_budget"]
        assert tuple(budget) == CAUSES
        assert sum(budget.values()) == pytest.approx(result["wall_s"])
        assert result["wall_s"] < wall_s
        # A neighbor that takes the core between two marks is nobody's cause: a tenth of a second for it.
        assert 0 <= budget["unexplained"] < 0.02 * result["wall_s"] + 0.1
        assert all(budget[cause] > 0 for cause in ("start_up", "warm_up", "data", "forward", "backward"))
        assert all(budget[cause] > 0 for cause in ("optimizer", "evaluation", "saving", "logging", "closing"))
        assert budget["transfer"] == budget["gradient_sync"] == 0
