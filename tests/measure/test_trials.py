"""Measurements in processes of their own, survived when they die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from running import WITH_TESTS

from ptfast.config.compose import Composed
from ptfast.config.read import read_config
from ptfast.core.distributed import sum_over_ranks
from ptfast.core.errors import ReportedError
from ptfast.measure.trial_rank import TrialRank, measure_once

SMALL = ("model=mlp", "model.hidden=[8]", "device=cpu")


def count(trial: TrialRank, *, by: int) -> None:
    """Report a sum over ranks, and the size of a batch."""
    trial.report({"total": float(sum_over_ranks(torch.tensor(float(by)), trial.ranks))})
    trial.report({"batch_size": trial.config.batch_size})


def die(trial: TrialRank, *, how: str) -> None:
    """End in the middle of a measurement."""
    with trial.reporting_lack_of_memory({"size": 8}):
        if how == "memory":
            raise MemoryError("no memory for a tensor")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("of its own")


@pytest.fixture
def with_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that find the functions above."""
    monkeypatch.setenv("PYTHONPATH", WITH_TESTS["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def composed(*words: str) -> Composed:
    return read_config([*SMALL, *words])[0]


def test_what_ends_it_is_told(with_tests: None, tmp_path: Path) -> None:
    measured = measure_once(composed(), tmp_path / "a", None, "test_trials.die", {"how": "memory"})
    assert measured == ([{"size": 8, "no_room": "no memory for a tensor"}], None)
    measured = measure_once(composed(), tmp_path / "b", None, "test_trials.die", {"how": "signal"})
    assert measured == ([], signal.SIGKILL)
    with pytest.raises(ReportedError, match=": of its own"):
        measure_once(composed(), tmp_path / "c", None, "test_trials.die", {"how": "error"})


@pytest.mark.slow
def test_ranks_measure_together(with_tests: None, tmp_path: Path) -> None:
    two = composed("parallel=ddp", "parallel.nproc=2")
    seen: list[dict[str, Any]] = []
    results, killed = measure_once(two, tmp_path / "a", 2, "test_trials.count", {"by": 3}, seen.append)
    assert results == seen == [{"total": 6.0}, {"batch_size": two.tree["batch_size"]}]
    assert killed is None
    results, _ = measure_once(two, tmp_path / "b", 2, "test_trials.die", {"how": "memory"})
    assert results[0]["no_room"] == "no memory for a tensor"
    assert measure_once(two, tmp_path / "c", 2, "test_trials.die", {"how": "signal"}) == ([], signal.SIGKILL)
    with pytest.raises(ReportedError, match=": of its own"):
        measure_once(two, tmp_path / "d", 2, "test_trials.die", {"how": "error"})
