"""A rank of a measurement: `python -m ptfast.measure.trial_rank RANKS WHAT KEYWORDS FOLDER PARENT`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.files.frozen import check_no_secrets, freeze
from ptfast.config.read import load_config
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.distributed import Ranks, barrier, init_process_group, world
from ptfast.core.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, ParallelError, exit_code_of
from ptfast.core.machine import die_with_parent, is_memory_error
from ptfast.core.sections.targets import locate
from ptfast.data.build_data import Data
from ptfast.launch.elastic import on_this_machine, run_elastic
from ptfast.launch.launcher import reported_failure
from ptfast.launch.rank_main import leave, report_failure
from ptfast.report.terminal.display import Display
from ptfast.run import Run
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.training.build import build

MEASUREMENTS = {
    "lr": "ptfast.measure.lr.lr_finder.measure_lr",
    "noise": "ptfast.measure.batch.gradient_noise.train_for_noise",
    "batch": "ptfast.measure.batch.batch_search.time_batches",
}
"""Functions of a `TrialRank` and keywords, which report what they measure."""
TRIALS = "trials.jsonl"
"""Each result on a line."""


@dataclass
class TrialRank:
    """A rank as measurements see it.

    Args:
        folder: for the files of its runs.
        data: the data, where it has been loaded already.
    """

    config: Config
    folder: Path
    ranks: Ranks
    data: Data | None = None

    def report(self, result: dict[str, Any]) -> None:
        """Send the parent a result, from the first rank."""
        if self.ranks.is_first:
            append(self.folder / TRIALS, result)

    @contextmanager
    def building(self, config: Config, result: dict[str, Any], data: Data | None = None) -> Iterator[Run]:
        """Build a run that is closed afterwards; a lack of memory is reported with `result`."""
        with self.reporting_lack_of_memory(result):
            run = build(config, ranks=self.ranks, folder=self.folder, display=Display(), data=data)
            try:
                yield run
            finally:
                run.close()

    @contextmanager
    def reporting_lack_of_memory(self, result: dict[str, Any]) -> Iterator[None]:
        """End this process where memory runs out inside, and report so with what `result` holds by then.

        Nothing in it can be trusted any more.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_memory_error(error):
                raise
            append(self.folder / TRIALS, {**result, "no_room": str(error).splitlines()[0][:200]})
            # The other ranks may wait in a collective for this one: their parent ends them.
            leave(EXIT_BUG if self.ranks.distributed else EXIT_OK)


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a line to a file of JSON lines."""
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def read_lines(file: Path, skip: int = 0) -> list[dict[str, Any]]:
    """Read a file of JSON lines after the first `skip`, without a line that is just being written."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    lines = text.splitlines(keepends=True)[skip:]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> None:
    """Measure on this rank; for NUM_RANKS above 0, launch so many that do."""
    num_ranks, what, keywords, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    die_with_parent(int(sys.argv[5]))
    if num_ranks:
        _launch(num_ranks, ["0", what, keywords, str(folder)])
    try:
        _measure(MEASUREMENTS.get(what, what), json.loads(keywords), folder)
    except KeyboardInterrupt:
        # The launcher was sent it as well, and says so.
        leave(EXIT_INTERRUPTED)
    except Exception as error:
        report_failure(folder, error)
        leave(exit_code_of(error))
    leave(EXIT_OK)


def _launch(num_ranks: int, arguments: list[str]) -> None:
    """Run ranks of this module, and end as the first of them does that fails."""
    arguments = [*arguments, str(os.getpid())]
    ended = run_elastic("ptfast.measure.trial_rank", arguments, on_this_machine(num_ranks))
    if (rank := ended.killed()) is not None:
        os.kill(os.getpid(), -ended.codes[rank])
    leave(max(next(iter(ended.codes.values()), EXIT_OK), EXIT_OK))


def _measure(path: str, keywords: dict[str, Any], folder: Path) -> None:
    _, config = load_config(folder / run_directory.CONFIG, trusted=True)
    ranks = world() or Ranks()
    if ranks.distributed:
        init_process_group(resolve_device(config.device, ranks), ranks, config.parallel.timeout.seconds)
    locate(path)(TrialRank(config, folder, ranks), **keywords)
    barrier(ranks)


if __name__ == "__main__":
    main()


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
        [sys.executable, "-u", "-m", "ptfast.measure.trial_rank", *arguments], start_new_session=True
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
