"""Goodput: what all attempts of a run went to, also those that a SIGKILL ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ptfast.core.clock import Clock
from ptfast.report.goodput import ATTEMPTS_FILE, CATEGORIES, Attempt, goodput, read_goodput
from ptfast.report.loggers import read_records


def attempt(started: float, begin: int, step: int, status: str | None = None) -> dict[str, Any]:
    """Ten seconds: start-up 4, warm-up 1, steps 2, data 1, evaluation 1, saving 0.5, logging 0.5."""
    seconds = {"start_up": 4.0, "warm_up": 1.0, "forward": 0.5, "backward": 1.0, "optimizer": 0.5}
    seconds |= {"data": 1.0, "evaluation": 1.0, "saving": 0.5, "logging": 0.5}
    place = {"started": started, "from_step": begin, "step": step, "status": status}
    return {**place, "seconds": seconds}


def test_all_seconds_of_all_attempts_have_a_place() -> None:
    # Steps 17 to 20 are repeated; the second attempt was never heard of again after its line.
    found = goodput([attempt(100, 0, 20), attempt(115, 16, 26), attempt(130, 26, 40, "finished")])
    assert found is not None
    assert found["wall_s"] == pytest.approx(40)
    assert (found["attempts"], found["steps_done_twice"]) == (3, 4)
    expected = [4 / 5 * 2 + 4, 3 / 5, 2 * 5 + 5 + 5, 5, 4 / 5 + 2, 3, 1.5, 1.5]
    assert found["seconds"] == pytest.approx(dict(zip(CATEGORIES, expected, strict=True)))
    assert found["training"] == pytest.approx(5.6 / 40)


@pytest.mark.parametrize(
    ("status", "lost_s"), [(None, 90), ("preempted", 90), ("failed", 90), ("paused", 0), ("interrupted", 0)]
)
def test_nobody_waits_for_a_run_that_was_stopped_at_will(status: str | None, lost_s: float) -> None:
    found = goodput([attempt(0, 0, 20, status), attempt(100, 20, 40, "finished")])
    assert found is not None
    assert found["seconds"]["restarts"] == 5 + lost_s


@pytest.mark.parametrize(
    ("attempts", "twice"),
    [
        # A later attempt goes back behind the state from which this one began.
        ([attempt(0, 0, 20), attempt(10, 20, 24), attempt(20, 8, 40)], 12 + 4),
        ([attempt(0, 0, 20), attempt(10, 0, 40)], 20),
        # Killed before it was built, or beyond its last line.
        ([attempt(0, 8, 8), attempt(10, 12, 40)], 0),
    ],
)
def test_steps_that_were_repeated_count_once(attempts: list[dict[str, Any]], twice: int) -> None:
    found = goodput(attempts)
    assert found is not None
    assert found["steps_done_twice"] == twice
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"])


def test_an_attempt_leaves_its_last_line(tmp_path: Path) -> None:
    assert read_goodput(tmp_path) is None
    for begin in (0, 5):
        line = Attempt(tmp_path, Clock(age_s=3.0), begin)
        line.log({"step": begin + 7, "loss": 0.1})
        # A machine that lost its power has written half of it.
        with (tmp_path / ATTEMPTS_FILE).open("a") as file:
            file.write('\n{"from_step": 5, "st')
    first, second = read_records(tmp_path / ATTEMPTS_FILE)
    assert (first["from_step"], first["step"], second["from_step"], second["step"]) == (0, 7, 5, 12)
    assert first["seconds"]["unexplained"] >= 3.0
    line.write(20, "finished")
    assert [each["step"] for each in read_records(tmp_path / ATTEMPTS_FILE)] == [7, 20]
    # A run that failed before it was built has no step.
    line.write(0, "failed")
    assert read_records(tmp_path / ATTEMPTS_FILE)[1]["step"] == 5
