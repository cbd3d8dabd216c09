"""`ptfast train -m`: one run per point of a sweep, each in its own process, then a table of them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ptfast.config.checks.validate import validate
from ptfast.config.compose import Composed, compose
from ptfast.config.files.frozen import redact
from ptfast.config.multirun import JobResult, sample_points
from ptfast.config.multirun import sweep as run_sweep
from ptfast.config.overrides import parse, quoted
from ptfast.core import run_directory
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, ConfigError, PtfastError
from ptfast.core.machine import die_with_parent
from ptfast.launch.rank_main import STARTED_VARIABLE

ENDINGS = {-signal.SIGKILL: "killed (out of memory?)", -signal.SIGSEGV: "crashed"}


class Terminated(BaseException):
    """SIGTERM has reached the sweep: the job that runs is to save, and no other to start."""


class JobError(Exception):
    """A job of a sweep that did not finish."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(exit_code, reason)
        self.exit_code, self.reason = exit_code, reason


@dataclass(frozen=True)
class Job:
    """Trains one point of a sweep in a process of its own, so that one that dies takes no other along.

    Args:
        folder: the sweep's; the job's run directory is `<folder>/<number>`.
    """

    folder: Path

    def __call__(self, composed: Composed, number: int) -> float | None:
        """Train and return the objective: the sweep's metric, on the split that holds it.

        Raises:
            JobError: the run failed; its own process has printed why.
        """
        run_dir = self.folder / str(number)
        # A directory that the job finds stays, whatever becomes of it: the ranking reads why it failed.
        run_dir.mkdir(parents=True, exist_ok=True)
        points = [word for word in composed.arguments if not word.startswith("hydra")]
        print(f"\njob {number}: {' '.join(redact(points)) or 'defaults'}", flush=True)
        command = [sys.executable, "-m", "ptfast", "train", *points, f"run.dir={quoted(run_dir)}"]
        environment = {name: value for name, value in os.environ.items() if name != STARTED_VARIABLE}
        process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent)
        try:
            code = process.wait()
        except Terminated:
            process.terminate()
            process.wait()
            raise
        except KeyboardInterrupt:
            # The terminal has sent Ctrl-C to the job as well: let it save and leave.
            process.wait()
            raise
        summary = run_directory.read_json(run_dir / run_directory.SUMMARY)
        if code != EXIT_OK:
            reason = summary.get("error") or ENDINGS.get(code) or f"exit code {code}"
            record_failure(run_dir, composed, code, str(reason))
            raise JobError(code if code > 0 else 1, str(reason))
        config = validate(composed.tree, composed.place)
        return objective(summary, config.sweep.metric)


def sweep(arguments: list[str]) -> int:
    """Run a sweep and print its ranking; returns the exit code of the first job that failed.

    Raises:
        ConfigError: C002 to C014 for a point that could not be trained, before any is.
    """
    from ptfast.cli.compare_command import print_ranking

    first: list[Composed] = []

    def check(composed: Composed) -> None:
        first.append(composed)
        validate(composed.tree, composed.place)

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    folder = run_directory.new_folder(_root(arguments), "sweeps")
    start_s = time.monotonic()
    results: list[JobResult] = []
    ended_by: BaseException | None = None
    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        results = run_sweep(arguments, Job(folder.absolute()), folder, check)
    except (KeyboardInterrupt, Terminated) as error:
        ended_by = error
    finally:
        signal.signal(signal.SIGTERM, previous)
    runs = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    if runs:
        config = validate(first[0].tree, first[0].place)
        print(f"\n{len(runs)} jobs in {time.monotonic() - start_s:,.0f} s, in {folder}")
        print_ranking(runs, config.sweep.metric, config.sweep.mode)
    if ended_by is not None:
        return EXIT_PREEMPTED if isinstance(ended_by, Terminated) else EXIT_INTERRUPTED
    return next((exit_code_of(result) for result in results if result.error is not None), EXIT_OK)


def _root(arguments: list[str]) -> Path:
    """`run.root` of the sweep's first point."""
    tree = compose(next(sample_points(parse(arguments, sweep=True)))).tree
    return Path(tree["run"]["root"] or "runs")


def exit_code_of(result: JobResult) -> int:
    """The exit code that a failed job stands for."""
    error = result.error
    return error.exit_code if isinstance(error, (JobError, PtfastError)) else 1


def objective(summary: dict[str, dict[str, float]], metric: str) -> float | None:
    """The figure a sweep optimises, as `split.name` or a bare name of `val`; `auto` is what `best` follows.

    Raises:
        ConfigError: C005 when the run has no such figure.
    """
    if metric == "auto":
        metric = str(summary.get("best_metric", "val.loss"))
    split, _, name = metric.rpartition(".")
    figures = summary.get(split or "val") or {}
    if name not in figures:
        known = [f"{part}.{key}" for part in ("val", "test", "best") for key in summary.get(part) or {}]
        hint = f"There are: {', '.join(known)}"
        raise ConfigError(
            "C005", "the runs have no such figure", key="sweep.metric", value=metric, suggestion=hint
        )
    return float(figures[name])


def record_failure(run_dir: Path, composed: Composed, code: int, reason: str) -> None:
    """Leave a summary where a job died without one, so that the ranking can name it."""
    path = run_dir / run_directory.SUMMARY
    if not path.exists() and run_dir.parent.is_dir():
        run_dir.mkdir(exist_ok=True)
        words = redact(composed.arguments)
        run_directory.write_json(
            path, {"status": "failed", "exit_code": code, "error": reason, "arguments": words}
        )
