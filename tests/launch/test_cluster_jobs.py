"""What clusters are given: by a golden file, and errors before anything is submitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptfast.cli import command_line

GOLDEN = next((Path(__file__).parent / "golden").glob("slurm*"))
WORDS = ("recipe=resnet_cifar", "optimizer.lr=0.1", "trust=[mine]", "run.dir=/shared/runs/mine")
PRINTED = "--nodes 2 --gpus H100:8 --cpus 64 --time 4h --partition gpu"


def test_a_printed_job_is_the_golden_one(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert command_line.run(["launch", "slurm", *WORDS, *PRINTED.split(), "--print"]) == 0
    script = capsys.readouterr().out.replace(str(in_tmp), "/shared/project")
    assert script == GOLDEN.read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert not list(in_tmp.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("slrum", 2, "launch=slrum (command line): expected slurm. Did you mean slurm?"),
        ("slurm optimizer.lrr=1", 2, "optimizer.lrr=1 (command line): unknown key"),
        ("slurm --nodes 0", 2, "--nodes=0 (command line): expected a whole number above 0"),
        ("slurm --gpus H100", 2, "--gpus=H100 (command line): expected a whole number above 0"),
        ("slurm --color x", 2, "--color (command line): no such flag. Flags: --nodes, --gpus"),
        ("slurm --nodes 3 batch_size=64", 2, "batch_size=64"),
        ("slurm parallel=ddp parallel.nnodes=2", 2, "Use --nodes 2"),
        ("slurm --time soon", 2, "--time=soon"),
        ("slurm", 4, "sbatch: not found on the path. Print the job with --print"),
    ],
)
def test_what_cannot_be_submitted_is_one_line(
    words: str,
    code: int,
    says: str,
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", os.fspath(in_tmp))
    assert command_line.run(["launch", *words.split()]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not list(in_tmp.iterdir())


def test_a_job_is_handed_to_the_command_of_its_cluster(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (in_tmp / "sbatch").write_text("#!/bin/sh\ncat > job; echo Submitted batch job 7; exit 3\n")
    (in_tmp / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(in_tmp), prepend=os.pathsep)
    assert command_line.run(["launch", "slurm", "device=cuda"]) == 3
    assert capfd.readouterr().out == "Submitted batch job 7\n"
    script = (in_tmp / "job").read_text()
    assert "nnodes" not in script
    assert f" device=cuda run.dir={in_tmp}/runs/train/" in script
