"""Sweeps: one table in the end, one failure that takes nothing along, one exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked, run_command
from jobs import in_this_process
from running import WITH_TESTS, same_bits, summary, train, weights
from torch import Tensor, nn

from ptfast.cli import sweep_command
from ptfast.cli.command_line import run as run_cli
from ptfast.config.compose import compose
from ptfast.core.errors import ConfigError

SMALL = ("steps=4", "log_every=2", "schedule=constant")


class Sometimes(nn.Module):
    """A model whose process dies, or that fails, if it is told to."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, ending: str = "fine") -> None:
        super().__init__()
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "broken":
            raise ValueError("mine")
        self.slow = ending == "slow"
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[-1] * input_shape[-2], num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.slow and not inputs.is_meta:
            Path(f"slow-{os.getpid()}").touch()
            time.sleep(0.05)
        return self.layers(inputs)


def test_a_sweep_prints_one_ranked_table(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    words = ("train", "-m", *SMALL, "optimizer=sgd,adamw", "model.hidden=[8],[32]", "run.root=my runs (1)")
    assert run_cli(words) == 0
    out, err = capsys.readouterr()
    assert "warning" not in err
    (folder,) = Path("my runs (1)/sweeps").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "3"]
    assert not Path("runs").exists()
    table = out[out.index("4 runs by val.accuracy, highest first") :]
    found = [json.loads((folder / str(n) / "summary.json").read_text())["val"]["accuracy"] for n in range(4)]
    ranks = [f"{100 * value:.2f}%" for value in sorted(found, reverse=True)]
    assert [table.index(value) for value in dict.fromkeys(ranks)] == sorted(
        table.index(value) for value in dict.fromkeys(ranks)
    )
    assert all(word in table for word in ("sgd", "adamw", "[8]", "[32]"))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_failed_job_takes_no_other_along(in_tmp: Path) -> None:
    words = ("steps=4", "model=custom", "model._target_=test_sweep.Sometimes", "+model.ending=killed,fine")
    sweep = Forked(run_command("train", "-m", *words), WITH_TESTS)
    out, _ = sweep.communicate()
    assert sweep.returncode == 1
    (folder,) = Path("runs/sweeps").iterdir()
    summaries = [json.loads((folder / name / "summary.json").read_text()) for name in ("0", "1")]
    assert [each["status"] for each in summaries] == ["failed", "finished"]
    assert "killed" in summaries[0]["error"]
    table = out[out.index("2 runs by") :]
    assert "failed" in table
    train(*words[:-1], "+model.ending=fine", "run.dir=alone")
    assert same_bits(weights(folder / "1"), weights(Path("alone")))


def test_the_exit_code_is_that_of_the_first_failure(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    words = ("model=custom", "model._target_=test_sweep.Sometimes", "steps=2", "optimizer=sgd")
    assert run_cli(["train", "-m", *words, "optimizer.lr=0.1,1e38", "+model.ending=fine,broken"]) == 2
    (folder,) = Path("runs/sweeps").iterdir()
    codes = [json.loads((folder / str(n) / "summary.json").read_text())["exit_code"] for n in range(4)]
    assert codes == [0, 2, 5, 2]


def test_a_point_that_cannot_be_trained_is_rejected_before_any_is(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["train", "-m", *SMALL, "optimizer.lr=0.1,-1"]) == 2
    assert "error[C005]" in capsys.readouterr().err
    assert list(in_tmp.iterdir()) == []


def test_the_objective_is_found_in_the_summary() -> None:
    summary: dict[str, Any] = {"val": {"loss": 1.0, "accuracy": 0.5}, "test": {"loss": 2.0}}
    summary["best_metric"] = "val.accuracy"
    assert sweep_command.objective(summary, "auto") == 0.5
    assert sweep_command.objective(summary, "loss") == 1.0
    assert sweep_command.objective(summary, "test.loss") == 2.0
    with pytest.raises(ConfigError, match=r"val\.loss, val\.accuracy, test\.loss"):
        sweep_command.objective(summary, "val.f1")


def test_a_sweep_without_a_validation_split_ranks_by_the_training_loss(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    assert run_cli(["train", "-m", *SMALL, "data.val=0", "seed=0,1"]) == 0
    assert "2 runs by train.loss, lowest first" in capsys.readouterr().out


@pytest.mark.slow
def test_a_signal_lets_the_jobs_save_and_starts_no_other(in_tmp: Path) -> None:
    words = ("model=custom", "model._target_=test_sweep.Sometimes", "+model.ending=slow", "seed=0,1,2")
    command = [sys.executable, "-m", "ptfast", "train", "-m", *words, "steps=2000", "log_every=1000"]
    command += ["sweep.parallel=2"]
    process = subprocess.Popen(
        command, env={**os.environ, **WITH_TESTS}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while len(list(in_tmp.glob("slow-*"))) < 2:
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    (folder,) = Path("runs/sweeps").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
    for run_dir in folder.iterdir():
        assert summary(run_dir)["status"] == "preempted"
        assert (run_dir / "saved/last").exists()
        assert "stopping after this step" in (run_dir / sweep_command.OUTPUT).read_text()
    assert "2 jobs, 0 of them finished," in out


def test_jobs_that_run_together_share_the_machine(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sweep_command, "usable_cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shares = []

    def fail(process: Any) -> None:
        shares.append(process.environment)
        process.exitcode = -signal.SIGSEGV

    monkeypatch.setattr(sweep_command, "start_process", fail)
    assert run_cli(["train", "-m", "sweep.parallel=auto", "seed=0,1,2"]) == 1
    assert "job 1: crashed\n" in capsys.readouterr().out
    share = {"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "2"}
    assert shares == [{**share, "CUDA_VISIBLE_DEVICES": gpu} for gpu in ("5", "7", "5")]
    assert run_cli(["train", "-m", "sweep.parallel=2", "hydra/launcher=basic", "seed=0,1"]) == 2
    assert "error[C011]: sweep.parallel=2" in capsys.readouterr().err


def test_a_failed_job_leaves_no_secret_behind(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    job = sweep_command.SweepJob(lambda words: 1, in_tmp)
    with pytest.raises(sweep_command.JobError):
        job(compose(["optimizer.lr=0.5", "+data.api_key=sesame"]), 0)()
    assert json.loads(Path("0/summary.json").read_text())["arguments"] == [
        "optimizer.lr=0.5",
        "+data.api_key=<secret>",
    ]
