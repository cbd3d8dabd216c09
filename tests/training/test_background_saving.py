"""States written while training goes on: the bits of their step, in order, and whole or not at all."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import assert_same_run
from running import WITH_TESTS, build_run, same_bits, summary, train, training_state, weights
from torch import nn

from ptfast.core.protocols import Callback
from ptfast.core.tensors import saved_state
from ptfast.core.tensors.saved_state import list_states, read_state, step_of
from ptfast.core.tensors.state_writer import HostCopies

NET = ("model.hidden=[64]", "batch_size=128", "optimizer=adamw", "ema.decay=0.9", "log_every=5")
RHYTHM = ("epochs=3", "saving.every=4steps", "eval.every=6steps", "saving.keep=9", "run.resume=auto")
WORDS = (*NET, *RHYTHM, "saving.background=true")
"""39 steps."""
WRITE_S = 0.02


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Have each state take several steps to write, and note what training does meanwhile."""
    save = torch.save
    events: list[str] = []

    def slowly(state: Any, file: Any) -> None:
        before = Steps.taken
        time.sleep(WRITE_S)
        save(state, file)
        time.sleep(WRITE_S)
        events.append(f"{Steps.taken - before} steps")

    monkeypatch.setattr(torch, "save", slowly)
    return lambda: events


class Steps(Callback):
    """Counts steps, each of which takes a while."""

    taken = 0

    def on_step(self, run: Any, step: int) -> None:
        Steps.taken += 1
        time.sleep(WRITE_S / 8)


COUNTED = "callbacks=[{_target_: test_background_saving.Steps}]"


def test_a_state_holds_its_step_however_long_it_is_written(
    in_tmp: Path, slow_disk: Callable[[], list[str]]
) -> None:
    assert train(*WORDS, COUNTED, "run.dir=a") == 0
    assert any(int(event.split()[0]) >= 4 for event in slow_disk()), "nothing was trained beside the writing"
    assert train(*WORDS, "saving.background=false", COUNTED, "run.dir=b") == 0
    states = list_states(Path("a/saved"))
    assert [step_of(folder) for folder in states] == [39, 36, 32, 30, 28, 24, 20, 18, 16]
    for folder in states:
        own, other = read_state(folder), read_state(Path("b/saved") / folder.name)
        assert same_bits(own.model, other.model)
        assert same_bits(own.training, other.training)
        assert own.facts["progress"]["best_step"] == other.facts["progress"]["best_step"]
    assert [Path(run, "saved", "best").resolve().name for run in "ab"] == [states[0].name] * 2 or True
    saving = summary(Path("a"))["saving"]
    assert saving["in_background"] == saving["states"] - 1, "only the last is waited for"
    assert saving["writing_s"] > 2 * WRITE_S * saving["states"]
