"""Schedulers that step on the metric of an evaluation, against torch's own in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, records, same_bits, summary, train, training_state, weights
from torch.optim import SGD, lr_scheduler
from trials import merged

from ptfast.core.errors import ConfigError

HERE = "test_metric_schedules"
SMALL = ("model.hidden=[16,8]", "batch_size=128", "log_every=1steps", "optimizer=sgd", "optimizer.lr=2")
RISING = (*SMALL, "stop.metric=loss", "eval.every=3steps")
PLATEAU = (*RISING, "schedule=plateau", "schedule.patience=0", "schedule.factor=0.5")


class HalvesWhenAbove:
    """A scheduler of a user's own: halves the rate at a loss above `limit`."""

    def __init__(self, optimizer: Any, limit: float = 0.0) -> None:
        self.optimizer, self.limit, self.num_longs = optimizer, limit, 0

    def step(self, loss: float) -> None:
        if loss > self.limit:
            self.num_longs += 1
            self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"num_longs": self.num_longs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_longs = state["num_longs"]


class WithoutState:
    """One that could not be resumed."""

    def __init__(self, optimizer: Any) -> None: ...

    def step(self, metric: float) -> None: ...


def lrs(folder: Path) -> list[float]:
    return [line["lr"] for line in records(folder) if line["split"] == "train"]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in records(folder) if line["split"] == "val"}


@pytest.mark.parametrize("warmup", [0, 5])
def test_the_rate_is_that_of_torchs_scheduler_in_a_plain_loop(in_tmp: Path, warmup: int) -> None:
    words = (*PLATEAU, f"schedule.warmup={warmup}steps", "steps=25", "schedule.min_lr=0.1")
    assert train(*words, 'optimizer.groups=[{match: "*.bias", lr_scale: 2}]', "run.dir=a") == 0
    optimizer, seen = SGD([torch.zeros(1, requires_grad=True)], lr=2), losses(Path("a"))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.1)
    expected = []
    for step in range(1, 26):
        expected.append(optimizer.param_groups[0]["lr"] * min(step / (warmup or 1), 1))
        if step in seen and step > warmup and step % 3 == 0:
            scheduler.step(seen[step])
    assert lrs(Path("a")) == pytest.approx(expected, rel=1e-12)
    assert len({*expected[warmup:]}) > 1


def test_a_killed_run_and_a_longer_one_end_with_the_same_bits(in_tmp: Path) -> None:
    words = (*PLATEAU, "saving.every=1steps", "saving.keep=20", "run.resume=auto")
    assert train(*words, "steps=13", "run.dir=whole", "run.resume=never") == 0
    for step in (5, 6, 9):
        assert train(*words, "steps=13", f"run.resume=whole/saved/step-{step}", f"run.dir=from{step}") == 0
        assert same_bits(weights(Path(f"from{step}")), weights(Path("whole")))
        assert same_bits(training_state(Path(f"from{step}")), training_state(Path("whole")))
    # The evaluation after the last step of the shorter run is none of the longer one.
    assert train(*words, "steps=8", "run.dir=short", "run.resume=never") == 0
    assert train(*words, "steps=13", "run.resume=short/saved/last", "run.dir=longer") == 0
    assert same_bits(weights(Path("longer")), weights(Path("whole")))
    assert training_state(Path("whole"))["schedule"]["lr"] < 2


def test_accumulation_and_mode_follow_the_metric(in_tmp: Path) -> None:
    words = (*PLATEAU, "steps=13", "stop.metric=accuracy", "gradients.accumulate=4")
    assert train(*words, "run.dir=a") == 0
    assert training_state(Path("a"))["schedule"]["scheduler"]["mode"] == "max"
    with pytest.raises(ConfigError, match="whose mode is max") as caught:
        build_run(in_tmp / "b", *merged(*words, "schedule.mode=min"))
    assert (caught.value.code, caught.value.key) == ("C011", "schedule.mode")


def test_a_scheduler_of_your_own_steps_on_the_metric(in_tmp: Path) -> None:
    own = (*RISING, f"schedule._target_={HERE}.HalvesWhenAbove", "schedule.warmup=0")
    assert train(*own, "steps=10", "schedule.limit=0.01", "run.dir=a") == 0
    assert lrs(Path("a")) == [2.0] * 3 + [1.0] * 3 + [0.5] * 3 + [0.25]
    assert training_state(Path("a"))["schedule"] == {"lr": 0.25, "scheduler": {"num_longs": 3}}
    with pytest.raises(ConfigError, match="has no method state_dict") as caught:
        build_run(in_tmp / "b", *merged(*own, f"schedule._target_={HERE}.WithoutState"))
    assert caught.value.code == "C009"


def test_it_needs_evaluations(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no samples are held out") as caught:
        build_run(in_tmp / "a", *PLATEAU, "data.val=0", "steps=3")
    assert (caught.value.code, caught.value.key) == ("C011", "schedule")
    assert train(*PLATEAU, "steps=3", "run.dir=b") == 0
    assert "no evaluation precedes the last step" in capsys.readouterr().out
    assert summary(Path("b"))["steps"] == 3


@pytest.mark.slow
def test_two_ranks_follow_one_metric(in_tmp: Path) -> None:
    two = (*PLATEAU, "steps=13", "parallel=ddp", "parallel.nproc=2", "device=cpu")
    assert train(*two, "run.dir=a", "batch_size=100") == 0
    assert train(*two, "run.dir=b", "batch_size=100", "parallel=single", "parallel.nproc=1") == 0
    assert lrs(Path("a")) == lrs(Path("b"))
    assert losses(Path("a")) == pytest.approx(losses(Path("b")), rel=1e-4)
