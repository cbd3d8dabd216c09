"""Figures that arrive while training goes on: read one look late, with the same values in the same lines."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import FREE, build_run, same_bits
from test_numerics import scaled
from toys import Lines

from ptfast.core.distributed import Ranks
from ptfast.core.errors import NumericsError
from ptfast.core.protocols import Callback
from ptfast.run import Run
from ptfast.training.fit import fit
from ptfast.training.loop.loss_accumulator import LossAccumulator, PendingLog

EXPLODING = ("steps=100", "model=custom", "model._target_=toys.Exploding", "saving.every=100steps")
BLOBS = ("data=custom", "data._target_=toys.blobs", "batch_size=10", "log_every=5", "schedule=constant")


@pytest.fixture
def defer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[int, int]]]:
    """Have runs from here on read figures late, as on CUDA; the list gets the steps of looks and readings."""

    def start() -> list[tuple[int, int]]:
        read, init, receive = list[tuple[int, int]](), LossAccumulator.__init__, LossAccumulator.receive

        def defer_figures(losses: LossAccumulator, *arguments: Any) -> None:
            init(losses, *arguments)
            losses.defers = True

        def note(losses: LossAccumulator, look: PendingLog) -> float:
            if look.loss is None and look.error is None:
                read.append((look.step, losses._run.progress.step))
            return receive(losses, look)

        monkeypatch.setattr(LossAccumulator, "__init__", defer_figures)
        monkeypatch.setattr(LossAccumulator, "receive", note)
        return read

    return start


class Stops(Callback):
    """Notes the figures of training that each hook finds, and ends the run after a step."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.found = step, list[Any]()

    def on_step(self, run: Any, step: int) -> None:
        if step == self.step:
            run.stop_signal = signal.SIGTERM

    def on_epoch(self, run: Any, epoch: int) -> None:
        self.found.append((epoch, run.metrics.get("train", {}).get("loss")))

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        self.found.append((split, step, run.metrics["train"]["loss"]))

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        self.found.append(("save", step, run.metrics["train"]["loss"], run.progress.window_loss))


class Fails(Callback):
    """Fails after step 12."""

    def on_step(self, run: Any, step: int) -> None:
        if step == 12:
            raise ValueError("broken")


RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "evaluated": (0, ("data.val=20%", "steps=24", "saving.every=8steps", "optimizer=sgd")),
    "nothing held out": (
        0,
        ("data.val=0", "steps=24", "ema=ema", "ema.decay=0.9", "eval.every=10steps", "saving.every=10steps"),
    ),
    "ended by a signal": (13, ("data.val=20%", "steps=24", "gradients.log_norm=true")),
}
"""The step after which a signal comes, and overrides."""


def trained(folder: Path, stop: int, *words: str, **given: Any) -> tuple[Run, list[dict[str, float]]]:
    """A trained run and the lines it logged, without what depends on the clock."""
    named = f"callbacks=[{{_target_: test_figures_on_their_way.Stops, step: {stop}}}]"
    run = build_run(folder, *BLOBS, *words, named, **given)
    run.logger = lines = Lines()
    fit(run)
    return run, [{name: value for name, value in line.items() if name not in FREE} for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_late_figures_are_the_same(tmp_path: Path, name: str, defer: Any) -> None:
    stop, words = RUNS[name]
    one, lines = trained(tmp_path / "at once", stop, *words)
    read = defer()
    other, late_lines = trained(tmp_path / "late", stop, *words)
    assert late_lines == lines
    assert other.callbacks[0].found == one.callbacks[0].found  # type: ignore[attr-defined]
    assert same_bits(dict(one.model.state_dict()), dict(other.model.state_dict()))
    for field in ("window_loss", "window_items", "timed_steps", "timed_samples", "epoch_loss", "best_value"):
        assert getattr(one.progress, field) == getattr(other.progress, field), field
    assert any(step < at for step, at in read)
    assert all(at <= step + 5 for step, at in read)


def test_steps_skipped_before_a_late_line_are_counted_in_it(tmp_path: Path, defer: Any) -> None:
    defer()
    run = scaled(tmp_path, [7, 8, 11], "steps=15")
    assert fit(run) == "finished"
    assert [line.get("skipped_steps") for line in run.logger] == [None, 2, 1]


def test_a_loss_that_is_not_finite_is_found_within_one_line(tmp_path: Path, defer: Any) -> None:
    defer()
    run = build_run(tmp_path, *BLOBS, *EXPLODING, "data.val=0", "eval.every=100steps")
    run.logger = lines = Lines()
    with pytest.raises(NumericsError, match="nan by step 10"):
        fit(run)
    assert run.progress.step == 15
    assert [line["step"] for line in lines] == [5]


def test_no_line_or_state_follows_a_loss_that_is_not_finite(tmp_path: Path, defer: Any) -> None:
    defer()
    run = build_run(tmp_path, *BLOBS, *EXPLODING, "data.val=20%", "eval.every=10steps")
    run.logger = lines = Lines()
    with pytest.raises(NumericsError, match="nan by step 10"):
        fit(run)
    assert [line["step"] for line in lines] == [5]
    assert not (tmp_path / "saved").exists()


def test_ranks_act_on_a_signal_one_look_later(tmp_path: Path, defer: Any) -> None:
    """They have told each other by then, and no one has waited for it; between looks lie five steps."""
    defer()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        words = ("data.val=0", "steps=100", "parallel=ddp")
        run, lines = trained(tmp_path, 13, *words, ranks=Ranks(grouped=True))
    finally:
        torch.distributed.destroy_process_group()
    assert run.progress.step == 20
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert (tmp_path / "saved/step-20").is_dir()


def test_the_line_before_an_error_is_written(tmp_path: Path, defer: Any) -> None:
    defer()
    run = build_run(tmp_path, *BLOBS, "data.val=0", "steps=100")
    run.logger = lines = Lines()
    run.callbacks.append(Fails())
    with pytest.raises(ValueError, match="broken"):
        fit(run)
    assert [line["step"] for line in lines] == [5, 10]
