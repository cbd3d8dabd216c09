"""`ptfast train -m`: train one run per point of a sweep, each in its own process, and print a ranking."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from ptfast.cli.compare_command import show
from ptfast.cli.run_ranking import rank_runs
from ptfast.config.checks.validate import validate
from ptfast.config.compose import Composed, compose
from ptfast.config.files.frozen import redact
from ptfast.config.multirun import JobFailure, Objective, sample_points
from ptfast.config.multirun import sweep as run_sweep
from ptfast.config.overrides import Argument, parse, quoted
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.errors import (
    COMMAND_LINE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    ConfigError,
    PtfastError,
)
from ptfast.core.machine import on_main_thread, usable_cores
from ptfast.launch.warm_process import start_process, warm_process

ENDINGS = {-signal.SIGKILL: "killed (out of memory?)", -signal.SIGSEGV: "crashed"}
OUTPUT = "output.log"
"""The file with a job's output, if several run at a time."""


class Terminated(BaseException):
    """The sweep received SIGTERM or SIGHUP: running jobs save, and no other job starts."""


@dataclass(eq=False)
class JobError(Exception):
    """A job of a sweep that did not finish."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class SweepJob:
    """Trains points of a sweep, each in its own process, so that a crash does not affect the others."""

    run: Callable[[list[str]], int]
    """The train command: takes its words and returns the exit code."""
    folder: Path
    """The folder of the sweep; a job's run directory is `<folder>/<number>`."""
    num_parallel: int = 1
    gpus: Sequence[str] = ()
    """GPUs for each parallel job, as in `CUDA_VISIBLE_DEVICES`; if empty, every job sees all."""
    _running: dict[int, tuple[Path, BaseProcess]] = field(default_factory=dict)
    """Run directories and processes by slot."""

    def __call__(self, composed: Composed, number: int) -> Objective:
        """Start a job once fewer than `num_parallel` run; return a function that waits for its objective."""
        while len(self._running) == self.num_parallel:
            self._wait()
        run_dir = self.folder / str(number)
        # Create it here, so that it exists however the job ends: the ranking reads why it failed.
        run_dir.mkdir(parents=True, exist_ok=True)
        slot = min({*range(self.num_parallel)} - {*self._running})
        points = [word for word in composed.arguments if not word.startswith("hydra")]
        shown = " ".join(word.removeprefix("++") for word in redact(points)) or "defaults"
        print(f"{'' if self.num_parallel > 1 else chr(10)}job {number}: {shown}", flush=True)
        # A single run would warn about keys that belong to the sweep.
        own = ("sweep.", "run.root=", "run.name=")
        alone = [word for word in points if not word.lstrip("+").startswith(own)]
        environment, output = {}, None
        if self.num_parallel > 1:
            output = run_dir / OUTPUT
            threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // self.num_parallel))
            environment = {"OMP_NUM_THREADS": threads, "LOCAL_WORLD_SIZE": str(self.num_parallel)}
            if self.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        process = warm_process(
            self.run,
            ["train", *alone, f"run.dir={quoted(run_dir)}"],
            # Image folders use torchvision to read JPEG files.
            modules=["torchvision"] if re.search("torchvision|imagefolder", str(composed.tree)) else [],
            environment=environment,
            output=output,
        )
        self._running[slot] = run_dir, process
        start_process(process)
        return partial(self._objective, composed, run_dir, process)

    def _wait(self) -> None:
        wait([process.sentinel for _, process in self._running.values()])
        for slot, (run_dir, process) in list(self._running.items()):
            if process.exitcode is not None:
                del self._running[slot]
                if self.num_parallel > 1:
                    print(f"job {run_dir.name}: {_ending(run_dir, process.exitcode)}", flush=True)

    def _objective(self, composed: Composed, run_dir: Path, process: BaseProcess) -> float | None:
        while (run_dir, process) in self._running.values():
            self._wait()
        if code := process.exitcode:
            reason = _ending(run_dir, code)
            path = run_dir / run_directory.SUMMARY
            # The ranking also lists jobs that died without a summary, unless the folder is gone.
            if run_dir.parent.is_dir() and not path.exists():
                run_dir.mkdir(exist_ok=True)
                facts = {"status": "failed", "exit_code": code, "error": reason}
                run_directory.write_json(path, {**facts, "arguments": redact(composed.arguments)})
            raise JobError(code if code > 0 else 1, reason)
        config = validate(composed.tree, composed.place)
        return objective(run_directory.read_json(run_dir / run_directory.SUMMARY), config.sweep.metric)


