"""`ptfast launch`: reads what is asked for, and submits it to a cluster or prints it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ptfast.cli.flags import read_seconds
from ptfast.core.clock import STARTED_VARIABLE
from ptfast.core.errors import COMMAND_LINE, ConfigError, MachineError, PtfastError
from ptfast.launch.cluster_jobs import Job, allowed_name, ray, slurm

if TYPE_CHECKING:
    from ptfast.config.compose import Composed

OF_MACHINE = ("C012", "E004", "E005")
"""What the machine of the one who submits may lack."""


class Engine(NamedTuple):
    """A cluster that takes jobs."""

    write: Callable[[Job], str]
    submit: tuple[str, ...]
    """The command that reads a job from its standard input."""
    flags: tuple[str, ...]
    """Those that not all take."""


ENGINES = {
    "slurm": Engine(slurm, ("sbatch",), ("--time", "--partition")),
    "ray": Engine(ray, (sys.executable, "-"), ()),
}


def launch(engine: str, flags: dict[str, Any], words: list[str]) -> int:
    """Submit the training that `words` mean, or print what would be submitted.

    Returns:
        The exit code of the command that takes the job.

    Raises:
        ConfigError: a config or flags that cannot be run.
        MachineError: E005 where the cluster's command is not there, E004 where Ray is not.
    """
    from ptfast.core.sections.nearest_name import did_you_mean

    if engine not in ENGINES:
        hint = did_you_mean(engine, ENGINES) or f"Clusters: {', '.join(ENGINES)}"
        raise ConfigError("C015", "no such cluster", key=engine, place=COMMAND_LINE, suggestion=hint)
    chosen = ENGINES[engine]
    for flag in ("--time", "--partition"):
        if flag in flags and flag not in chosen.flags:
            hint = f"{engine} takes {', '.join(chosen.flags) or 'none such'}"
            what = f"means nothing to {engine}"
            raise ConfigError("C011", what, key=flag, place=COMMAND_LINE, suggestion=hint)
    text = chosen.write(_job(engine, flags, words))
    if "--print" in flags:
        print(text, end="")
        return 0
    program = chosen.submit[0]
    if not shutil.which(program):
        hint = f"Print the job with --print, and submit it where {program} is"
        raise MachineError("E005", "not found on the path", key=program, suggestion=hint)
    if engine == "ray" and not importlib.util.find_spec("ray"):
        hint = "Install ray[train], or print the driver with --print"
        raise MachineError("E004", "ray is not installed", key="launch", value="ray", suggestion=hint)
    # The time of the run counts from its own start, not from here.
    environment = {name: value for name, value in os.environ.items() if name != STARTED_VARIABLE}
    return subprocess.run(chosen.submit, input=text, text=True, env=environment, check=False).returncode


def _job(engine: str, flags: dict[str, Any], words: list[str]) -> Job:
    """The job that flags and words ask for."""
    from ptfast.config.compose import compose

    kind, _, number = flags.get("--gpus", "").rpartition(":")
    num_nodes = _count(flags, "--nodes", flags.get("--nodes", "1"))
    num_gpus = _count(flags, "--gpus", number) if "--gpus" in flags else None
    composed = compose(words)
    num_ranks = num_nodes * (num_gpus or 1)
    _check_config(composed, num_ranks)
    parallel, added = composed.tree["parallel"], []
    alone = parallel["strategy"] == "single"
    if num_ranks > 1 and alone:
        added.append("parallel=ddp")
    if num_gpus and num_gpus > 1 and engine == "slurm" and (alone or parallel["nproc"] == "auto"):
        added.append(f"parallel.nproc={num_gpus}")
    name = composed.tree["run"]["name"] or composed.recipe or "train"
    return Job(
        words=(*words, *added, *_resumable(composed, name)),
        name=allowed_name(name),
        num_nodes=num_nodes,
        gpu_type=kind or None,
        num_gpus=num_gpus,
        num_cpus=_count(flags, "--cpus", flags["--cpus"]) if "--cpus" in flags else None,
        limit_s=int(read_seconds(flags, "--time", "")) if "--time" in flags else None,
        partition=flags.get("--partition"),
    )


def _check_config(composed: Composed, num_ranks: int) -> None:
    """Check a config as far as that can be done from here: the nodes are other machines.

    Raises:
        ConfigError: the first thing wrong.
    """
    from ptfast.config.checks.validate import check_batch, validate

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


def _resumable(composed: Composed, name: str) -> Iterator[str]:
    """The words with which a job that is started again goes on, where the user has given none."""
    from ptfast.core.run_directory import new_folder

    run = composed.tree["run"]
    if not run["dir"]:
        yield f"run.dir={new_folder(Path(run['root']).absolute(), name)}"
    if run["resume"] == "never":
        yield "run.resume=auto"


def _count(flags: dict[str, Any], flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        what = "expected a whole number above 0"
        raise ConfigError("C005", what, key=flag, value=flags[flag], place=COMMAND_LINE)
    return int(text)
