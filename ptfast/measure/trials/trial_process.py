"""Measurements in processes of their own: what runs out of memory there takes nothing else along."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
from ptfast.launch.launcher import reported_failure
from ptfast.measure.trials.trial_rank import TRIALS, read_lines

OnResult = Callable[[dict[str, Any]], None]
POLL_S = 0.02
_REPORTED = re.compile(r"^ptfast: (error\[\w+\]: )?| \(([^()]*:\d+|command line)\)(?=: )")
"""The prefix of an error's line, and the place of its key, which a trial's config has not."""
END_S = 10.0
"""Seconds that a process may take to end before it is killed."""


def measure_once(
    composed: Composed,
    folder: Path,
    num_ranks: int | None,
    what: str,
    keywords: dict[str, Any],
    on_result: OnResult = lambda _: None,
) -> tuple[list[dict[str, Any]], int | None]:
    """Measure a config in a new process, or on several ranks.

    Args:
        folder: of this measurement alone; made here.
        num_ranks: that measure together; None for a single process.
        what: to measure, a key of `trial_rank.MEASUREMENTS` or the import path of such a function.
        on_result: called with each result as it comes in.
    """
    folder.mkdir()
    check_no_secrets(composed)
    freeze(composed, folder / run_directory.CONFIG)
    arguments = [str(num_ranks or 0), what, json.dumps(keywords), str(folder), str(os.getpid())]
    sys.stdout.flush()
    # In a session of its own, Ctrl-C reaches it through this process alone.
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ptfast.measure.trials.trial_rank", *arguments], start_new_session=True
    )
    results: list[dict[str, Any]] = []
    try:
        while True:
            # What has ended writes no more: it is asked for that first.
            code = process.poll()
            for result in read_lines(folder / TRIALS, len(results)):
                on_result(result)
                results.append(result)
            if code is not None:
                break
            time.sleep(POLL_S)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
    if reported := reported_failure(folder, composed):
        raise reported
    if code > 0 and not (results and "no_room" in results[-1]):
        raise ParallelError("P001", f"the search for {what} exited with {code} and gave no reason")
    return results, -code if code < 0 else None


def reason(error: Exception) -> str:
    """The clause that says why a variant cannot be had, from the error that ended its measurement."""
    return _REPORTED.sub("", str(error))
