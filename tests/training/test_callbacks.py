"""A user's callbacks: when each of their methods is called, and what is refused because it never would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from config_trees import refused
from running import records, summary, train
from toys import SMALL, callback

from ptfast.core.protocols import HOOKS, Callback


class Diary(Callback):
    """Notes all that it is told, and adds a figure of its own."""

    told: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop

    def on_start(self, run: Any) -> None:
        self.told.append(("start", run.progress.step))

    def on_epoch(self, run: Any, epoch: int) -> None:
        self.told.append(("epoch", epoch, run.progress.step))

    def on_step(self, run: Any, step: int) -> None:
        if step == self.stop:
            run.stop_signal = 15

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, float]) -> None:
        metrics["twice"] = 2 * metrics["loss"]
        self.told.append((split, step))

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        assert (folder / "model.pt").is_file()
        self.told.append(("save", step))

    def on_end(self, run: Any, status: str) -> None:
        self.told.append(("end", status))


class OnlyEvaluation:
    """A callback of no class of ours, with a single method."""

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, float]) -> None:
        metrics["one"] = 1


def test_every_method_is_called_when_it_says_and_once_over_a_resume(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Diary.told = []
    named = "callbacks=[{_target_: test_callbacks.Diary, stop: 10}, test_callbacks.OnlyEvaluation]"
    words = (*SMALL, "epochs=2", "batch_size=256", "saving.every=7steps", "stop.metric=twice", named)
    assert train(*words, "run.dir=a") == 75
    assert train(*words, "run.dir=a", "run.resume=auto") == 0
    # 1,617 samples are 7 steps an epoch.
    assert Diary.told == [
        *[("start", 0), ("epoch", 1, 7), ("val", 7), ("save", 7), ("save", 10), ("end", "preempted")],
        *[("start", 10), ("epoch", 2, 14), ("val", 14), ("save", 14), ("end", "finished")],
    ]
    lines = [line for line in records(Path("a")) if line["split"] == "val"]
    assert [line["step"] for line in lines] == [7, 14]
    assert all(line["twice"] == 2 * line["loss"] and line["one"] == 1 for line in lines)
    result = summary(Path("a"))
    assert result["val"]["twice"] == 2 * result["val"]["loss"]
    assert result["best_metric"] == "val.twice"
    assert "twice" in capsys.readouterr().out


def test_data_without_a_length_has_no_epochs(in_tmp: Path) -> None:
    Diary.told = []
    data = ("data=custom", "data._target_=toys.Stream", "batch_size=10", "steps=4", "run.dir=a")
    assert train(*data, "callbacks=[test_callbacks.Diary]") == 0
    assert {told[0] for told in Diary.told} == {"start", "save", "end"}


class Settings(Callback):
    """Reads settings and progress of the run, and shortens it."""

    read: ClassVar[list[Any]] = []

    def on_step(self, run: Any, step: int) -> None:
        self.read.append((run.seed, run.batch_size, run.best_metrics, run.stop_reason))
        run.total_steps = 2


def test_settings_are_read_and_set_on_the_run(in_tmp: Path) -> None:
    Settings.read = []
    words = (*SMALL, "epochs=2", "batch_size=256", "seed=3", "callbacks=[test_callbacks.Settings]")
    assert train(*words, "run.dir=a") == 0
    assert Settings.read == [(3, 256, {}, None)] * 2
    assert summary(Path("a"))["steps"] == 2


class OtherTask(Callback):
    """Replaces the task after the first step."""

    used: ClassVar[list[int]] = []

    def on_step(self, run: Any, step: int) -> None:
        if step == 1:
            task, loss = run.task, run.task.loss
            task.loss = lambda model, data: self.used.append(run.progress.step) or loss(model, data)


def test_a_loss_that_a_callback_replaces_is_trained_on(in_tmp: Path) -> None:
    OtherTask.used = []
    assert train(*SMALL, "steps=3", "callbacks=[test_callbacks.OtherTask]", "run.dir=a") == 0
    assert OtherTask.used == [1, 2]


def method(name: str) -> type:
    """A callback with one method."""
    return type("Named", (Callback,), {name: lambda self, run: None})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("on_fit_start", ""), ("on_validation_epoch_end", ""), ("on_stpe", " Did you mean on_step?")],
)
def test_a_method_that_is_never_called_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.setattr("toys.Broken", method(name))
    error = refused(callbacks=[{"_target_": "toys.Broken"}])
    assert (error.code, error.key) == ("C009", "callbacks.0._target_")
    assert f"{name} would never be called.{hint}" in str(error)
    assert all(hook in str(error) for hook in HOOKS)


def test_a_method_that_takes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toys.Broken", method("on_step"))
    error = refused(callbacks=[{"_target_": "toys.Broken"}])
    assert "on_step cannot be called as on_step(self, run, step)" in str(error)


def test_a_refused_callback_leaves_nothing_behind(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*SMALL, callback("Unheard"), "steps=2") == 2
    assert "error[C009]: callbacks.0._target_=toys.Unheard (command line)" in capsys.readouterr().err
    assert not Path("runs").exists()
