"""Losses, gradients and weights that are not finite: left out, counted, or the end of the run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import build_run, records, summary, train
from toys import (
    SMALL,
    Lines,
    callback,
)

from ptfast.errors import NumericsError
from ptfast.loop import fit
from ptfast.optim import start_momentum
from ptfast.run import Run


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


def test_a_window_of_nothing_but_overflows_has_no_loss(tmp_path: Path) -> None:
    run = scaled(tmp_path, [1, 2, 3, 4, 5], "steps=10")
    assert fit(run) == "finished"
    assert [math.isnan(line["loss"]) for line in run.logger] == [True, False]
    assert run.logger[1]["loss"] < 2


def test_steps_that_overflow_without_end_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="in a row"):
        fit(scaled(tmp_path, list(range(1, 100)), "steps=100"))


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


def test_the_loss_is_checked_where_it_is_not_logged(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=toys.blobs", "data.val=0", "batch_size=10", "steps=10")
    run = build_run(tmp_path, *words, "optimizer=sgd", "optimizer.lr=1e30", "log_every=1000")
    with pytest.raises(NumericsError, match=r"is inf|is nan"):
        fit(run)
