"""Checkpoints of the version before: a run that was cut off under it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from running import summary, train, training_state, weights

from ptfast.config.read import load_config

STORED = Path(__file__).parent / "golden" / "version_0_1"
WORDS = (
    *("data=custom", "data._target_=toys.Stream", "data.num_samples=200", "model=mlp", "model.hidden=[4]"),
    *("batch_size=16", "steps=20", "epochs=null", "saving.every=5steps", "saving.keep=9", "log_every=5"),
    *("ema=ema", "ema.decay=0.9", "device=cpu", "dataloader=plain", "schedule=constant", "optimizer=adamw"),
    *("seed=1", "callbacks=[{_target_: resuming.Counter}]"),
)


def test_a_run_of_version_0_1_goes_on(in_tmp: Path) -> None:
    """Its stream, average and callback as well: it ends where an uninterrupted run of that version did."""
    shutil.copytree(STORED, "a", ignore=shutil.ignore_patterns("finished.pt"))
    assert load_config(Path("a/config.yaml"), trusted=True)[1].batch_size == 16
    assert train(*WORDS, "run.dir=a", "run.resume=auto") == 0
    assert summary(Path("a"))["steps"] == 20
    torch.testing.assert_close(weights(Path("a")), torch.load(STORED / "finished.pt", weights_only=True))
    assert training_state(Path("a"))["ema"]["updates"] == 20
    assert int(training_state(Path("a"))["callbacks"][0]["seen"]) == 20
