"""`ptfast launch`: submits a training to a cluster, or prints what would be submitted."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ptfast.core.clock import STARTED_VARIABLE
from ptfast.core.errors import COMMAND_LINE, ConfigError, MachineError, PtfastError
from ptfast.launch.cluster_jobs import Job, ray, slurm

if TYPE_CHECKING:
    from ptfast.config.compose import Composed

OF_MACHINE = ("C012", "E004", "E005")
"""Errors about this machine, which submits and need not be able to train."""
WRITERS: dict[str, Callable[[Job], str]] = {"slurm": slurm, "ray": ray}
SUBMIT = {"slurm": ("sbatch",), "ray": (sys.executable, "-")}
"""The command that reads a job from its standard input."""


def launch(args: Namespace) -> int:
    """Submit the training that the words mean, or print what would be submitted.

    Raises:
        MachineError: E005 where the cluster's command is not there, E004 where Ray is not.
    """
    text = WRITERS[args.kind](_job(args))
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
