"""The hot loop on a GPU: the host waits for the device only where it needs a figure to go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, same_bits
from test_numerics import figures
from toys import Lines

from ptfast.core.protocols import Callback
from ptfast.core.tensors import async_host_copy
from ptfast.training.fit import fit
from ptfast.training.loop.loss_accumulator import LossAccumulator, PendingLog
from ptfast.training.loop.step import Trainer

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
        'optimizer.groups=[{match: "*.bias", lr_scale: 2}, {match: "norm*", trains_until: 0}]',
    ),
    "mixed and growing": (
        *("model.drop_path=0.1", "augment.mixup=0.2", "augment.cutmix=1", "task.label_smoothing=0.1"),
        *("curriculum=image_size", "curriculum.over=20steps"),
        "dataloader.drop_last=true",
    ),
    "LAMB": ("optimizer=lamb", "precision=amp_fp16"),
    "checked": ("optimizer=lamb", "precision=bf16", "gradients=clip", "ema=ema", "numerics=skip"),
    "checked, fused": ("optimizer=adamw", "precision=bf16_true", "numerics=skip"),
    "checked under a scaler": ("optimizer=lamb", "precision=amp_fp16", "numerics=skip"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
def test_a_step_that_does_not_log_never_waits_for_the_device(words, tmp_path: Path, no_waits):
    run = build_run(tmp_path, "recipe=resnet_digits", "device=cuda", *words)
    trainer, clock = Trainer(run), run.clock
    batches = clock.waiting(run.train_loader.steps(0, run.total_steps))
    trainer.train(batches, 5)
    with no_waits():
        trainer.train(batches, 20)
    assert trainer.losses.read() > 0
    budget = clock.ledger()
    assert all(budget[cause] > 0 for cause in ("forward", "backward", "optimizer"))
    assert budget["unexplained"] < 0.02 * clock.elapsed_s()


class Guarded(Callback):
    """Forbids waits from step 4 up to the end of the evaluation after step 20, and notes what was logged."""

    def on_step(self, run: Any, step: int) -> None:
        if step in (4, 21):
            torch.cuda.set_sync_debug_mode("error")

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        torch.cuda.set_sync_debug_mode("default")


def reads_first(report: Callable[..., None]) -> Callable[..., None]:
    """`LossAccumulator.report` that waits for the figures, as on a CPU."""

    def read(losses: LossAccumulator, look: PendingLog, *, logs: bool) -> None:
        losses.receive(look)
        report(losses, look, logs=logs)

    return read


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_log_lines_and_evaluations_never_drain_the_device(
    precision: str, tmp_path: Path, no_waits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line is read once the steps after it are under way; an evaluation waits for its own sums alone."""
    words = (f"precision={precision}", "steps=40", "epochs=null", "log_every=5", "schedule=constant")
    words = (*words, "backend=deterministic")
    words = ("recipe=resnet_digits", *words, "eval.every=20steps", "saving.every=20steps")
    at_once, late = (build_run(tmp_path / name, *words, "device=cuda") for name in ("at once", "late"))
    at_once.logger, late.logger, late.callbacks = Lines(), Lines(), [Guarded()]
    with monkeypatch.context() as patched:
        patched.setattr(LossAccumulator, "report", reads_first(LossAccumulator.report))
        fit(at_once)
    reached: list[int] = []

    def noted(event: Any) -> None:
        reached.append(late.progress.step)
        event.synchronize()

    monkeypatch.setattr(async_host_copy, "wait_for", noted)
    fit(late)
    assert figures(late.logger) == figures(at_once.logger)
    assert same_bits(dict(late.model.state_dict()), dict(at_once.model.state_dict()))
    # The first two steps are logged by themselves, then each line after the next steps; an evaluation waits
    # for its metrics, for its sums, and for the line before it, which have arrived by then.
    assert reached == [1, 2, 10, 15, 20, 20, 20, 20, 30, 35, 40, 40, 40, 40]
