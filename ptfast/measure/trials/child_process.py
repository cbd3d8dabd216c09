"""Searches in processes of their own: what runs out of memory there takes nothing else along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.files.frozen import check_no_secrets, freeze
from ptfast.core import run_directory
from ptfast.core.errors import ParallelError
from ptfast.launch.elastic import run_elastic
from ptfast.launch.launcher import reported_failure

MODULE = "ptfast.measure.trials.trial_rank"
TRIALS = "trials.jsonl"
"""What a child has found so far, a line for each trial."""
LOOK_S = 0.2


def run_child(
    composed: Composed,
    folder: Path,
    num_ranks: int | None,
    what: str,
    keywords: dict[str, Any],
    tell: Callable[[dict[str, Any]], None],
) -> tuple[list[dict[str, Any]], int | None]:
    """Run a search in a child, on several ranks if asked for.

    Args:
        folder: of this child alone.
        num_ranks: that search together; None for a single process.
        what: to search for, as `ptfast.measure.trials.trial_rank` knows it.
        tell: called with each trial's result as it comes in, where there is one process.

    Returns:
        The results of all trials, and the signal that ended the child, if one did.

    Raises:
        PtfastError: what stopped it, other than a lack of memory.
    """
    folder.mkdir()
    check_no_secrets(composed)
    freeze(composed, folder / run_directory.CONFIG)
    arguments = [what, json.dumps(keywords), str(folder)]
    told = 0
    if num_ranks is None:
        command = [sys.executable, "-u", "-m", MODULE, *arguments, str(os.getpid())]
        # In a session of its own, Ctrl-C reaches it through this process alone.
        with subprocess.Popen(command, start_new_session=True) as child:
            try:
                while child.poll() is None:
                    time.sleep(LOOK_S)
                    for result in read_trials(folder)[told:]:
                        tell(result)
                        told += 1
            finally:
                child.kill()
        code = child.returncode
        killed = -code if code < 0 else None
    else:
        failures, received = run_elastic(MODULE, arguments, num_ranks)
        if received is not None:
            raise KeyboardInterrupt
        # torchrun ends the ranks that are left by SIGTERM.
        codes = [failure.exitcode for failure in failures.values()]
        killed = next((-code for code in codes if code < 0 and code != -signal.SIGTERM), None)
        code = next(iter(codes), 0)
    results = read_trials(folder)
    for result in results[told:]:
        tell(result)
    if reported := reported_failure(folder, composed):
        raise reported
    if code > 0 and not (results and "no_room" in results[-1]):
        raise ParallelError("P001", f"the search for {what} left with {code} and without a word")
    return results, killed


def read_trials(folder: Path) -> list[dict[str, Any]]:
    """The results that a child has written so far, without a line that it is just writing."""
    try:
        text = (folder / TRIALS).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write_trial(folder: Path, result: dict[str, Any]) -> None:
    """Tell the parent of a trial."""
    with (folder / TRIALS).open("a") as file:
        file.write(json.dumps(result) + "\n")
