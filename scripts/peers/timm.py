"""timm: its loader with prefetching, and the loop of its train.py; images only."""

from __future__ import annotations

import torch
from torch import nn

from peers import Clock, Job
from peers.by_hand import evaluate
from peers.tasks import ImageJob


def train(job: Job, clock: Clock) -> nn.Module:
    """Train and evaluate `job`."""
    from timm.data.dataset import ImageDataset
    from timm.data.loader import create_loader
    from timm.data.transforms import ToNumpy
    from timm.task import ClassificationTask
    from torchvision.transforms import v2

    assert isinstance(job, ImageJob)
    device = torch.device(job.device)
    loaders = {}
    for split in ("train", "val"):
        samples = ImageDataset(str(job.tree / split))
        loaders[split] = create_loader(
            samples,
            input_size=job.side,
            batch_size=job.batch_size,
            is_training=split == "train",
            color_jitter=0.0,
            interpolation="bilinear",
            crop_pct=1.0,
            num_workers=job.workers,
            device=device,
        )
        if job.side == 32 and split == "train":
            samples.transform = v2.Compose([*job.train_moves(), ToNumpy()])
    model = job.build_model().to(device)
    clock.watch(model)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=device, verbose=False)
    optimizer = job.build_optimizer(model)
    schedule = job.build_schedule(optimizer, job.epochs * len(loaders["train"]))
    for _ in range(job.epochs):
        task.train()
        mean = 0.0
        for inputs, targets in loaders["train"]:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
            with torch.autocast(job.device, torch.bfloat16, enabled=job.bf16):
                loss = task(inputs, targets)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean += loss.item()
            schedule.step()
        if job.evaluates:
            clock.evaluated(evaluate(model, job, loaders["val"]))
    return model
