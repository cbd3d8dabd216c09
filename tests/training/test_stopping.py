"""Why training ends: the best so far, the time given, signals, evaluations cut short."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import train_in_child
from running import build_run, records, same_bits, summary, train, weights
from stuck import STUCK_S
from toys import (
    SMALL,
    callback,
)

from ptfast.core.distributed import Ranks
from ptfast.core.plain_display import Display
from ptfast.data.loaders import worker_processes
from ptfast.tasks.classification import Classification
from ptfast.training import stopping
from ptfast.training.fit import fit


def test_best_follows_the_training_loss_where_nothing_is_held_out(in_tmp: Path) -> None:
    assert train(*SMALL, "steps=20", "data.val=0", "eval.every=10steps", "run.dir=a") == 0
    lines, result = records(Path("a")), summary(Path("a"))
    assert {line["split"] for line in lines} == {"train"}
    means = {10: (lines[0]["loss"] + lines[1]["loss"]) / 2, 20: (lines[2]["loss"] + lines[3]["loss"]) / 2}
    assert result["best_metric"] == "train.loss"
    assert result["best"]["step"] == 20
    assert result["best"]["loss"] == pytest.approx(means[20])
    assert means[20] < means[10]
    assert (Path("a") / "saved" / "best").resolve().name == "step-20"


def test_training_stops_when_nothing_is_gained(in_tmp: Path) -> None:
    words = (*SMALL, "steps=100", "eval.every=2steps", "stop.patience=2", "run.resume=auto", "run.dir=a")
    assert train(*words, callback("Worse", step=5)) == 0
    result = summary(Path("a"))
    assert (result["status"], result["steps"]) == ("stopped", 8)
    assert result["best"]["step"] == 4
    assert "2 evaluations" in result["reason"]
    assert sorted(path.name for path in Path("a/saved").iterdir()) == ["best", "last", "step-4", "step-8"]


def test_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    run = build_run(tmp_path, *SMALL, "steps=6", "eval.every=2steps", "stop.metric=loss", "stop.patience=5")
    losses = iter([math.nan, 2.0, 1.0])
    run.task.log_values = lambda loss, values: {"loss": next(losses)}  # type: ignore[method-assign]
    assert fit(run) == "finished"
    assert (run.progress.best_step, run.progress.best_value) == (6, 1.0)


@pytest.mark.parametrize(
    ("words", "mode", "best_step"),
    [
        (("stop.metric=loss",), "min", 6),
        (("stop.metric=loss", "stop.mode=max"), "max", 4),
        (("stop.mode=min",), "min", 2),
        ((), "max", 4),
    ],
)
def test_the_best_is_the_largest_or_the_smallest(
    words: tuple[str, ...], mode: str, best_step: int, tmp_path: Path
) -> None:
    run = build_run(tmp_path, *SMALL, "steps=6", "eval.every=2steps", *words)
    figures = iter([{"loss": 2, "accuracy": 0.1}, {"loss": 3, "accuracy": 0.9}, {"loss": 1, "accuracy": 0.2}])
    run.task.log_values = lambda loss, values: next(figures)  # type: ignore[method-assign]
    fit(run)
    assert (run.plan.best_mode, run.progress.best_step) == (mode, best_step)


def test_the_time_given_is_kept_and_the_run_goes_on_later(in_tmp: Path) -> None:
    words = (*SMALL, "steps=20", "run.dir=a", "run.resume=auto")
    assert train(*words, "run.max_time=0.001s") == 0
    result = summary(Path("a"))
    assert (result["status"], result["steps"]) == ("paused", 1)
    assert train(*words) == 0
    assert (summary(Path("a"))["status"], summary(Path("a"))["steps"]) == ("finished", 20)


@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("SIGTERM", 75, "preempted"),
        ("SIGUSR1", 75, "preempted"),
        ("SIGHUP", 75, "preempted"),
        ("SIGINT", 130, "interrupted"),
    ],
)
def test_a_signal_ends_the_run_after_its_step(in_tmp: Path, name: str, code: int, status: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        assert train(*SMALL, "steps=20", "run.dir=a", callback("Signals", step=7, name=name)) == code
    finally:
        signal.signal(signal.SIGHUP, before)
    result = summary(Path("a"))
    assert (result["status"], result["steps"], result["reason"]) == (status, 7, name)
    assert (Path("a/saved/last")).resolve().name == "step-7"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_while_the_data_loads_ends_the_run(in_tmp: Path, name: str, code: int) -> None:
    data = ("data=custom", "data._target_=toys.interrupted_blobs", f"+data.name={name}")
    assert train(*SMALL, *data, "steps=20", "run.dir=a") == code
    result = summary(Path("a"))
    assert (result["exit_code"], "steps" in result) == (code, False)
    assert "before the first step" in result["error"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


STUCK = ("data=custom", "data._target_=stuck.Stuck", "model=custom", "model._target_=toys.DoubleNormed")
STUCK = (
    *STUCK,
    "batch_size=10",
    "steps=8",
    "log_every=2",
    "saving.every=1000steps",
    "eval.every=4steps",
    "run.resume=auto",
)
SWA = ("ema=swa", "ema.swa_start=2steps", "ema.swa_every=1steps")
PLAIN, WORKER = "dataloader=plain", ("dataloader=workers", "dataloader.workers=1")


@pytest.fixture
def ended_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are stuck are ended after a moment."""
    monkeypatch.setattr(worker_processes, "_CLOSE_S", 0.1)


