"""`ptfast launch slurm`: submit a training job to a cluster, or print it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from ptfast.core.clock import STARTED_VARIABLE
from ptfast.core.errors import COMMAND_LINE, ConfigError, MachineError, PtfastError

OF_MACHINE = ("C012", "E004", "E005")
"""Errors about this machine, which only submits and need not be able to train."""
WARNING_S = 300
"""Time before its limit at which SLURM warns a job, which then saves and ends."""
SUBMIT = "sbatch"
"""The command that reads a job script from its standard input."""


def launch(args: Namespace) -> int:
    """Submit a training job, or print it; raise E005 if SLURM is not installed here."""
    gpu_type, _, number = (args.gpus or "").rpartition(":")
    if args.gpus and (not number.isdecimal() or int(number) == 0):
        what = "expected a whole number above 0"
        raise ConfigError("C005", what, key="--gpus", value=args.gpus, place=COMMAND_LINE)
    num_gpus = int(number) if args.gpus else None
    name, words = _name_and_words(args, num_gpus)
    text = _slurm(args, name, f"{gpu_type.lower()}:{num_gpus}" if gpu_type else num_gpus, words)
    if args.print:
        print(text, end="")
        return 0
    if not shutil.which(SUBMIT):
        hint = f"Print the job with --print, and submit it where {SUBMIT} is"
        raise MachineError("E005", "not found on the path", key=SUBMIT, suggestion=hint)
    # The time of the run counts from its own start, not from the submission.
    environment = {name: value for name, value in os.environ.items() if name != STARTED_VARIABLE}
    return subprocess.run([SUBMIT], input=text, text=True, env=environment, check=False).returncode


def _name_and_words(args: Namespace, num_gpus: int | None) -> tuple[str, list[str]]:
    """Return the name of the run, and the arguments of `ptfast train` common to all nodes."""
    from ptfast.config.checks.rules import check_batch
    from ptfast.config.checks.validate import validate
    from ptfast.config.compose import compose
    from ptfast.core.run_directory import new_folder

    composed = compose(args.words)
    world_size = args.nodes * (num_gpus or 1)
    try:
        config = validate(composed.tree, composed.place)
    except PtfastError as error:
        # The nodes are different machines from this one.
        if error.code not in OF_MACHINE:
            raise
    else:
        if (num_nodes := config.parallel.nnodes) > 1:
            what, hint = "is for commands started manually", f"Use --nodes {num_nodes}"
            raise ConfigError("C011", what, key="parallel.nnodes", value=num_nodes, suggestion=hint)
        check_batch(config, world_size)
    parallel, run = composed.tree["parallel"], composed.tree["run"]
    words, alone = [*args.words], parallel["strategy"] == "single"
    if world_size > 1 and alone:
        words.append("parallel=ddp")
    if num_gpus and num_gpus > 1 and (alone or parallel["nproc"] == "auto"):
        words.append(f"parallel.nproc={num_gpus}")
    name = run["name"] or composed.tree.get("recipe") or "train"
    # A requeued job resumes, unless the user says otherwise.
    if not run["dir"]:
        words.append(f"run.dir={new_folder(Path(run['root']).absolute(), name)}")
    if run["resume"] == "never":
        words.append("run.resume=auto")
    return name, words


def _slurm(args: Namespace, name: str, gpus: str | int | None, words: list[str]) -> str:
    """Return a batch script: warned of its time limit, the job saves, is requeued and resumes."""
    limit_s = int(args.time or 0)
    hours, rest = divmod(limit_s, 3600)
    asked = {
        "job-name": re.sub(r"[^a-z0-9]+", "-", f"ptfast-{name}".lower()).strip("-")[:50],
        "nodes": args.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": args.cpus,
        "gpus-per-node": gpus,
        "time": f"{hours:02}:{rest // 60:02}:{rest % 60:02}" if limit_s else None,
        "partition": args.partition,
        "signal": f"B:USR1@{WARNING_S}",
        "open-mode": "append",
    }
    options = "\n".join(f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None)
    cores = " --cpus-per-task=$SLURM_CPUS_PER_TASK" if args.cpus else ""
    command = f"{shlex.quote(sys.executable)} -m ptfast train {shlex.join(words)}"
    if args.nodes > 1:
        meets = "$head:$((20000 + SLURM_JOB_ID % 10000))"
        command += f' parallel.nnodes={args.nodes} parallel.rdzv="{meets}"'
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
