"""Runs that were killed, stopped, damaged or changed go on to the same bits, or say why they do not."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunPtfast
from running import WITH_TESTS, build_run, records, same_bits, summary, train, training_state, weights
from torch.utils.data import TensorDataset
from toys import blobs

from ptfast import run_folder
from ptfast.run import Callback
from ptfast.saving import list_states, point

MODEL = ("model.hidden=[16]", "model.dropout=0.3", "augment.crop_padding=1", "augment.flip=true")
RHYTHM = ("epochs=2", "batch_size=128", "log_every=5", "saving.every=4steps", "eval.every=6steps")
KILLED = (*RHYTHM, "callbacks=[{_target_: test_resume.Armed, step: 17}]", "run.resume=auto")
BASE = (*MODEL, *KILLED)
"""Two epochs of 13 steps. The callback acts if there is a file `armed` that names a signal."""


class Armed(Callback):
    """Sends this process the signal that a file `armed` names, once, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, step: int) -> None:
        file = Path("armed")
        if step == self.step and file.exists():
            number = signal.Signals[file.read_text()]
            file.unlink()
            os.kill(os.getpid(), number)


class Counter(Callback):
    """Remembers how many steps it has seen."""

    def __init__(self) -> None:
        self.seen = torch.zeros(())

    def on_step(self, run: Any, step: int) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])


def guarded(api_key: str) -> TensorDataset:
    """Data behind a password."""
    assert api_key == "open sesame"
    return blobs()


def arm(name: str) -> None:
    Path("armed").write_text(name)


