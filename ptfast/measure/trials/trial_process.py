"""Measurements in processes of their own: what runs out of memory there takes nothing else along."""

from __future__ import annotations

import contextlib
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
from ptfast.measure.trials.trial_rank import REQUESTS, TRIALS, append, read_lines

OnResult = Callable[[dict[str, Any]], None]
POLL_S = 0.02
_REPORTED = re.compile(r"^ptfast: (error\[\w+\]: )?| \(([^()]*:\d+|command line)\)(?=: )")
"""The prefix of an error's line, and the place of its key, which a trial's config has not."""
END_S = 10.0
"""Seconds that a process may take to end before it is killed."""


class TrialProcess:
    """A process, or several ranks, with one variant of a config, that measures as often as it is asked to.

    What a measurement has built stays until the process ends, so that variants can be measured in turns.

    Args:
        folder: of this process alone; made here.
        num_ranks: that measure together; None for a single process.
        what: to measure, a key of `trial_rank.MEASUREMENTS` or the import path of such a function.
    """

    def __init__(self, composed: Composed, folder: Path, num_ranks: int | None, what: str) -> None:
        self._composed, self._folder, self._what = composed, folder, what
        self._num_read = 0
        folder.mkdir()
        check_no_secrets(composed)
        freeze(composed, folder / run_directory.CONFIG)
        arguments = [str(num_ranks or 0), what, str(folder), str(os.getpid())]
        sys.stdout.flush()
        # In a session of its own, Ctrl-C reaches it through this process alone.
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "ptfast.measure.trials.trial_rank", *arguments],
            start_new_session=True,
        )

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, which may be in the middle of a measurement."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()

    def request(self, keywords: dict[str, Any]) -> None:
        """Ask for a measurement with `keywords`, without waiting for it."""
        append(self._folder / REQUESTS, keywords)

    def results(self, on_result: OnResult = lambda _: None) -> tuple[list[dict[str, Any]], int | None]:
        """Wait for the measurement that was asked for first.

        Args:
            on_result: called with each result as it comes in.

        Returns:
            All results, and the signal that ended the process, if one did.

        Raises:
            PtfastError, ReportedError: what stopped it, other than a lack of memory.
        """
        results: list[dict[str, Any]] = []
        while True:
            # What has ended writes no more: it is asked for that first.
            code = self._process.poll()
            for result in read_lines(self._folder / TRIALS, self._num_read):
                self._num_read += 1
                if not result:
                    return results, None
                on_result(result)
                results.append(result)
            if code is not None:
                break
            time.sleep(POLL_S)
        if reported := reported_failure(self._folder, self._composed):
            raise reported
        if code >= 0 and not (results and "no_room" in results[-1]):
            raise ParallelError("P001", f"the search for {self._what} left with {code} and without a word")
        return results, -code if code < 0 else None


def measure_once(
    composed: Composed,
    folder: Path,
    num_ranks: int | None,
    what: str,
    keywords: dict[str, Any],
    on_result: OnResult = lambda _: None,
) -> tuple[list[dict[str, Any]], int | None]:
    """Measure once in a new process; arguments and results as those of `TrialProcess` and its `results`."""
    with TrialProcess(composed, folder, num_ranks, what) as process:
        process.request(keywords)
        return process.results(on_result)


def reason(error: Exception) -> str:
    """The clause that says why a variant cannot be had, from the error that ended its measurement."""
    return _REPORTED.sub("", str(error))
