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
from ptfast.config.schema import Config
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


def configs(*words: str) -> tuple[Composed, Config]:
    return read_config([*SMALL, *words])


def test_what_ends_it_is_told(with_tests: None, tmp_path: Path) -> None:
    measured = measure_once(die, *configs(), tmp_path / "a", 1, {"how": "memory"})
    assert measured == ([{"size": 8, "no_room": "no memory for a tensor"}], None)
    measured = measure_once(die, *configs(), tmp_path / "b", 1, {"how": "signal"})
    assert measured == ([], signal.SIGKILL)
    with pytest.raises(ReportedError, match=": of its own"):
        measure_once(die, *configs(), tmp_path / "c", 1, {"how": "error"})


@pytest.mark.slow
def test_ranks_measure_together(with_tests: None, tmp_path: Path) -> None:
    two = configs("parallel=ddp", "parallel.nproc=2")
    seen: list[dict[str, Any]] = []
    results, killed = measure_once(count, *two, tmp_path / "a", 2, {"by": 3}, seen.append)
    assert results == seen == [{"total": 6.0}, {"batch_size": two[1].batch_size}]
    assert killed is None
    results, _ = measure_once(die, *two, tmp_path / "b", 2, {"how": "memory"})
    assert results[0]["no_room"] == "no memory for a tensor"
    assert measure_once(die, *two, tmp_path / "c", 2, {"how": "signal"}) == ([], signal.SIGKILL)
    with pytest.raises(ReportedError, match=": of its own"):
        measure_once(die, *two, tmp_path / "d", 2, {"how": "error"})
