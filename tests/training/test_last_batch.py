"""An epoch's last batch that leaves a single sample for BatchNorm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import summary, train

WORDS = ("data=arrays", "data.path=a.npz", "data.val=0", "model=resnet20", "model.width=2", "device=cpu")


@pytest.mark.parametrize(
    ("size", "batch_size", "micro_batches", "steps", "note"),
    [(13, 4, 1, 3, True), (14, 4, 1, 4, False), (9, 4, 2, 2, True), (13, 4, 2, 3, True)],
)
def test_a_last_micro_batch_of_one_is_left_out_under_batchnorm_with_one_note(
    in_tmp: Path,
    capsys: pytest.CaptureFixture[str],
    size: int,
    batch_size: int,
    micro_batches: int,
    steps: int,
    note: bool,
):
    images = np.random.default_rng(0).integers(0, 256, (size, 8, 8, 1), dtype=np.uint8)
    np.savez("a.npz", x=images, y=np.arange(size) % 2)
    sizes = (f"batch_size={batch_size}", f"gradients.accumulate={micro_batches}", "epochs=1")
    assert train(*WORDS, *sizes, "run.dir=run") == 0
    assert summary(Path("run"))["steps"] == steps
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("dataloader.drop_last=true: ") == note


def test_other_models_keep_a_last_batch_of_one(in_tmp: Path):
    np.savez("a.npz", x=np.eye(13, 3, dtype=np.float32), y=np.arange(13) % 2)
    words = ("data=arrays", "data.path=a.npz", "data.val=0", "model=mlp", "device=cpu")
    assert train(*words, "batch_size=4", "epochs=1", "run.dir=run") == 0
    assert summary(Path("run"))["steps"] == 4
