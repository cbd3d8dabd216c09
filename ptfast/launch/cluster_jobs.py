"""A training as a job for SLURM or Ray."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

WARNING_S = 300
"""How long before its time limit SLURM warns a job, which then saves and ends."""


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


def slurm(job: Job) -> str:
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


def ray(job: Job) -> str:
    """A driver of Ray Train, whose workers are the ranks; it runs where `RAY_ADDRESS` says."""
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
