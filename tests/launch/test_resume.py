"""Runs that were killed, stopped or changed go on to the same bits, or say why they do not."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RunPtfast
from resuming import (
    BASE,
    KILLED,
    Armed,
    arm,
    assert_same_run,
    runs,
    stopped,
    train_in_child,
    whole,
)
from running import WITH_TESTS, records, same_bits, summary, train, training_state, weights

from ptfast.cli import command_line
from ptfast.config.read import read_config
from ptfast.core.auto_choices import AutoChoice, AutoChoices, read_choices
from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError
from ptfast.core.tensors.checkpoint_folders import list_checkpoints
from ptfast.launch.resume import next_commands, resume_command
from ptfast.report.goodput import ATTEMPTS_FILE
from ptfast.report.loggers import read_records
from ptfast.training.stages.machine_stage import choose_micro_batches

__all__ = ["runs", "stopped", "whole"]


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=sgd", "sampling=weighted"),
        (
            *("dataloader.kind=workers", "dataloader.workers=2", "optimizer=adamw", "ema.decay=0.9"),
            "sampling._target_=torch.utils.data.RandomSampler",
        ),
        ("precision=bf16", "gradients.accumulate=4", "ema.decay=0.9", "schedule=onecycle"),
    ],
    ids=["memory, by weight", "workers, ema and a sampler of torch's", "bf16, accumulation and ema"],
)
def test_a_killed_run_ends_with_the_same_bits(in_tmp: Path, words: tuple[str, ...]) -> None:
    assert_goes_on(*BASE, *words)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_run_goes_on_with_its_average_and_its_cycles(in_tmp: Path) -> None:
    """The average begins at step 13, and BatchNorm is measured for it, before the kill and after."""
    average = ("ema=swa", "ema.swa_start=50%", "ema.swa_every=3steps", "eval.flip=true")
    assert_goes_on(*KILLED, "model=resnet_digits", "model.width=4", "schedule=onecycle", *average)


def assert_goes_on(*words: str) -> None:
    """Killed and begun again, it ends as if never killed."""
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=killed") == -signal.SIGKILL
    assert list_checkpoints(Path("killed/saved"))[0].name == "step-16"
    assert not Path("killed/summary.json").exists()
    assert train(*words, "run.dir=killed") == 0
    assert summary(Path("killed"))["steps"] == 26
    goodput = summary(Path("killed"))["goodput"]
    assert goodput["attempts"] == 2
    assert [each["from_step"] for each in read_records(Path("killed") / ATTEMPTS_FILE)] == [0, 16]
    assert goodput["wall_s"] > summary(Path("killed"))["wall_s"] + goodput["seconds"]["start_up"]
    assert_same_run(Path("whole"), Path("killed"))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_the_command_goes_on_where_it_was_killed(in_tmp: Path, run_ptfast: RunPtfast, whole: Path) -> None:
    """As above, as a user runs it."""
    arm("SIGKILL")
    assert train_in_child(*BASE, "run.name=mine") == -signal.SIGKILL
    resumed = run_ptfast("train", *BASE, "run.name=mine", env=WITH_TESTS)
    assert (resumed.code, resumed.err) == (0, "")
    assert "at step 16" in resumed.out
    (folder,) = Path("runs/mine").iterdir()
    assert_same_run(Path("whole"), folder)
    assert (folder / "report.html").is_file()


def test_worker_processes_change_nothing(in_tmp: Path, whole: Path) -> None:
    assert train(*BASE, "run.dir=two", "dataloader.kind=workers", "dataloader.workers=2") == 0
    assert_same_run(whole, Path("two"))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_stopped_run_goes_on(
    in_tmp: Path, name: str, code: int, capsys: pytest.CaptureFixture[str], whole: Path
) -> None:
    arm(name)
    assert train(*BASE, "run.dir=stopped") == code
    assert list_checkpoints(Path("stopped/saved"))[0].name == "step-17"
    command = capsys.readouterr().out.splitlines()[-1].partition("saved at step 17; resume with: ptfast ")[2]
    assert command_line.run(shlex.split(command)) == 0
    assert_same_run(Path("whole"), Path("stopped"))


def test_a_finished_run_names_the_commands_that_use_its_model(in_tmp: Path) -> None:
    train("model=mlp", "model.hidden=[4]", "steps=2", "run.dir=my run")
    commands = summary(Path("my run"))["next"]
    assert commands[1] == "ptfast predict 'my run' FILE..."
    assert command_line.run(shlex.split(commands[0])[1:]) == 0
    assert command_line.run(shlex.split(commands[2])[1:]) == 0
    assert next_commands(Path("r"), "language_modelling")[1] == "ptfast predict r --prompt TEXT"


def test_a_job_of_a_sweep_is_resumed_by_what_its_user_would_type(tmp_path: Path) -> None:
    words = ["ptfast", "train", "recipe=resnet_digits", "++seed=1", "run.dir=sweep/0"]
    (tmp_path / "environment.json").write_text(json.dumps({"command_line": words}))
    said = f"ptfast train recipe=resnet_digits seed=1 run.resume=auto run.dir={tmp_path}"
    assert resume_command(tmp_path) == said


def test_auto_takes_the_newest_unfinished_run_of_the_same_config(in_tmp: Path) -> None:
    words = (*BASE, "run.name=mine")
    arm("SIGTERM")
    assert train(*words) == 75
    (first,) = Path("runs/mine").iterdir()
    time.sleep(1.01)  # folders are named by the second
    assert train(*words, "seed=1") == 0
    assert train(*words) == 0
    assert summary(first)["status"] == "finished"
    assert len(list(Path("runs/mine").iterdir())) == 2
    # All are finished: another one begins.
    assert train(*words, "epochs=1") == 0
    assert len(list(Path("runs/mine").iterdir())) == 3


def test_a_failed_run_is_unfinished(in_tmp: Path, monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Armed, "on_step", lambda self, run, step: 1 // (17 - step))
        assert train(*BASE, "run.name=mine") == 2
    (folder,) = Path("runs/mine").iterdir()
    assert summary(folder)["status"] == "failed"
    assert train(*BASE, "run.name=mine") == 0
    assert_same_run(Path("whole"), folder)


def test_a_finished_run_is_left_alone(in_tmp: Path, capsys: pytest.CaptureFixture[str], whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert train(*BASE, "run.dir=whole") == 0
    assert "is already finished: nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_a_run_that_gained_no_more_is_finished(in_tmp: Path) -> None:
    words = (*BASE, "run.dir=a", "optimizer.lr=1e-12", "eval.every=1steps", "stop.metric=accuracy")
    assert train(*words, "stop.patience=2") == 0
    assert (summary(Path("a"))["status"], summary(Path("a"))["steps"]) == ("stopped", 3)
    assert train(*words, "stop.patience=2") == 0
    assert summary(Path("a"))["steps"] == 3
    # With more patience there is something left to train.
    assert train(*words, "stop.patience=4") == 0
    assert summary(Path("a"))["steps"] == 5


def test_more_epochs_extend_a_run(in_tmp: Path) -> None:
    words = (*BASE, "schedule=constant", "run.dir=a")
    assert train(*words) == 0
    assert train(*words, "epochs=3") == 0
    assert summary(Path("a"))["steps"] == 39
    assert train(*words[:-1], "run.dir=whole", "epochs=3") == 0
    assert same_bits(weights(Path("a")), weights(Path("whole")))
    assert train(*words, "epochs=3") == 0


def test_what_was_saved_before_a_decay_can_be_trained_for_longer(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*BASE, "schedule=wsd", "schedule.warmup=3steps", "saving.keep=9")
    assert train(*words, "run.dir=a") == 0
    assert train(*words, "run.dir=longer", "run.resume=a/saved/step-20", "epochs=3") == 0
    assert train(*words, "run.dir=whole", "epochs=3") == 0
    assert same_bits(weights(Path("longer")), weights(Path("whole")))
    capsys.readouterr()
    assert train(*words, "run.dir=a", "epochs=3") == 6
    assert "up to step 26 its schedule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "epochs", "reason"), [("onecycle", 3, "schedule=constant"), ("constant", 1, "at step 26")]
)
def test_a_length_that_does_not_fit_leaves_the_run_as_it_was(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], schedule: str, epochs: int, reason: str
) -> None:
    words = (*BASE, f"schedule={schedule}", "run.dir=a")
    assert train(*words) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
    capsys.readouterr()
    assert train(*words, f"epochs={epochs}") == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[S003]" in line
    assert reason in line
    assert {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")} == before


def test_a_run_without_its_resolved_json_goes_by_its_state(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*BASE, "schedule=onecycle", "run.dir=a") == 0
    Path("a/resolved.json").unlink()
    assert train(*BASE, "schedule=onecycle", "run.dir=a", "epochs=3") == 6
    assert "error[S003]" in capsys.readouterr().err
    assert command_line.run(["eval", "a", "eval.batch_size=50"]) == 0


def test_a_changed_config_names_the_keys(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], stopped: Path
) -> None:
    assert train(*BASE, "run.dir=a", "optimizer.lr=0.5", "seed=3", "log_every=7") == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[S003]" in line
    assert "optimizer.lr, seed" in line
    assert "log_every" not in line


def test_a_strangers_config_is_compared_and_not_imported(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: Path
) -> None:
    monkeypatch.syspath_prepend(in_tmp)
    Path("stranger.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass Armed: ...\n")
    file = Path("a/config.yaml")
    file.write_text(file.read_text().replace("resuming.Armed", "stranger.Armed"))
    for words in (("run.resume=a",), ("run.dir=a",)):
        assert train(*BASE, *words) == 6
        assert "callbacks" in capsys.readouterr().err
    assert not Path("imported").exists()


def test_a_secret_in_clear_is_written_nowhere_and_hinders_no_resuming(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("data=custom", "data._target_=resuming.guarded", "+data.api_key=open sesame")
    words = (*BASE[5:], *data, "batch_size=4", "run.dir=a")
    assert train(*words, "parallel=ddp", "parallel.nproc=2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[C011]: data.api_key=<secret> (command line)" in line
    assert "${oc.env:NAME}" in line
    assert not Path("a").exists()
    arm("SIGTERM")
    assert train(*words) == 75
    capsys.readouterr()
    shutil.copytree("a", "b", symlinks=True)
    assert train(*words) == 0
    assert "changed" not in capsys.readouterr().err
    assert summary(Path("a"))["status"] == "finished"
    # Another one is no change of the run, but is not passed over in silence.
    other = [word.replace("open sesame", "open says he").replace("run.dir=a", "run.dir=b") for word in words]
    train(*other)
    assert "warning: data.api_key has changed since b was started" in capsys.readouterr().err
    files = [path.read_bytes() for path in Path("a").rglob("*") if path.is_file()]
    assert not any(b"sesame" in content for content in files)


CANARIES = (
    "+data.headers={Authorization: Bearer canary1}",
    "+data.passwd=canary2",
    "+data.bearer=canary3",
    "+data.cookie=canary4",
    "+data.credential=canary5",
    "+data.auth=canary6",
    "+data.where=${oc.env:WHERE}",
    "+data.mixed=at-${oc.env:WHERE}-now",
    "+data.url=https://me:canary8@host/a.tar",
    "+data.signed=https://host/a.tar?authkey=canary9",
)


def test_canaries_are_found_nowhere(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WHERE", "canary7")
    words = ("data=custom", "data._target_=canaries.Points", "batch_size=4", "epochs=1", *CANARIES)
    assert train(*words, "run.dir=a", "logger=csv") == 0
    assert train(*words, "run.dir=b", "+data.fails=true") == 3
    # A key that is misspelt says what it would have hidden.
    for key in ("data.pasword", "logger.api_kye", "logger.tokne"):
        assert train("logger=csv", f"{key}=canary10") == 2
    printed = capsys.readouterr()
    assert "canary" not in (printed.out + printed.err).replace("canaries", "")
    assert "<secret>" in printed.err
    files = {path: path.read_bytes() for path in in_tmp.rglob("*") if path.is_file()}
    assert [path for path, content in files.items() if b"canary" in content] == []
    assert b"${oc.env:WHERE}" in files[in_tmp / "a" / "config.yaml"]


def test_a_callback_remembers(in_tmp: Path) -> None:
    both = "callbacks=[{_target_: resuming.Armed, step: 17},{_target_: resuming.Counter}]"
    arm("SIGTERM")
    assert train(*BASE, both, "run.dir=a") == 75
    assert train(*BASE, both, "run.dir=a") == 0
    assert training_state(Path("a"))["callbacks"] == [None, {"seen": torch.tensor(26.0)}]


def test_lines_beyond_the_state_are_cut(in_tmp: Path) -> None:
    assert train(*BASE, "logger=csv", "run.dir=whole") == 0
    arm("SIGTERM")
    assert train(*BASE, "logger=csv", "run.dir=a") == 75
    with Path("a/metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "split": "train", "loss": 9}\n{"step": 21, "spl')
    assert train(*BASE, "logger=csv", "run.dir=a") == 0
    assert records(Path("a")) == records(Path("whole"))
    tables = [(Path(name) / "metrics.csv").read_text().splitlines() for name in ("whole", "a")]
    whole, resumed = ([line.split(",")[0] for line in table] for table in tables)
    assert resumed == whole


def test_what_auto_became_is_kept_and_what_is_given_is_not_overruled(
    in_tmp: Path, stopped: Path, whole: Path
) -> None:
    assert read_choices(Path("a"))["dataloader.kind"].value == "memory"
    assert train(*BASE, "run.dir=a", "dataloader.kind=plain") == 0
    assert read_choices(Path("a"))["dataloader.kind"].value == "plain"
    assert_same_run(Path("whole"), Path("a"))


def test_a_run_resumed_elsewhere_keeps_what_auto_became(in_tmp: Path, stopped: Path) -> None:
    content = json.loads(Path("a/resolved.json").read_text())
    (choice,) = (each for each in content["choices"] if each["key"] == "dataloader.kind")
    choice["reason"] = "as it was begun"
    Path("a/resolved.json").write_text(json.dumps(content))
    assert train(*BASE, "run.resume=a", "run.dir=b") == 0
    assert read_choices(Path("b"))["dataloader.kind"].reason == "as it was begun"


def test_micro_batches_outlive_the_ranks_they_came_from(in_tmp: Path) -> None:
    words = (*BASE, "gradients.accumulate=2", "run.dir=a")
    arm("SIGTERM")
    assert train(*words) == 75
    own, choices = read_choices(Path("a")), AutoChoices()
    choices.made = own | {"micro_batches": AutoChoice("micro_batches", 4)}
    choices.choose("world_size", 2)
    choices.choose("backend.threads", 64)
    choices.write(Path("a"))
    assert train(*words) == 0
    assert read_choices(Path("a")) == own | {"micro_batches": AutoChoice("micro_batches", 4)}
    others: Any = SimpleNamespace(
        config=read_config(BASE)[1],
        ranks=Ranks(world_size=3),
        choices=AutoChoices({"micro_batches": AutoChoice("micro_batches", 4)}),
    )
    with pytest.raises(ConfigError, match=r"micro_batches=4: .* Resume it on 1, 2, 4 ranks: only a new run"):
        choose_micro_batches(others)