def end_stuck(*words: str, name: str, steps: int) -> None:
    """Have data not come, and the signal end the run with the state of its last finished step saved."""
    Path("stuck").write_text(name)
    start_s = time.monotonic()
    assert train(*STUCK, *words, "run.dir=a") == (130 if name == "SIGINT" else 75)
    assert time.monotonic() - start_s < STUCK_S
    Path("stuck").unlink()
    result = summary(Path("a"))
    assert (result["steps"], result["reason"], "error" in result) == (steps, name, False)
    assert Path("a/saved/last").resolve().name == f"step-{steps}"


@pytest.mark.usefixtures("ended_soon")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    ("words", "name", "steps"),
    [
        ((PLAIN, "+data.at=40", "data.val=0"), "SIGINT", 3),
        ((PLAIN, "+data.at=9", "data.val=0"), "SIGTERM", 0),
        ((*WORKER, "+data.val_at=50"), "SIGTERM", 4),
        ((PLAIN, "+data.at=77", "+data.val_at=0", *SWA), "SIGTERM", 4),
    ],
    ids=["training", "before a step", "evaluation", "averages"],
)
def test_a_run_whose_data_does_not_come_goes_on_to_the_same_bits(
    in_tmp: Path, words: tuple[str, ...], name: str, steps: int
) -> None:
    assert train(*STUCK, *words, "run.dir=whole") == 0
    end_stuck(*words, name=name, steps=steps)
    assert train(*STUCK, *words, "run.dir=a") == 0
    assert same_bits(weights(Path("a")), weights(Path("whole")))
    assert records(Path("a")) == records(Path("whole"))


@pytest.mark.usefixtures("ended_soon")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((*WORKER, "+data.at=49"), 4),
        (("data._target_=stuck.StuckStream", "+data.at=36"), 3),
        ((PLAIN, "+data.at=77", *SWA), 4),
    ],
    ids=["worker", "stream", "averages to be saved"],
)
def test_whatever_waits_for_data_hears_a_signal(in_tmp: Path, words: tuple[str, ...], steps: int) -> None:
    end_stuck("data.val=0", *words, name="SIGTERM", steps=steps)


