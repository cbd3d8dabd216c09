"""Runs that are killed on purpose, and what they have in common with those that are not."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from running import records, same_bits, summary, train, training_state, weights
from torch.utils.data import TensorDataset
from toys import blobs

from ptfast.core.protocols import Callback

MODEL = ("model.hidden=[16]", "model.dropout=0.3", "augment.crop_padding=1", "augment.flip=true")
RHYTHM = ("epochs=2", "batch_size=128", "log_every=5", "saving.every=4steps", "eval.every=6steps")
KILLED = (*RHYTHM, "callbacks=[{_target_: resuming.Armed, step: 17}]", "run.resume=auto")
BASE = (*MODEL, *KILLED)
"""Two epochs of 13 steps. The callback acts if there is a file `armed` that names a signal."""


class Armed(Callback):
    """Sends this process the signal that a file `armed` names, once, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, step: int) -> None:
        file = Path("armed")
        if step == self.step and file.exists():
            number = signal.Signals[file.read_text()]
            file.unlink()
            os.kill(os.getpid(), number)


class Counter(Callback):
    """Remembers how many steps it has seen."""

    def __init__(self) -> None:
        self.seen = torch.zeros(())

    def on_step(self, run: Any, step: int) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])


def guarded(api_key: str) -> TensorDataset:
    """Data behind a password."""
    assert api_key == "open sesame"
    return blobs()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of `BASE`: `whole`, and `a`, which was stopped after step 17."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(*BASE, "run.dir=whole") == 0
        arm("SIGTERM")
        assert train(*BASE, "run.dir=a") == 75
    return folder


@pytest.fixture
def whole(runs: Path, in_tmp: Path) -> Path:
    """The whole run, in the test's folder."""
    return shutil.copytree(runs / "whole", in_tmp / "whole", symlinks=True)


@pytest.fixture
def stopped(runs: Path, in_tmp: Path) -> Path:
    """The stopped run, in the test's folder."""
    return shutil.copytree(runs / "a", in_tmp / "a", symlinks=True)


def arm(name: str) -> None:
    Path("armed").write_text(name)


def train_in_child(*words: str) -> int:
    """As `train`, in a process of its own that a signal may kill; negative is the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(train(*words))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def assert_same_run(left: Path, right: Path) -> None:
    """Same final weights, optimizer, averages and figures."""
    assert same_bits(weights(left), weights(right))
    assert same_bits(training_state(left), training_state(right))
    assert records(left) == records(right)
    assert (summary(left)["val"], summary(left)["best"]) == (summary(right)["val"], summary(right)["best"])
