"""Losses, gradients and weights that are not finite: left out, counted, or the end of the run."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import FREE, build_run, records, same_bits, summary, train
from toys import (
    SMALL,
    Lines,
    callback,
)

from ptfast.core.durations import Duration
from ptfast.core.errors import NumericsError
from ptfast.core.protocols import Callback
from ptfast.data.sampling.splits import SplitRules
from ptfast.optim.build_optimizer import start_momentum
from ptfast.run import Run
from ptfast.training.fit import fit


def test_weights_that_are_not_finite_are_not_saved(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "steps=20", "saving.every=5steps", "run.dir=a")
    assert train(*words, callback("Worse", step=10, by="'nan'")) == 5
    assert "error[N001]" in capsys.readouterr().err
    assert (Path("a/saved/last")).resolve().name == "step-5"


def scaled(folder: Path, calls: list[int], *words: str) -> Run:
    """A run that scales its losses, as fp16 does, with gradients that overflow."""
    data = ("data=custom", "data._target_=toys.blobs", "data.val=0", "batch_size=10", "log_every=5")
    model = ("model=custom", "model._target_=toys.Overflowing", f"+model.calls={calls}")
    run = build_run(folder, *data, *model, "optimizer=sgd", "schedule=constant", *words)
    run.precision = replace(run.precision, scaler=torch.amp.GradScaler("cpu"))
    start_momentum(run.optimizer)
    run.logger = Lines()
    return run


def test_a_step_that_overflows_is_left_out_and_counted(tmp_path: Path) -> None:
    run = scaled(tmp_path, [7, 8], "steps=15")
    assert fit(run) == "finished"
    lines = run.logger
    assert [line.get("skipped_steps") for line in lines] == [None, 2, None]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def cycled(folder: Path, stop: int | None = None, checkpoint_folder: Path | None = None) -> tuple[Run, Rates]:
    """Train 12 steps in fp16, of which the 3rd, 4th and 8th overflow, up to `stop`; or on from a state."""
    words = ("data=custom", "data._target_=toys.blobs", "data.val=0", "batch_size=10", "log_every=5")
    model = ("model=custom", "model._target_=toys.Overflowing", "+model.calls=[3,4,8]")
    words = (*words, *model, "optimizer=sgd", "schedule=onecycle", "precision=amp_fp16", "steps=12")
    rates = f"callbacks=[{{_target_: test_numerics.Rates, stop: {stop or 'null'}}}]"
    run = build_run(folder, *words, rates, checkpoint_folder=checkpoint_folder)
    run.model.count = run.progress.step  # type: ignore[assignment] - the model's own
    run.logger = Lines()
    fit(run)
    return run, run.callbacks[0]  # type: ignore[return-value] - the one named


class Rates(Callback):
    """Notes the rate and the momentum of every step, and ends the run after one of them."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.seen = stop, list[tuple[float, float]]()

    def on_step(self, run: Run, step: int) -> None:
        (group,) = run.optimizer.param_groups
        self.seen.append((group["lr"] / group["initial_lr"], group["momentum"]))
        if step == self.stop:
            run.stop_signal = signal.SIGTERM


def test_the_schedule_stands_still_over_steps_that_are_left_out(tmp_path: Path) -> None:
    """One step late: in a step the host knows of those before the last one."""
    run, rates = cycled(tmp_path)
    known = [sum(call < step for call in (3, 4, 8)) for step in range(12)]
    assert known == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3]
    factors, momenta = run.schedule.lr_factors(0, 12), run.schedule.momenta(0, 12)
    expected = [(factors[step - held], momenta[step - held]) for step, held in enumerate(known)]
    torch.testing.assert_close(torch.tensor(rates.seen), torch.tensor(expected))
    assert run.progress.skipped_steps == 3


def test_a_run_goes_on_from_any_step_with_the_rates_it_would_have_had(tmp_path: Path) -> None:
    whole, rates = cycled(tmp_path / "whole")
    for stop in (1, 3, 4, 5, 8, 11):
        folder = tmp_path / str(stop)
        stopped, before = cycled(folder, stop)
        run, after = cycled(folder, checkpoint_folder=folder / "saved" / "last")
        assert before.seen + after.seen == rates.seen
        assert same_bits(dict(run.model.state_dict()), dict(whole.model.state_dict()))
        assert run.progress.skipped_steps == 3
        assert figures(stopped.logger) + figures(run.logger) == figures(whole.logger)


def figures(lines: Lines) -> list[dict[str, float]]:
    """The logged figures, without those that depend on the clock."""
    return [{name: value for name, value in line.items() if name not in FREE} for line in lines]


def test_a_window_of_nothing_but_overflows_has_no_loss(tmp_path: Path) -> None:
    run = scaled(tmp_path, [1, 2, 3, 4, 5], "steps=10")
    assert fit(run) == "finished"
    assert [math.isnan(line["loss"]) for line in run.logger] == [True, False]
    assert run.logger[1]["loss"] < 2


def test_steps_that_overflow_without_end_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="in a row"):
        fit(scaled(tmp_path, list(range(2, 100)), "steps=100"))


def test_a_loss_that_is_not_finite_ends_the_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=custom", "data._target_=toys.blobs", "data.val=0", "batch_size=10", "steps=100")
    words = (*words, "model=custom", "model._target_=toys.Exploding", "log_every=5", "run.dir=a")
    assert train(*words) == 5
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "error[N001]" in line
    assert "nan" in line
    assert "step 10" in line
    assert "optimizer.lr" in line
    assert (summary(Path("a"))["status"], summary(Path("a"))["exit_code"]) == ("failed", 5)
    assert [record["step"] for record in records(Path("a"))] == [5]


HOLED = """
import torch
from toys import blobs
class Holed(torch.utils.data.Dataset):
    num_classes = 2
    def __init__(self, place):
        self.whole, self.place = blobs(), place
    def __len__(self):
        return 50
    def __getitem__(self, index):
        inputs, target = self.whole[index]
        return inputs * (float("nan") if index == self.place else 1), target
"""


@pytest.mark.parametrize("loader", ["plain", "memory", "workers"])
def test_samples_that_are_not_finite_are_named(
    loader: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("holed.py").write_text(HOLED)
    # Held-out samples leave gaps, and numbers are those of the whole.
    training = SplitRules().apply(50, Duration(20, "percent"), seed=0)["train"]
    words = ("data=custom", "data._target_=holed.Holed", f"data.place={training[33]}", "data.val=20%")
    words = (*words, "model.hidden=[4]", "model=mlp", "batch_size=8", "epochs=2", f"dataloader={loader}")
    assert train(*words, "log_every=2") == 3
    err = capsys.readouterr().err
    assert (
        f"error[D005]: data (command line): samples contain numbers that are not finite ({training[33]})"
        in err
    )


def test_a_batch_of_all_samples_is_warned_of(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("data=digits", "model=mlp", "batch_size=2000", "epochs=1") == 0
    said = "warning: batch_size=2,000 is more than the 1,617 training samples: each epoch is one step"
    assert said in capsys.readouterr().out


def test_the_loss_is_checked_where_it_is_not_logged(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=toys.blobs", "data.val=0", "batch_size=10", "steps=10")
    run = build_run(tmp_path, *words, "optimizer=sgd", "optimizer.lr=1e30", "log_every=1000")
    with pytest.raises(NumericsError, match=r"is inf|is nan"):
        fit(run)
