"""`ptfast find workers` as a command: what its children measure, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import WITH_TESTS, train

from ptfast.cli import command_line
from ptfast.config.read import read_config
from ptfast.core.distributed import Ranks
from ptfast.measure.experiment.trial import Segments
from ptfast.report.terminal.display import Display

SMALL = ("model=mlp", "model.hidden=[8]")


POINTS = (*SMALL, "data=custom", "data._target_=toys.SlowPoints", "batch_size=4")


def test_what_waits_for_data_is_told_apart(tmp_path: Path) -> None:
    def metrics_of(name: str, *words: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        segments = Segments(read_config([*words, "device=cpu"])[1], tmp_path / name, Ranks(), None, Display())
        segments.warm_up(0.1)
        return segments.train(10, 1)

    slow = metrics_of("slow", *POINTS, "data.read_s=0.01", "dataloader=plain")
    assert slow["samples_per_s"] < 100
    assert slow["waiting"] > 0.7
    assert metrics_of("fast", "model=mlp", "model.hidden=[256,256]")["waiting"] < 0.5


def test_flags_of_another_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["find", "workers", "--from", "2"]) == 2
    assert "--from (command line): no such flag. " in capsys.readouterr().err


def find(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Result and output of `ptfast find workers WORDS...`."""
    command = [sys.executable, "-m", "ptfast", "find", "workers", *words, "--out", "out"]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **WITH_TESTS}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out" / "workers.json").read_text()), done.stdout


@pytest.mark.slow
def test_the_command_picks_many_for_slow_data_and_none_for_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    flags = ("--seconds", "0.3", "--to", "8")
    result, out = find(tmp_path / "a", *POINTS, "data.read_s=0.02", *flags, "--write", "found.yaml")
    assert result["chosen"]["workers"] >= 6
    trials = [trial for block in result["blocks"] for trial in block]
    memory = {count: [each["memory"][0] for each in trials if each["workers"] == count] for count in (0, 8)}
    assert min(memory[8]) > max(memory[0])
    assert f"dataloader.workers={result['chosen']['workers']}" in out
    monkeypatch.chdir(tmp_path / "a")
    _, config = read_config(["recipe=./found.yaml"])
    assert config.dataloader.workers == result["chosen"]["workers"]
    assert train("recipe=./found.yaml", "epochs=null", "steps=2", "run.dir=run") == 0
    result, _ = find(tmp_path / "b", *POINTS, *flags)
    assert result["chosen"]["workers"] == 0


@pytest.mark.slow
def test_two_ranks_agree(tmp_path: Path) -> None:
    ranks = ("device=cpu", "parallel=ddp", "parallel.nproc=2")
    result, out = find(tmp_path, *POINTS, "data.read_s=0.02", *ranks, "--seconds", "0.3", "--to", "2")
    assert result["chosen"]["workers"] == 2
    assert "workers per rank, for 2 ranks" in out


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "ptfast", "find", "workers", *POINTS, "--out", "out"]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), **WITH_TESTS}
    with subprocess.Popen(
        [*command, "--write", "found.yaml"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "samples/s" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "ptfast: interrupted\n")
    assert list(tmp_path.iterdir()) == []