def _ending(run_dir: Path, code: int) -> str:
    """Describe how a job ended, from its summary, or from its exit code if it wrote none."""
    summary = run_directory.read_json(run_dir / run_directory.SUMMARY)
    status = summary.get("status") if code == EXIT_OK else None
    return str(summary.get("error") or status or ENDINGS.get(code) or f"exit code {code}")


def sweep_runs(arguments: list[str], run: Callable[[list[str]], int]) -> tuple[list[Path], int]:
    """Run a sweep of valid points, and print its ranking.

    Returns the run directories of its jobs, and the exit code of its first failure.
    """
    given = parse(arguments, sweep=True)
    first = compose(next(sample_points(given)))
    config = validate(first.tree, first.place)
    num_parallel, gpus = _resolve_parallel(config, given)
    folder = run_directory.new_folder(Path(config.run.root), "sweeps")
    start_s = time.monotonic()
    results: list[float | None] = []
    ended_by: BaseException | None = None

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    ending = (signal.SIGTERM, signal.SIGHUP) if on_main_thread() else ()
    caught = [n for n in ending if signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, terminate) for number in caught}
    try:
        job = SweepJob(run, folder.absolute(), num_parallel, gpus)
        results = run_sweep(arguments, job, folder, lambda composed: validate(composed.tree, composed.place))
    except (KeyboardInterrupt, Terminated) as error:
        ended_by = error
        # Running jobs save and exit; Ctrl-C has reached them as well.
        running = multiprocessing.active_children()
        for process in running if isinstance(error, Terminated) else ():
            process.terminate()
        for process in running:
            process.join()
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
    runs = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    if runs:
        summaries = [run_directory.read_json(run_dir / run_directory.SUMMARY) for run_dir in runs]
        num_finished = sum(summary.get("exit_code") == EXIT_OK for summary in summaries)
        finished = "" if num_finished == len(runs) else f", {num_finished} of them finished,"
        print(f"\n{len(runs)} jobs{finished} in {time.monotonic() - start_s:,.0f} s, in {folder}")
        show(rank_runs(runs, config.sweep.metric, config.sweep.mode))
    if ended_by is not None:
        return runs, EXIT_PREEMPTED if isinstance(ended_by, Terminated) else EXIT_INTERRUPTED
    errors = [value.error for value in results if isinstance(value, JobFailure)]
    codes = (e.exit_code if isinstance(e, (JobError, PtfastError)) else 1 for e in errors)
    return runs, next(codes, EXIT_OK)


def _resolve_parallel(config: Config, given: Sequence[Argument]) -> tuple[int, list[str]]:
    """Return how many jobs train at a time, and the GPUs to distribute among them."""
    parallel = config.sweep.parallel
    if parallel == 1:
        return 1, []
    if launcher := next((argument for argument in given if argument.key == "hydra/launcher"), None):
        what = f"{launcher.text} decides how many jobs run at a time"
        details = {"key": "sweep.parallel", "value": parallel, "suggestion": "Leave one out"}
        raise ConfigError("C011", what, place=COMMAND_LINE, **details)
    gpus: list[str] = []
    if config.parallel.strategy == "single" and config.device in ("auto", "cuda"):
        import torch

        named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        gpus = (named or list(map(str, range(torch.cuda.device_count()))))[: torch.cuda.device_count()]
    return max(1, len(gpus)) if parallel == "auto" else parallel, gpus


def objective(summary: dict[str, Any], metric: str) -> float | None:
    """Return a sweep's metric: `split.name`, a metric of `val`, or the metric of `best` (`auto`)."""
    if metric == "auto":
        metric = str(summary.get("best_metric", "val.loss"))
    split, _, name = metric.rpartition(".")
    metrics = {**summary, **summary.get("evals", {})}.get(split or "val") or {}
    if name not in metrics:
        known = [f"{part}.{key}" for part in ("val", "test", "best") for key in summary.get(part) or {}]
        hint = f"There are: {', '.join(known)}"
        what = "the runs do not have this metric"
        raise ConfigError("C005", what, key="sweep.metric", value=metric, suggestion=hint)
    return math.nan if metrics[name] is None else float(metrics[name])
