"""A run that makes no progress says where it stands, and ends where that was asked for."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from resuming import train_in_child
from running import records, train

from ptfast.core.protocols import Callback
from ptfast.training.hangs import hang_watch

WORDS = ("recipe=resnet_digits", "model=mlp", "steps=6", "epochs=null", "run.dir=r", "log_every=2steps")


class Sleeper(Callback):
    """Sleeps after step 3, with Python's lock or without."""

    def __init__(self, seconds: float, holds: bool = False) -> None:
        self.seconds, self.sleep = seconds, ctypes.PyDLL(None).sleep if holds else time.sleep

    def on_step(self, run: Any, step: int) -> None:
        if step == 3:
            self.sleep(int(self.seconds))


def sleeping(seconds: float, holds: bool = False) -> str:
    return f"callbacks=[{{_target_: test_hang_watch.Sleeper, seconds: {seconds}, holds: {holds}}}]"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TICK_S": 0.1, "LEAST_S": 0.5, "TIMES": 0, "LAST_S": 0.5}.items():
        monkeypatch.setattr(hang_watch, name, value)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("holds", [False, True])
def test_it_says_where_it_stands_and_goes_on(
    holds: bool, in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "collectives_of_gpus", lambda: b"recorded")
    assert train(*WORDS, sleeping(1 + holds, holds)) == 0
    assert records(Path("r"))[-1]["step"] == 6
    assert "in on_step" in Path("r/hang-rank0.txt").read_text()
    if not holds:
        assert Path("r/nccl_trace_rank_0").read_bytes() == b"recorded"
        assert "at step 3, in callbacks; the stack of every thread is in" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("hurried")
def test_it_ends_after_its_timeout(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun_s = time.monotonic()
    assert train(*WORDS, sleeping(60), "run.hang_timeout=1s", "saving.every=1steps") == 7
    assert time.monotonic() - begun_s < 30
    assert "error[P001]: run.hang_timeout (command line): no progress for" in "".join(capsys.readouterr())
    assert Path("r/saved/step-2").is_dir()


class Stuck(Callback):
    """Never returns from step 3, as a collective whose other rank is gone."""

    def on_step(self, run: Any, step: int) -> None:
        while step == 3:
            with suppress(BaseException):
                time.sleep(60)


@pytest.mark.usefixtures("hurried")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_code_that_cannot_be_woken_is_left(in_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stuck = "callbacks=[{_target_: test_hang_watch.Stuck}]"
    assert train_in_child(*WORDS, stuck, "run.hang_timeout=1s") == 7
    assert "error[P001]: run.hang_timeout: no progress for" in capfd.readouterr().err


@pytest.mark.usefixtures("hurried")
def test_a_run_that_does_not_hang_leaves_no_file(in_tmp: Path) -> None:
    assert train(*WORDS) == 0
    assert not list(Path("r").glob("hang*"))
