"""The goodput of a run: its share of useful training time, over all attempts, including killed ones."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptfast.core.clock import Clock
from ptfast.core.run_directory import open_inside
from ptfast.core.run_records import AttemptFacts
from ptfast.report.loggers import read_records

ATTEMPTS_FILE = "attempts.jsonl"
_CATEGORY_OF = {
    **dict.fromkeys(("forward", "teacher", "backward", "optimizer"), "training"),
    **dict.fromkeys(("data", "transfer", "gradient_sync"), "waiting"),
    "warm_up": "start_up",
}
CATEGORIES = ("training", "done_twice", "restarts", "start_up", "waiting", "evaluation", "saving", "other")
"""Categories of wall time, in display order."""
_UNWANTED = (None, "failed", "preempted")
"""Statuses after which the time until the next attempt counts as lost, unlike after a pause or Ctrl-C."""


class Attempt:
    """A process's line in `attempts.jsonl`, rewritten with each log record, so that it survives a SIGKILL."""

    def __init__(self, folder: Path, clock: Clock, step: int) -> None:
        self.clock = clock
        self._file, self._step, self._started = folder / ATTEMPTS_FILE, step, time.time() - clock.elapsed_s()
        self._start = self._file.stat().st_size if self._file.exists() else 0
        self.write(step)

    def log(self, record: Mapping[str, Any]) -> None:
        self.write(record["step"])

    def write(self, step: int, status: str | None = None) -> None:
        """Record that training has reached `step`, and its `status` if it has ended."""
        facts = {"started": self._started, "from_step": self._step, "step": max(step, self._step)}
        facts |= {"status": status, "seconds": self.clock.so_far()}
        mode = "r+b" if self._file.exists() else "wb"
        with contextlib.suppress(OSError), open_inside(self._file, mode) as file:
            file.seek(self._start)
            # The previous line may be truncated.
            file.write(b"\n" + json.dumps(facts).encode())
            file.truncate()


def read_goodput(folder: Path) -> dict[str, Any] | None:
    """Return the goodput of the run in `folder`; None if it is unknown."""
    return goodput(read_records(folder / ATTEMPTS_FILE, AttemptFacts))


def goodput(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return seconds by `CATEGORIES` over all attempts, and the share of useful training; None if no time.

    Repeated steps count for their share of an attempt's training and waiting. Time of a killed attempt after
    its last record counts toward `restarts`.
    """
    seconds, steps_done_twice = dict.fromkeys(CATEGORIES, 0.0), 0
    for number, attempt in enumerate(attempts):
        begin, reached, later = attempt["from_step"], attempt["step"], attempts[number + 1 :]
        kept = max(begin, min([reached, *(other["from_step"] for other in later)]))
        twice = reached - kept
        share = twice / max(reached - begin, 1)
        steps_done_twice += twice
        for cause, cause_s in attempt["seconds"].items():
            part = _CATEGORY_OF.get(cause, cause)
            if part in ("training", "waiting"):
                seconds["done_twice"] += cause_s * share
                cause_s *= 1 - share
            elif part == "start_up" and number:
                part = "restarts"
            seconds[part if part in seconds else "other"] += cause_s
        if later and attempt["status"] in _UNWANTED:
            end_s = attempt["started"] + sum(attempt["seconds"].values())
            seconds["restarts"] += max(later[0]["started"] - end_s, 0.0)
    if (wall_s := sum(seconds.values())) <= 0:
        return None
    counts = {"attempts": len(attempts), "steps_done_twice": steps_done_twice}
    return {"training": seconds["training"] / wall_s, "wall_s": wall_s, **counts, "seconds": seconds}
