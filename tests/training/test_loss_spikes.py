"""A loss far above those before it is said once, with its step, and counted; noise is not."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from resuming import arm
from running import summary, train

from ptfast.training.loop.loss_accumulator import spike_above

WORDS = (
    *(
        "data=custom",
        "data._target_=toys.blobs",
        "data.val=0",
        "batch_size=10",
        "log_every=1steps",
        "steps=60",
    ),
    *("model=custom", "model._target_=toys.Spiking", "model.steps=[4,30,31,45]", "schedule=constant"),
    *("optimizer=sgd", "optimizer.lr=0.001", "optimizer.momentum=0", "run.resume=auto"),
    "callbacks=[{_target_: resuming.Armed, step: 38}]",
)


def test_spikes_are_said_once_and_counted(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*WORDS, "run.dir=whole") == 0
    said = capsys.readouterr()
    found = summary(Path("whole"))["loss_spikes"]
    lines = [line for line in (said.out + said.err).splitlines() if "has a spike at step" in line]
    assert found["count"] == 2  # the fourth step is too early, and two in a row are one
    assert len(lines) == 1  # the other is smaller
    assert "at step 30:" in lines[0]
    assert "gradients.clip_norm=1" in lines[0]
    assert found["largest"]["step"] == 30
    assert found["largest"]["loss"] > 8 * found["largest"]["usual"]
    assert "loss spikes  2, the largest at step" in said.out
    assert "Loss spikes: 2, the largest at step" in Path("whole/report.html").read_text()
    arm("SIGTERM")
    assert train(*WORDS, "run.dir=a") == 75
    assert summary(Path("a"))["loss_spikes"]["count"] == 1
    assert train(*WORDS, "run.dir=a") == 0
    assert summary(Path("a"))["loss_spikes"] == found


def test_noise_and_progress_are_no_spikes() -> None:
    random = Random(0)
    alarms = 0
    for number in range(100):
        losses = [2 * 0.99**step + 0.3 + random.gauss(0, 0.1) for step in range(200)]
        alarms += any(spike_above(losses[max(0, i - 50) : i], losses[i]) is not None for i in range(200))
        losses[150] = losses[149] + 5
        assert spike_above(losses[100:150], losses[150]) is not None, number
    assert alarms <= 2
    assert spike_above([0.0] * 20, 0.0) is None
    assert spike_above([1.0] * 20, 1.05) is None