def test_ranks_whose_data_does_not_come_end_together(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["stuck"] == ("preempted", 3, True)


def test_a_second_signal_ends_a_run_that_does_not_get_to_the_first(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "REPEATED_S", -1.0)
    twice = "callbacks=[{_target_: toys.Signals, step: 7}, {_target_: toys.Signals, step: 7}]"
    assert train(*SMALL, "steps=20", "run.dir=a", twice) == 75
    result = summary(Path("a"))
    assert (result["status"], result["exit_code"]) == ("preempted", 75)
    assert result["error"].startswith("SIGTERM again at step 7, without saving")
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_second_signal_ends_what_swallows_every_exception(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "REPEATED_S", -1.0)
    monkeypatch.setattr(stopping, "LAST_S", 0.3)
    Path("stuck").write_text("SIGTERM")
    start_s = time.monotonic()
    assert train_in_child(*STUCK, PLAIN, "+data.at=36", "+data.deaf=true", "data.val=0") == 75
    assert time.monotonic() - start_s < STUCK_S


@pytest.mark.parametrize(
    ("words", "steps", "saved"),
    [
        (("model=custom", "model._target_=stuck.HangingNet"), 3, 3),
        (("callbacks=[{_target_: stuck.Hangs, how: on_step}]",), 3, 3),
        (("callbacks=[{_target_: stuck.Hangs, how: on_evaluation}]",), 2, 2),
        (("callbacks=[{_target_: stuck.Hangs, how: on_save}]",), 2, 2),
        (("metrics.own._target_=stuck.HangingMetric",), 2, 2),
        (("optimizer._target_=stuck.HangingSgd",), 3, 2),
    ],
    ids=["forward", "step", "evaluation", "save", "metric", "optimizer"],
)
def test_one_signal_ends_what_hangs(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], steps: int, saved: int
) -> None:
    for name in ("LATE_S", "HUNG_S"):
        monkeypatch.setattr(stopping, name, 0.1)
    rhythm = (*SMALL[1:], "steps=8", "eval.every=2steps", "saving.every=2steps")
    start_s = time.monotonic()
    assert train(*rhythm, "run.dir=a", *words) == 75
    assert time.monotonic() - start_s < STUCK_S
    assert summary(Path("a"))["steps"] == steps
    assert Path("a/saved/last").resolve().name == f"step-{saved}"
    assert ("error" in summary(Path("a"))) == (steps > saved)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_pipe_that_nobody_reads_holds_no_run(in_tmp: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as full, contextlib.redirect_stdout(full):
        words = (*SMALL, "steps=8", "run.dir=a", "callbacks=[{_target_: stuck.Talks}]")
        assert train_in_child(*words) == 130
    os.close(reader)
    assert Path("a/saved/last").resolve().name == "step-3"


def test_the_summary_is_there_before_loggers_are_closed(in_tmp: Path) -> None:
    assert train(*SMALL, "steps=2", "run.dir=a", "logger._target_=stuck.Late") == 0
    assert Path("closed").read_text() == "finished"


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that a process group is aborted, which ranks do at once."""
    found: list[int] = []
    monkeypatch.setattr(stopping, "abort_process_group", lambda: found.append(1))
    monkeypatch.setattr(stopping, "UNHANDLED_S", 0.1)
    return found


@contextlib.contextmanager
def on_two_gpus(run: Any) -> Iterator[None]:
    with stopping.caught_signals(Display(), Ranks(world_size=2)) as signals:
        run.device, signals.run = torch.device("cuda"), run
        yield


def test_a_rank_that_no_signal_reaches_aborts_the_process_group(
    tmp_path: Path, aborts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    abort = stopping.abort_process_group
    monkeypatch.setattr(stopping, "abort_process_group", lambda: (abort(), os.write(writer, b"x")))
    with on_two_gpus(build_run(tmp_path, *SMALL, "steps=1")):
        # The call goes on after a signal, and lets other threads run: so do those of CUDA.
        signal.siginterrupt(signal.SIGTERM, False)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(stopping.Preempted, match="at step 0, without saving"):
            ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
    assert aborts == [1]


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("forked", [False, True])
def test_signals_that_are_heard_abort_nothing(tmp_path: Path, aborts: list[int], forked: bool) -> None:
    with on_two_gpus(build_run(tmp_path, *SMALL, "steps=1")):
        pid = os.fork() if forked else os.getpid()
        os.kill(pid or os.getpid(), signal.SIGTERM)
        assert not forked or os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        time.sleep(0.5)
    assert aborts == []


def test_a_process_that_a_data_set_has_forked_ends_as_any_other(in_tmp: Path) -> None:
    with stopping.caught_signals(Display(), Ranks()):
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_an_ignored_hang_up_stays_ignored(in_tmp: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(*SMALL, "steps=8", "run.dir=a", callback("Signals", step=7, name="SIGHUP")) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_signal_in_an_evaluation_ends_the_run_soon_after(in_tmp: Path) -> None:
    words = (*SMALL, "steps=20", "eval.every=5steps", "run.dir=a")
    assert train(*words, callback("Signals", step=5, evaluation=True)) == 75
    assert summary(Path("a"))["steps"] <= 6


@pytest.mark.parametrize("step", [4, 8])
def test_an_evaluation_that_is_cut_short_is_made_again(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    words = (*SMALL, "steps=8", "eval.every=4steps", "data.val=600samples", "eval.batch_size=100")
    assert train(*words, "run.dir=whole") == 0
    evaluated, batches = Classification.evaluate, []

    def evaluate_until(self: Classification, *arguments: Any) -> Any:
        batches.append(1)
        if len(batches) == 6 * step // 4 - 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluated(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Classification, "evaluate", evaluate_until)
        assert train(*words, "run.dir=a", "run.resume=auto") == 75
    assert len(batches) == 6 * step // 4 - 3
    assert (summary(Path("a"))["status"], summary(Path("a"))["steps"]) == ("preempted", step)
    assert train(*words, "run.dir=a", "run.resume=auto") == 0
    assert records(Path("a")) == records(Path("whole"))
    assert same_bits(weights(Path("a")), weights(Path("whole")))
    assert (Path("a/saved/best")).resolve().name == (Path("whole/saved/best")).resolve().name


def test_an_evaluation_that_fails_costs_no_training(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("something broke")

    words = (*SMALL, "steps=8", "eval.every=4steps", "run.resume=auto")
    assert train(*words, "run.dir=whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Classification, "evaluate", fail)
        assert train(*words, "run.dir=a") == 1
    assert (Path("a/saved/last")).resolve().name == "step-4"
    assert train(*words, "run.dir=a") == 0
    assert records(Path("a")) == records(Path("whole"))


def test_a_signal_in_the_last_step_leaves_the_evaluation_for_later(in_tmp: Path) -> None:
    words = (*SMALL, "steps=6", "run.dir=a", "run.resume=auto")
    assert train(*words, callback("Signals", step=6)) == 75
    assert (summary(Path("a"))["steps"], "val" in summary(Path("a"))) == (6, False)
    assert train(*words, callback("Signals", step=6)) == 0
    assert (summary(Path("a"))["status"], summary(Path("a"))["best"]["step"]) == ("finished", 6)


def test_a_second_ctrl_c_leaves_at_once(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = "callbacks=[{_target_: toys.Signals, step: 7, name: SIGINT},"
    twice += "{_target_: toys.Signals, step: 7, name: SIGINT}]"
    assert train(*SMALL, "steps=20", "run.dir=a", twice) == 130
    result = summary(Path("a"))
    assert (result["status"], result["exit_code"]) == ("interrupted", 130)
    assert "step 7" in result["error"]
    assert "ptfast: interrupted" in capsys.readouterr().err


FORKS = """
import os, threading, ptfast.training.stopping
def fork():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
if (child := os.fork()) == 0:
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_child_forks_from_a_thread_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
