"""`ptfast launch`: submits a training to a cluster, or prints what would be submitted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ptfast.core.clock import STARTED_VARIABLE
from ptfast.core.errors import COMMAND_LINE, ConfigError, MachineError, PtfastError

if TYPE_CHECKING:
    from ptfast.config.compose import Composed

OF_MACHINE = ("C012", "E004", "E005")
"""Errors about this machine, which submits and need not be able to train."""
WARNING_S = 300
"""How long before its time limit SLURM warns a job, which then saves and ends."""
SUBMIT = {"slurm": ("sbatch",), "ray": (sys.executable, "-")}
"""The command that reads a job from its standard input."""


@dataclass(frozen=True)
class Job:
    """The resources and the command of a training on a cluster.

    Args:
        words: arguments of `ptfast train` on every node, without the place where nodes meet.
        name: small letters, digits and dashes, a letter first, which all clusters allow.
        gpu_type: such as H100; None for any.
        num_gpus: of each node; None requests none.
        num_cpus: of each node.
        limit_s: seconds after which it is ended.
    """

    words: tuple[str, ...]
    name: str
    num_nodes: int = 1
    gpu_type: str | None = None
    num_gpus: int | None = None
    num_cpus: int | None = None
    limit_s: int | None = None
    partition: str | None = None


def launch(args: Namespace) -> int:
    """Submit the training that the words mean, or print what would be submitted.

    Raises:
        MachineError: E005 if the cluster's command is not installed, E004 if Ray is not.
    """
    text = _slurm(_job(args)) if args.kind == "slurm" else _ray(_job(args))
    if args.print:
        print(text, end="")
        return 0
    command = SUBMIT[args.kind]
    if not shutil.which(command[0]):
        hint = f"Print the job with --print, and submit it where {command[0]} is"
        raise MachineError("E005", "not found on the path", key=command[0], suggestion=hint)
    if args.kind == "ray" and not importlib.util.find_spec("ray"):
        hint = "Install ray[train], or print the driver with --print"
        raise MachineError("E004", "ray is not installed", key="launch", value="ray", suggestion=hint)
    # The time of the run counts from its own start, not from here.
    environment = {name: value for name, value in os.environ.items() if name != STARTED_VARIABLE}
    return subprocess.run(command, input=text, text=True, env=environment, check=False).returncode


def _job(args: Namespace) -> Job:
    from ptfast.config.compose import compose
    from ptfast.core.run_directory import new_folder

    kind, _, number = (args.gpus or "").rpartition(":")
    if args.gpus and (not number.isdecimal() or int(number) == 0):
        what = "expected a whole number above 0"
        raise ConfigError("C005", what, key="--gpus", value=args.gpus, place=COMMAND_LINE)
    num_gpus = int(number) if args.gpus else None
    composed = compose(args.words)
    num_ranks = args.nodes * (num_gpus or 1)
    _check_config(composed, num_ranks)
    parallel, added = composed.tree["parallel"], []
    alone = parallel["strategy"] == "single"
    if num_ranks > 1 and alone:
        added.append("parallel=ddp")
    if num_gpus and num_gpus > 1 and args.kind == "slurm" and (alone or parallel["nproc"] == "auto"):
        added.append(f"parallel.nproc={num_gpus}")
    run = composed.tree["run"]
    name = run["name"] or composed.recipe or "train"
    # A job that is started again resumes, unless the user has said otherwise.
    if not run["dir"]:
        added.append(f"run.dir={new_folder(Path(run['root']).absolute(), name)}")
    if run["resume"] == "never":
        added.append("run.resume=auto")
    limit_s = getattr(args, "time", None)
    return Job(
        words=(*args.words, *added),
        name=re.sub(r"[^a-z0-9]+", "-", f"ptfast-{name}".lower()).strip("-")[:50],
        num_nodes=args.nodes,
        gpu_type=kind or None,
        num_gpus=num_gpus,
        num_cpus=args.cpus,
        limit_s=int(limit_s) if limit_s else None,
        partition=getattr(args, "partition", None),
    )


def _check_config(composed: Composed, num_ranks: int) -> None:
    """Check the config, except for errors about this machine: the nodes are others."""
    from ptfast.config.checks.rules import check_batch
    from ptfast.config.checks.validate import validate

    try:
        config = validate(composed.tree, composed.place)
    except PtfastError as error:
        if error.code in OF_MACHINE:
            return
        raise
    if (num_nodes := config.parallel.nnodes) > 1:
        what, hint = "is for commands that are started by hand", f"Use --nodes {num_nodes}"
        raise ConfigError("C011", what, key="parallel.nnodes", value=num_nodes, suggestion=hint)
    accumulate, first = config.gradients.accumulate, config.curriculum.batch_size_from
    check_batch(config.batch_size, config.micro_batches, num_ranks, accumulate, first)


def _slurm(job: Job) -> str:
    """A batch script: warned of its time limit, the job saves, is queued again and resumes."""
    hours, rest = divmod(job.limit_s or 0, 3600)
    gpus = f"{job.gpu_type.lower()}:{job.num_gpus}" if job.gpu_type else job.num_gpus
    asked = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.num_cpus,
        "gpus-per-node": gpus,
        "time": f"{hours:02}:{rest // 60:02}:{rest % 60:02}" if job.limit_s else None,
        "partition": job.partition,
        "signal": f"B:USR1@{WARNING_S}",
        "open-mode": "append",
    }
    options = "\n".join(f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None)
    cores = " --cpus-per-task=$SLURM_CPUS_PER_TASK" if job.num_cpus else ""
    command = f"{shlex.quote(sys.executable)} -m ptfast train {shlex.join(job.words)}"
    if job.num_nodes > 1:
        meets = "$head:$((20000 + SLURM_JOB_ID % 10000))"
        command += f' parallel.nnodes={job.num_nodes} parallel.rdzv="{meets}"'
    return f"""\
#!/bin/bash
{options}
#SBATCH --requeue

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0{cores} {command} &
training=$!
trap 'kill -USR1 $training' USR1
wait $training
code=$?
# The warning ends the wait, not the training.
if [ $code -eq $((128 + $(kill -l USR1))) ]; then wait $training; code=$?; fi
if [ $code -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def _ray(job: Job) -> str:
    """A driver of Ray Train, whose workers are the ranks; it runs at `RAY_ADDRESS`."""
    num_gpus = job.num_gpus or 1
    scaling = [f"num_workers={job.num_nodes * num_gpus}", f"use_gpu={bool(job.num_gpus)}"]
    if job.num_cpus:
        scaling.append(f'resources_per_worker={{"CPU": {max(job.num_cpus // num_gpus, 1)}}}')
    words = "\n".join(f"    {json.dumps(word)}," for word in job.words)
    return f'''\
"""The ranks of one training as workers of Ray Train."""

import os
import socket
import subprocess
import sys

import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ptfast.core.machine import die_with_parent

FOLDER = {json.dumps(str(Path.cwd()))}
WORDS = [
{words}
]


def train_rank() -> None:
    """Train as the rank that Ray has made this worker, at a port that its own process group leaves free."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    command = [sys.executable, "-m", "ptfast", "train", *WORDS]
    environment = {{**os.environ, "MASTER_PORT": str(port[0])}}
    subprocess.run(command, cwd=FOLDER, env=environment, check=True, preexec_fn=die_with_parent)


if __name__ == "__main__":
    TorchTrainer(
        train_rank,
        scaling_config=ScalingConfig({", ".join(scaling)}),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
'''
