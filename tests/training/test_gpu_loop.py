"""The hot loop on a GPU: the host waits for the device only where figures are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import build_run

from ptfast.training.step import Trainer

SETTINGS = {
    "fp32": ("optimizer=sgd_cifar", "precision=fp32"),
    "fp16 with a scaler": ("optimizer=adamw", "precision=amp_fp16"),
    "bf16, clipped": ("optimizer=adamw", "precision=bf16", "gradients=clip"),
    "onecycle, averaged": ("optimizer=adamw", "schedule=onecycle", "ema=ema"),
    "accumulated": ("optimizer=sgd", "gradients.accumulate=4"),
    "clipped by unit, norm logged": ("optimizer=adamw", "gradients=adaptive", "gradients.log_norm=true"),
    "groups under a scaler": (
        "optimizer=sgd",
        "precision=amp_fp16",
        "gradients.log_norm=true",
        'optimizer.groups=[{match: "*.bias", lr_scale: 2, clip_norm: 1}, {match: "norm*", trains_until: 0}]',
    ),
    "mixed and growing": (
        *("model.drop_path=0.1", "augment.mixup=0.2", "augment.cutmix=1", "task.label_smoothing=0.1"),
        *("curriculum=image_size", "curriculum.batch_size_from=16", "curriculum.over=20steps"),
        "dataloader.last=drop",
    ),
    "LAMB": ("optimizer=lamb", "precision=amp_fp16"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
def test_a_step_that_does_not_log_never_waits_for_the_device(words, tmp_path: Path, no_waits):
    run = build_run(tmp_path, "+recipe=resnet_digits", "device=cuda", *words)
    trainer, clock = Trainer(run), run.clock
    batches = clock.waiting(run.train_loader.steps(0, run.total_steps))
    trainer.train(batches, 5)
    with no_waits():
        trainer.train(batches, 20)
    assert trainer.window.read() > 0
    budget = clock.ledger()
    assert all(budget[cause] > 0 for cause in ("forward", "backward", "optimizer"))
    assert budget["unexplained"] < 0.02 * clock.elapsed_s()
