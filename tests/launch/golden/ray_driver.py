"""The ranks of one training as workers of Ray Train."""

import os
import socket
import subprocess
import sys

import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ptfast.core.machine import die_with_parent

FOLDER = "/shared/project"
WORDS = [
    "recipe=resnet_cifar",
    "optimizer.lr=0.1",
    "trust=[mine]",
    "run.dir=/shared/runs/mine",
    "parallel=ddp",
    "run.resume=auto",
]


def train_rank() -> None:
    """Train as the rank assigned to this worker by Ray, on a port other than its process group's."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    command = [sys.executable, "-m", "ptfast", "train", *WORDS]
    environment = {**os.environ, "MASTER_PORT": str(port[0])}
    subprocess.run(command, cwd=FOLDER, env=environment, check=True, preexec_fn=die_with_parent)


if __name__ == "__main__":
    TorchTrainer(
        train_rank,
        scaling_config=ScalingConfig(num_workers=16, use_gpu=True, resources_per_worker={"CPU": 8}),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
