"""Hugging Face Accelerate around the loop by hand."""

from __future__ import annotations

from torch import nn

from peers import LOG_STEPS, Clock, Job
from peers.by_hand import evaluate


def train(job: Job, clock: Clock) -> nn.Module:
    """Train and evaluate `job`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device == "cpu", mixed_precision="bf16" if job.bf16 else "no")
    model = job.build_model()
    clock.watch(model)
    optimizer = job.build_optimizer(model)
    batches = job.batches("train")
    schedule = job.build_schedule(optimizer, job.epochs * len(batches))
    wrapped, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    val_batches = accelerator.prepare(job.batches("val")) if job.evaluates else None
    step = 0
    for _ in range(job.epochs):
        wrapped.train()
        for inputs, targets in batches:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = job.loss(wrapped(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            step += 1
            if step % LOG_STEPS == 0:
                loss.item()
        if val_batches is not None:
            clock.evaluated(evaluate(wrapped, job, val_batches))
    return model
