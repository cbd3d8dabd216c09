"""States and directories that are damaged, missing, in use or full: runs go on from what is whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import (
    BASE,
    Armed,
    arm,
    assert_same_run,
    runs,
    stopped,
    train_in_child,
    whole,
)
from running import WITH_TESTS, build_run, records, same_bits, summary, train, weights

from ptfast.core import run_directory
from ptfast.core.tensors import checkpoint_files
from ptfast.core.tensors.checkpoint_folders import list_checkpoints, point

__all__ = ["runs", "stopped", "whole"]


def test_a_link_that_a_kill_left_behind_is_put_right(in_tmp: Path) -> None:
    arm("SIGTERM")
    words = (*BASE, "saving.keep=9", "run.dir=a")
    assert train(*words) == 75
    best = json.loads(Path("a/saved/last/state.json").read_text())["progress"]["best_step"]
    assert best == 12
    point(Path("a/saved"), "best", Path("step-6"))
    run = build_run(Path("a"), *words, checkpoint_folder=Path("a/saved/step-17"))
    assert run.progress.best_step == 12
    assert Path("a/saved/best").resolve().name == "step-12"


@pytest.mark.parametrize("best", ["3", "1", "true", "0"])
def test_the_states_of_the_best_evaluations_are_kept(in_tmp: Path, best: str) -> None:
    words = (*BASE, "saving.every=100steps", "optimizer.lr=0.05", f"saving.best={best}")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=a") == -signal.SIGKILL
    assert Path("a/saved").exists() == (best != "0")
    assert train(*words, "run.dir=a") == 0
    assert_same_run(Path("a"), Path("whole"))
    ranked = sorted(
        (-each["accuracy"], each["step"]) for each in records(Path("a")) if each["split"] == "val"
    )
    number = 1 if best == "true" else int(best)
    kept = [step for _, step in ranked[:number]]
    assert {path.name for path in list_checkpoints(Path("a/saved"))} == {
        f"step-{step}" for step in (26, *kept)
    }
    assert Path("a/saved/best").exists() == bool(number)
    if number > 1:
        assert Path("a/saved/best").resolve().name == f"step-{kept[0]}"
        found = [(-each["accuracy"], each["step"]) for each in summary(Path("a"))["best_states"]]
        assert found == ranked[:number]


def test_a_warm_start_takes_the_averages(in_tmp: Path) -> None:
    assert train(*BASE, "ema.decay=0.9", "run.dir=a") == 0
    state = Path("a/saved/best").resolve()
    averages = torch.load(state / "training.pt", weights_only=True)["ema"]["averages"]
    start = ("model.hidden=[16]", "model.dropout=0.3", "steps=5")
    assert same_bits(dict(build_run(Path("b"), *start, "model.weights=a").model.state_dict()), averages)
    raw = build_run(Path("b"), *start, f"model.weights={state}/model.pt").model.state_dict()
    assert same_bits(dict(raw), weights(Path("a"), "best"))
    assert not same_bits(dict(raw), averages)


def test_a_damaged_state_is_passed_over(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*BASE, "saving.keep=3", "run.dir=a")
    assert train(*BASE, "saving.keep=3", "run.dir=whole") == 0
    arm("SIGTERM")
    assert train(*words) == 75
    model = Path("a/saved/step-17/model.pt")
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    capsys.readouterr()
    assert train(*words) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning" in line
    assert "step-17" in line
    assert_same_run(Path("whole"), Path("a"))
    assert "step-17" not in [path.name for path in Path("a/saved").iterdir()]


def test_a_state_is_hashed_once_to_be_resumed(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, stopped: Path
) -> None:
    hashed: list[str] = []

    def noting(path: Path) -> str:
        hashed.append(f"{path.parent.name}/{path.name}")
        return sha256(path)

    sha256 = checkpoint_files._sha256
    monkeypatch.setattr(checkpoint_files, "_sha256", noting)
    assert train(*BASE, "run.dir=a") == 0
    of_state = sorted(name for name in hashed if name.startswith("step-17/"))
    assert of_state == ["step-17/model.pt", "step-17/state.json", "step-17/training.pt"]


def test_a_run_whose_every_state_is_damaged_says_so(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], stopped: Path
) -> None:
    for folder in list_checkpoints(Path("a/saved")):
        (folder / "model.pt").write_bytes(b"")
    assert train(*BASE, "run.dir=a") == 6
    assert "error[S001]" in capsys.readouterr().err.splitlines()[-1]


def test_a_finished_run_whose_end_is_damaged_comes_to_it_again(in_tmp: Path) -> None:
    words = (*BASE, "saving.keep=3")
    assert train(*words, "run.dir=whole") == 0
    assert train(*words, "run.dir=a") == 0
    (Path("a/saved/step-26") / "model.pt").write_bytes(b"")
    assert train(*words, "run.dir=a") == 0
    assert_same_run(Path("whole"), Path("a"))


def test_a_finished_run_whose_states_are_gone_is_left_alone(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("steps=4", "log_every=1", "model.hidden=[4]", "run.dir=a")
    assert train(*words, "run.dir=other") == train(*words) == 0
    shutil.rmtree("a/saved")
    before = Path("a/metrics.jsonl").read_text()
    for resume in ("auto", "never", "other"):
        capsys.readouterr()
        assert train(*words, f"run.resume={resume}") == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert "error[S004]: run.dir=a (command line): contains metrics of a run of 4 steps" in line
    assert Path("a/metrics.jsonl").read_text() == before


def test_a_link_to_the_best_is_not_left_to_an_older_one(in_tmp: Path) -> None:
    words = ("saving.every=6steps", "eval.every=6steps", "schedule=constant", "run.resume=auto", "run.dir=a")
    assert train(*words, "epochs=1", "saving.best=1") == 0
    assert Path("a/saved/best").is_symlink()
    assert train(*words, "epochs=2", "saving.best=0", "saving.keep=1") == 0
    assert not Path("a/saved/best").is_symlink()
    assert train(*words, "epochs=4", "saving.best=4", "saving.keep=1") == 0
    kept = json.loads(Path("a/saved/last/state.json").read_text())["progress"]["best_states"]
    assert Path("a/saved/best").resolve().name == f"step-{kept[0][1]}"
    assert {folder.name for folder in list_checkpoints(Path("a/saved"))} >= {
        f"step-{step}" for _, step in kept
    }
    assert len(kept) > 1


def test_a_copy_without_links_is_resumed(in_tmp: Path, stopped: Path) -> None:
    shutil.copytree(stopped, "copy")
    shutil.copytree(
        stopped, "bare", ignore=lambda *_: [folder.name for folder in (stopped / "saved").glob("step-*")]
    )
    assert train(*BASE, "run.dir=a") == 0
    for copy in (Path("copy"), Path("bare")):
        assert train(*BASE, f"run.dir={copy}") == 0
        assert_same_run(copy, Path("a"))
        assert (copy / "saved/last").is_symlink()


def test_a_run_goes_on_from_the_state_named(in_tmp: Path) -> None:
    words = (*BASE[:-1], "saving.keep=9")
    assert train(*words, "run.dir=whole") == 0
    # Back to an earlier state of the same run: what lies beyond it is cut.
    assert train(*words, "run.dir=a") == 0
    arm("SIGTERM")
    assert train(*words, "run.resume=a/saved/step-12") == 75
    assert [path.name for path in list_checkpoints(Path("a/saved"))][:2] == ["step-17", "step-16"]
    assert max(record["step"] for record in records(Path("a"))) == 15
    Path("a/wandb.json").write_text('{"id": "its own"}')
    assert train(*words, "run.resume=a") == 0
    assert Path("a/wandb.json").exists()
    assert_same_run(Path("whole"), Path("a"))
    # Into another directory: the figures up to there stay behind.
    assert train(*words, "run.resume=a/saved/step-12", "run.dir=b") == 0
    assert same_bits(weights(Path("whole")), weights(Path("b")))
    assert min(record["step"] for record in records(Path("b"))) == 15
    assert train(*words, "run.resume=a", "run.dir=b") == 2


def test_states_without_their_config_are_kept(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("steps=4", "model.hidden=[4]", "run.dir=a")
    assert train(*words) == 0
    Path("a/config.yaml").unlink()
    for resume in ("auto", "never"):
        capsys.readouterr()
        assert train(*words, f"run.resume={resume}") == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert "error[S004]: run.dir=a (command line): its config.yaml is gone; step-4 is still there" in line
        assert "Put config.yaml back" in line
    assert Path("a/saved/step-4/model.pt").exists()


def test_a_state_that_is_not_there_is_told_of(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*BASE[:-1], "run.resume=nowhere") == 6
    assert "error[S004]" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_that_saved_nothing_starts_clean(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*BASE, "saving.every=100steps", "eval.every=100steps", "log_every=1", "run.dir=a")
    with monkeypatch.context() as patch:
        patch.setattr(Armed, "on_step", lambda self, run, step: 1 // (9 - step))
        assert train(*words) == 2
    assert [record["step"] for record in records(Path("a"))] == list(range(1, 9))
    # Nothing binds it to the config it had, nor to its place in Weights & Biases.
    Path("a/wandb.json").write_text('{"id": "of the run before"}')
    assert train(*words, "seed=5") == 0
    assert not Path("a/wandb.json").exists()
    steps = [record["step"] for record in records(Path("a")) if record["split"] == "train"]
    assert steps == list(range(1, 27))


def test_who_made_a_directory_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    assert run_directory.create_folder(folder) == [folder, tmp_path / "runs"]
    assert run_directory.create_folder(folder) == []


def test_a_worker_that_outlives_a_killed_run_does_not_hold_its_directory(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from ptfast.core import run_directory
forked, told = os.pipe()
with run_directory.lock(Path(sys.argv[1])):
    if os.fork() == 0:
        os.write(told, b".")
        sys.stdin.read()
        os._exit(0)
    os.read(forked, 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command, environment = [sys.executable, "-c", code, str(tmp_path)], {**os.environ, **WITH_TESTS}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as killed:
        assert killed.wait(timeout=60) == -signal.SIGKILL
        with run_directory.lock(tmp_path):
            pass


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "main.py"])
def test_a_folder_with_a_users_own_files_is_left_alone(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    project = in_tmp / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (project / name).write_text("mine: 1\n")
    for words in (("run.dir=.",), ("run.dir=.", "run.resume=auto"), (f"run.dir={project}",)):
        assert train(*BASE, *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"contains files that no run has made: {name}" in line
        assert "Choose a new folder, such as run.dir=" in line
    assert [(path.name, path.read_text()) for path in project.iterdir()] == [(name, "mine: 1\n")]


def test_a_folder_may_hold_the_log_of_its_run(in_tmp: Path) -> None:
    Path("a").mkdir()
    Path("a/slurm-7.out").touch()
    assert train("run.dir=a", "epochs=1", "saving.best=0") == 0


@pytest.mark.parametrize("name", [".lock", "metrics.csv", "attempts.jsonl", "saved/step-99", "tensorboard"])
def test_a_strangers_link_is_not_written_through(
    in_tmp: Path,
    stopped: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    target = in_tmp / "precious"
    target.write_text("mine")
    link = stopped / name
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(in_tmp / "another"))
        assert train(*BASE, "run.dir=a") == 2
        assert f"error[C013]: a/{name}: a link that leads out" in capsys.readouterr().err
    # One's own run may lie on several disks; files are not followed all the same.
    train(*BASE, "run.dir=a", "logger=csv")
    assert target.read_text() == "mine"


def test_a_directory_in_use_is_rejected(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a").mkdir()
    with run_directory.lock(Path("a")), monkeypatch.context() as patch:
        # Both found no such directory, and each made it, as far as it knows.
        patch.setattr(run_directory, "create_folder", lambda folder: [folder])
        assert train(*BASE, "run.dir=a") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[E003]" in line
    assert f"process {os.getpid()}" in line
    assert train(*BASE, "run.dir=a") == 0


def test_a_full_disk_ends_the_run_and_keeps_the_state_before(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: Path
) -> None:
    save, calls = torch.save, []

    def fill(state: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) > 6:
            raise OSError(28, "No space left on device")
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fill)
        capsys.readouterr()
        assert train(*BASE, "run.dir=a") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[E002]" in line
    assert summary(Path("a"))["status"] == "failed"
    assert train(*BASE, "run.dir=a") == 0
    assert_same_run(Path("whole"), Path("a"))


def test_figures_that_cannot_be_written_fail_the_run(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ptfast.core.errors import cannot_write
    from ptfast.report.loggers import JsonlLogger

    def full(self: JsonlLogger, record: Any) -> None:
        raise cannot_write(OSError(28, "No space left on device"), str(self.path))

    monkeypatch.setattr(JsonlLogger, "log", full)
    assert train(*BASE, "run.dir=a", "epochs=1") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[E002]" in line
    assert "metrics.jsonl" in line
    assert (summary(Path("a"))["status"], summary(Path("a"))["exit_code"]) == ("failed", 4)


@pytest.mark.parametrize("saves", ["4steps", "100steps"])
def test_a_killed_run_is_one_curve_in_tensorboard(in_tmp: Path, saves: str) -> None:
    """It goes on from its state, or if it had saved none yet, from the start."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rhythm = (f"saving.every={saves}", "eval.every=100steps", "log_every=5steps")
    words = (*BASE, *rhythm, "logger=tensorboard", "run.dir=a")
    arm("SIGKILL")
    assert train_in_child(*words) == -signal.SIGKILL
    assert train_in_child(*words) == 0
    events = accumulator.EventAccumulator("a/tensorboard").Reload()
    for split in ("train", "val"):
        curve = [(event.step, pytest.approx(event.value)) for event in events.Scalars(f"{split}/loss")]
        logged = [each for each in records(Path("a")) if each["split"] == split]
        assert curve == [(each["step"], each["loss"]) for each in logged]
    assert [event.step for event in events.Scalars("train/lr")] == [5, 10, 15, 20, 25, 26]
