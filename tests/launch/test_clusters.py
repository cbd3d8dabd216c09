"""Trainings on SLURM and Ray, started here: runs that were ended and resumed have the same bits."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from running import WITH_TESTS, records, same_bits, summary, weights

pytestmark = pytest.mark.slow

RUN = ("model.hidden=[32]", "batch_size=64", "steps=1200", "log_every=100", "eval.every=1000steps")
RUN = (*RUN, "saving.every=10steps", "parallel=ddp")
SLOW = "callbacks=[{_target_: callbacks.Slow}]"
SLURM = """\
ClusterName=ptfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=60
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES
"""
"""One node, this machine; `cred_expire` is how long a job waits that was queued again."""


def output_of(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.5)


@pytest.fixture
def slurm(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A SLURM of this machine alone, in a folder of its own."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        pytest.skip("SLURM takes root, and slurmctld, slurmd and munge installed")
    folder = in_tmp / "slurm"
    (folder / "state").mkdir(parents=True)
    key, conf = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with socket.socket() as one, socket.socket() as other:
        ports = [free.bind(("", 0)) or free.getsockname()[1] for free in (one, other)]
    host, cores = socket.gethostname(), len(os.sched_getaffinity(0))
    conf.write_text(SLURM.format(host=host, ports=ports, folder=folder, cores=cores))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("PYTHONPATH", WITH_TESTS["PYTHONPATH"])
    munge = (
        "--socket",
        f"{folder}/munge.socket",
        "--key-file",
        str(key),
        "--pid-file",
        f"{folder}/munge.pid",
    )
    munge = (*munge, "--log-file", f"{folder}/munge.log", "--seed-file", f"{folder}/munge.seed")
    commands = [("munged", "--foreground", "--force", *munge), ("slurmctld", "-D"), ("slurmd", "-D")]
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{command[0]}.out").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            time.sleep(1)
        wait_for(lambda: "idle" in output_of("sinfo", "--noheader", "-o", "%T"), 60)
        yield folder
        output_of("scancel", "--user=root", "--full")
        wait_for(lambda: not output_of("squeue", "--noheader"), 90)


def ptfast(*words: str) -> str:
    """What a command prints that succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "ptfast", *words],
        env={**os.environ, **WITH_TESTS},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_slurm_warns_a_run_that_saves_and_resumes_to_the_same_bits(slurm: Path) -> None:
    words = (*RUN, "parallel.nproc=2", SLOW, "run.dir=stopped")
    job = ptfast("launch", "slurm", *words, "--time", "6m").split()[-1]
    # It is warned five minutes before its limit.
    wait_for(lambda: "preempted" in str(summary_of("stopped")), 250)
    saved = summary_of("stopped")
    assert 0 < saved["steps"] < 1200
    assert Path("stopped/saved/last").resolve().name == f"step-{saved['steps']}"
    wait_for(lambda: "Restarts=0" not in output_of("scontrol", "show", "job", job), 60)
    wait_for(lambda: not output_of("squeue", "--noheader"), 300)
    (out,) = Path().glob("slurm-*.out")
    assert f"at step {saved['steps']}" in out.read_text()
    ptfast("train", *RUN, "parallel.nproc=2", "run.dir=whole")
    assert summary(Path("stopped"))["status"] == "finished"
    assert same_bits(weights(Path("stopped")), weights(Path("whole")))
    # Training losses are means of what lay before and behind the interruption.
    of_stopped, of_whole = (
        [line for line in records(Path(name)) if line["split"] == "val"] for name in ("stopped", "whole")
    )
    assert of_stopped == of_whole


def summary_of(folder: str) -> dict[str, Any]:
    return summary(Path(folder)) if Path(folder, "summary.json").exists() else {}


def test_a_sweep_runs_through_slurm(slurm: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    words = ("train", "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "steps=5")
    out = ptfast(*words, "model.hidden=[8]", "seed=1,2")
    assert out.count("finished") >= 2, out


def test_ray_starts_ranks_again_to_the_same_bits(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.train")
    for name in ("RAY_ADDRESS", "RAY_TRAIN_METRICS_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    words = (*RUN, "steps=300", "saving.every=50steps")
    words = tuple({word.partition("=")[0]: word for word in words}.values())
    page = (ROOT / "docs/how-to/operate/slurm-and-ray.md").read_text()
    driver = page.partition("```python\n")[2].partition("```")[0]
    driver = driver.replace("num_workers=16, use_gpu=True", "num_workers=2")
    driver = re.sub(
        "WORDS = .*", lambda _: f"WORDS = {[*words, SLOW, 'run.dir=stopped', 'run.resume=auto']}", driver
    )
    Path("driver.py").write_text(driver)
    command = [sys.executable, "driver.py"]
    with Path("ray.txt").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **WITH_TESTS}, stdout=log, stderr=log)
        try:
            wait_for(Path("stopped/saved/step-100").exists, 200)
            os.kill(int(Path("pid-1").read_text()), signal.SIGKILL)
            assert process.wait(timeout=300) == 0, Path("ray.txt").read_text()[-5000:]
        finally:
            process.terminate()
            process.wait()
    ptfast("train", *words, "parallel.nproc=2", "run.dir=whole")
    assert "resumed    at step" in Path("ray.txt").read_text()
    assert same_bits(weights(Path("stopped")), weights(Path("whole")))
    assert records(Path("stopped")) == records(Path("whole"))
