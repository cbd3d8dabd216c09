"""Measurements in processes of their own, survived when they die."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import WITH_TESTS

from ptfast.config.compose import Composed
from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks, sum_over_ranks
from ptfast.core.errors import ReportedError
from ptfast.measure.experiment import trial
from ptfast.measure.experiment.trial import TrialRank, measure_once

SMALL = ("model=mlp", "model.hidden=[8]", "device=cpu")


def count(trial: TrialRank, *, by: int) -> None:
    """Report a sum over ranks, and the size of a batch."""
    trial.report({"total": float(sum_over_ranks(torch.tensor(float(by)), trial.ranks))})
    trial.report({"batch_size": trial.config.batch_size})


def die(trial: TrialRank, *, how: str) -> None:
    """End in the middle of a measurement."""
    trial.report({"begun": True})
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


def test_a_process_that_is_killed_leaves_its_results(with_tests: None, tmp_path: Path) -> None:
    measured = measure_once(die, *configs(), tmp_path, {"how": "signal"})
    assert measured == ([{"begun": True}], "SIGKILL")


def test_a_lack_of_memory_is_a_result_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "leave", sys.exit)
    sent: list[dict[str, Any]] = []
    rank = TrialRank(configs()[1], tmp_path, Ranks(), send=sent.append)
    with pytest.raises(SystemExit) as left:
        die(rank, how="memory")
    assert left.value.code == 0
    assert sent == [{"begun": True}, {"size": 8, "no_room": "no memory for a tensor"}]


@pytest.mark.slow
def test_ranks_measure_together(with_tests: None, tmp_path: Path) -> None:
    two = configs("parallel=ddp", "parallel.nproc=2")
    seen: list[dict[str, Any]] = []
    results, killed = measure_once(count, *two, tmp_path, {"by": 3}, seen.append)
    assert results == seen == [{"total": 6.0}, {"batch_size": two[1].batch_size}]
    assert killed is None
    results, _ = measure_once(die, *two, tmp_path, {"how": "memory"})
    assert results[-1]["no_room"] == "no memory for a tensor"
    killed = measure_once(die, *two, tmp_path, {"how": "signal"})
    assert killed == ([{"begun": True}], "SIGKILL")
    with pytest.raises(ReportedError, match=": of its own"):
        measure_once(die, *two, tmp_path, {"how": "error"})
