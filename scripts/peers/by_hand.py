"""The loop of torch's tutorials, with what its tuning guide adds: autocast, a fused optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from peers import LOG_STEPS, Clock, Job


def train(job: Job, clock: Clock) -> nn.Module:
    """Train and evaluate `job`."""
    model = job.build_model().to(job.device)
    clock.watch(model)
    batches, val_batches = job.batches("train"), job.batches("val") if job.evaluates else None
    optimizer = job.build_optimizer(model)
    schedule = job.build_schedule(optimizer, job.epochs * len(batches))
    autocast = torch.autocast(job.device, torch.bfloat16) if job.bf16 else nullcontext()
    step = 0
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in on_device(batches, job):
            optimizer.zero_grad()
            with autocast:
                loss = job.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % LOG_STEPS == 0:
                loss.item()
        if val_batches is not None:
            clock.evaluated(evaluate(model, job, val_batches))
    return model


def on_device(batches: Any, job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Copy batches to the job's device; from page-locked memory nothing waits for that."""
    for inputs, targets in batches:
        yield inputs.to(job.device, non_blocking=True), targets.to(job.device, non_blocking=True)


def evaluate(model: nn.Module, job: Job, batches: Any) -> float:
    """The accuracy of `model`, or its mean loss where that is the figure of `job`."""
    model.eval()
    total, count = torch.zeros((), device=job.device), 0
    with torch.no_grad(), torch.autocast(job.device, torch.bfloat16, enabled=job.bf16):
        for inputs, targets in on_device(batches, job):
            total += score(job, model(inputs), targets) * len(targets)
            count += len(targets)
    return total.item() / count


def score(job: Job, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The figure of one batch."""
    if job.counts_correct:
        return (outputs.argmax(-1) == targets).float().mean()
    return job.loss(outputs, targets).float()