def train_in_child(*words: str) -> int:
    """As `train`, in a process of its own that a signal may kill; negative is the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(train(*words))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def assert_same_run(left: Path, right: Path) -> None:
    """Same final weights, optimizer, averages and figures."""
    assert same_bits(weights(left), weights(right))
    assert same_bits(training_state(left), training_state(right))
    assert records(left) == records(right)
    assert (summary(left)["val"], summary(left)["best"]) == (summary(right)["val"], summary(right)["best"])


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=sgd",),
        ("dataloader.kind=workers", "dataloader.workers=2", "optimizer=adamw", "ema.decay=0.9"),
        ("precision=bf16", "gradients.accumulate=4", "ema.decay=0.9", "schedule=onecycle"),
    ],
    ids=["memory", "workers and ema", "bf16, accumulation and ema"],
)
def test_a_killed_run_ends_with_the_same_bits(in_tmp: Path, words: tuple[str, ...]) -> None:
    assert_goes_on(*BASE, *words)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_run_goes_on_with_its_average_and_its_cycles(in_tmp: Path) -> None:
    """The average begins at step 13, and BatchNorm is measured for it, before the kill and after."""
    average = ("ema=swa", "ema.swa_start=50%", "ema.swa_every=3steps", "eval.flip=true")
    assert_goes_on(*KILLED, "model=resnet_digits", "model.width=4", "schedule=cyclic", *average)


def assert_goes_on(*words: str) -> None:
    """Killed and begun again, it ends as if never killed."""
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=killed") == -signal.SIGKILL
    assert list_states(Path("killed/saved"))[0].name == "step-16"
    assert not Path("killed/summary.json").exists()
    assert train(*words, "run.dir=killed") == 0
    assert summary(Path("killed"))["steps"] == 26
    assert_same_run(Path("whole"), Path("killed"))


def test_the_command_goes_on_where_it_was_killed(in_tmp: Path, run_ptfast: RunPtfast) -> None:
    """As above, as a user runs it."""
    callback = "callbacks=[{_target_: test_resume.Armed, step: 17}]"
    words = ("train", *MODEL, *RHYTHM, callback, "run.resume=auto", "run.name=mine")
    arm("SIGKILL")
    killed = run_ptfast(*words, env=WITH_TESTS)
    assert killed.code == -signal.SIGKILL
    resumed = run_ptfast(*words, env=WITH_TESTS)
    assert (resumed.code, resumed.err) == (0, "")
    assert "at step 16" in resumed.out
    (folder,) = Path("runs/mine").iterdir()
    assert train(*BASE, "run.dir=whole") == 0
    assert_same_run(Path("whole"), folder)
    assert (folder / "report.html").is_file()


def test_worker_processes_change_nothing(in_tmp: Path) -> None:
    assert train(*BASE, "run.dir=none") == 0
    assert train(*BASE, "run.dir=two", "dataloader.kind=workers", "dataloader.workers=2") == 0
    assert_same_run(Path("none"), Path("two"))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_stopped_run_goes_on(in_tmp: Path, name: str, code: int) -> None:
    assert train(*BASE, "run.dir=whole") == 0
    arm(name)
    assert train(*BASE, "run.dir=stopped") == code
    assert list_states(Path("stopped/saved"))[0].name == "step-17"
    assert train(*BASE, "run.dir=stopped") == 0
    assert_same_run(Path("whole"), Path("stopped"))


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


def test_a_failed_run_is_unfinished(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(*BASE, "run.dir=whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Armed, "on_step", lambda self, run, step: 1 // (17 - step))
        assert train(*BASE, "run.name=mine") == 1
    (folder,) = Path("runs/mine").iterdir()
    assert summary(folder)["status"] == "failed"
    assert train(*BASE, "run.name=mine") == 0
    assert_same_run(Path("whole"), folder)


def test_a_finished_run_is_left_alone(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*BASE, "run.dir=a") == 0
    before = {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
    assert train(*BASE, "run.dir=a") == 0
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")} == before


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


def test_a_changed_config_names_the_keys(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm("SIGTERM")
    assert train(*BASE, "run.dir=a") == 75
    capsys.readouterr()
    assert train(*BASE, "run.dir=a", "optimizer.lr=0.5", "seed=3", "log_every=7") == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[S003]" in line
    assert "optimizer.lr, seed" in line
    assert "log_every" not in line


def test_a_strangers_config_is_compared_and_not_imported(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(in_tmp)
    Path("stranger.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass Armed: ...\n")
    arm("SIGTERM")
    assert train(*BASE, "run.dir=a") == 75
    file = Path("a/config.yaml")
    file.write_text(file.read_text().replace("test_resume.Armed", "stranger.Armed"))
    capsys.readouterr()
    for words in (("run.resume=a",), ("run.dir=a",)):
        assert train(*BASE, *words) == 6
        assert "callbacks" in capsys.readouterr().err
    assert not Path("imported").exists()


def test_a_secret_in_clear_is_written_nowhere_and_hinders_no_resuming(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("data=custom", "data._target_=test_resume.guarded", "+data.api_key=open sesame")
    words = (*BASE[5:], *data, "batch_size=4", "run.dir=a")
    assert train(*words, "parallel=ddp", "parallel.nproc=2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[C011]: data.api_key=<secret> (command line)" in line
    assert "${oc.env:NAME}" in line
    assert not Path("a").exists()
    arm("SIGTERM")
    assert train(*words) == 75
    assert train(*words) == 0
    assert summary(Path("a"))["status"] == "finished"
    files = [path.read_bytes() for path in Path("a").rglob("*") if path.is_file()]
    assert not any(b"sesame" in content for content in files)


def test_a_callback_remembers(in_tmp: Path) -> None:
    both = "callbacks=[{_target_: test_resume.Armed, step: 17},{_target_: test_resume.Counter}]"
    arm("SIGTERM")
    assert train(*BASE, both, "run.dir=a") == 75
    assert train(*BASE, both, "run.dir=a") == 0
    assert training_state(Path("a"))["callbacks"] == [None, {"seen": torch.tensor(26.0)}]


def test_a_link_that_a_kill_left_behind_is_put_right(in_tmp: Path) -> None:
    arm("SIGTERM")
    words = (*BASE, "saving.keep=9", "run.dir=a")
    assert train(*words) == 75
    best = json.loads(Path("a/saved/last/state.json").read_text())["progress"]["best_step"]
    assert best == 12
    point(Path("a/saved"), "best", Path("step-6"))
    run = build_run(Path("a"), *words, state_folder=Path("a/saved/step-17"))
    assert run.progress.best_step == 12
    assert Path("a/saved/best").resolve().name == "step-12"


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


def test_a_run_whose_every_state_is_damaged_says_so(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm("SIGTERM")
    assert train(*BASE, "run.dir=a") == 75
    for folder in list_states(Path("a/saved")):
        (folder / "model.pt").write_bytes(b"")
    capsys.readouterr()
    assert train(*BASE, "run.dir=a") == 6
    assert "error[S001]" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_goes_on_from_the_state_named(in_tmp: Path) -> None:
    words = (*BASE[:-1], "saving.keep=9")
    assert train(*words, "run.dir=whole") == 0
    # Back to an earlier state of the same run: what lies beyond it is cut.
    assert train(*words, "run.dir=a") == 0
    (Path("a/summary.json")).unlink()
    arm("SIGTERM")
    assert train(*words, "run.resume=a/saved/step-12") == 75
    assert [path.name for path in list_states(Path("a/saved"))][:2] == ["step-17", "step-16"]
    assert max(record["step"] for record in records(Path("a"))) == 15
    assert train(*words, "run.resume=a") == 0
    assert_same_run(Path("whole"), Path("a"))
    # Into another directory: the figures up to there stay behind.
    assert train(*words, "run.resume=a/saved/step-12", "run.dir=b") == 0
    assert same_bits(weights(Path("whole")), weights(Path("b")))
    assert min(record["step"] for record in records(Path("b"))) == 15
    assert train(*words, "run.resume=a", "run.dir=b") == 2


def test_a_state_that_is_not_there_is_told_of(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*BASE[:-1], "run.resume=nowhere") == 6
    assert "error[S004]" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_that_saved_nothing_starts_clean(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*BASE, "saving.every=100steps", "eval.every=100steps", "log_every=1", "run.dir=a")
    with monkeypatch.context() as patch:
        patch.setattr(Armed, "on_step", lambda self, run, step: 1 // (9 - step))
        assert train(*words) == 1
    assert [record["step"] for record in records(Path("a"))] == list(range(1, 9))
    # Nothing binds it to the config it had.
    assert train(*words, "seed=5") == 0
    steps = [record["step"] for record in records(Path("a")) if record["split"] == "train"]
    assert steps == list(range(1, 27))


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


def test_what_auto_became_is_kept_and_what_is_given_is_not_overruled(in_tmp: Path) -> None:
    arm("SIGTERM")
    assert train(*BASE, "run.dir=a") == 75
    resolved = json.loads(Path("a/resolved.json").read_text())
    assert resolved["dataloader"] == "memory"
    assert train(*BASE, "run.dir=a", "dataloader.kind=plain") == 0
    assert json.loads(Path("a/resolved.json").read_text())["dataloader"] == "plain"
    assert train(*BASE, "run.dir=whole") == 0
    assert_same_run(Path("whole"), Path("a"))


def test_micro_batches_outlive_the_ranks_they_came_from(in_tmp: Path) -> None:
    words = (*BASE, "gradients.accumulate=2", "run.dir=a")
    arm("SIGTERM")
    assert train(*words) == 75
    resolved = json.loads(Path("a/resolved.json").read_text())
    on_two_ranks = resolved | {"num_ranks": 2, "micro_batches": 4, "threads": 64}
    Path("a/resolved.json").write_text(json.dumps(on_two_ranks))
    assert train(*words) == 0
    assert json.loads(Path("a/resolved.json").read_text()) == resolved | {"micro_batches": 4}


def test_who_made_a_directory_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    assert run_folder.create_folder(folder) == [folder, tmp_path / "runs"]
    assert run_folder.create_folder(folder) == []


def test_a_directory_in_use_is_refused(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a").mkdir()
    with run_folder.hold(Path("a")), monkeypatch.context() as patch:
        # Both found no such directory, and each made it, as far as it knows.
        patch.setattr(run_folder, "create_folder", lambda folder: [folder])
        assert train(*BASE, "run.dir=a") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[E003]" in line
    assert f"process {os.getpid()}" in line
    assert train(*BASE, "run.dir=a") == 0


def test_a_full_disk_ends_the_run_and_keeps_the_state_before(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*BASE, "run.dir=whole") == 0
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
    from ptfast.logger import JsonlLogger, _cannot_write

    def full(self: JsonlLogger, record: Any) -> None:
        raise _cannot_write(self.path, OSError(28, "No space left on device"))

    monkeypatch.setattr(JsonlLogger, "log", full)
    assert train(*BASE, "run.dir=a", "epochs=1") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "error[E002]" in line
    assert "metrics.jsonl" in line
    assert (summary(Path("a"))["status"], summary(Path("a"))["exit_code"]) == ("failed", 4)
