"""Trainers to compare, a file each: `train(job, clock)` trains a `Job` as that peer's own docs recommend.

Torch is not imported here: ptfast sets up OpenMP's threads before it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import DataLoader, Dataset

LOG_STEPS = 50
"""Steps between two reads of the loss."""
WARM_UP_STEPS = 10
"""Steps of a process that say little about its speed: caches fill, and ptfast counts operators."""


@dataclass
class Clock:
    """Moments of one training; a hook of the model reads all peers alike.

    With `counts_processor` they are seconds of this process's processor time, which a busy machine hardly
    changes; those of `time.monotonic()` otherwise.
    """

    counts_processor: bool = False

    steps: list[tuple[float, int]] = field(default_factory=list)
    """When each training forward pass began, and its samples."""
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    """When each evaluation ended, and its figure."""

    def watch(self, model: nn.Module) -> None:
        """Note the forward passes of `model` from now on."""
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if model.training:
            self.steps.append((self._now_s(), len(inputs[0])))

    def _now_s(self) -> float:
        return time.process_time() if self.counts_processor else time.monotonic()

    def evaluated(self, figure: float) -> None:
        """Note the figure of an evaluation that has just ended."""
        self.evaluations.append((self._now_s(), figure))

    def samples_per_s(self) -> float:
        """Samples a second of the steps between evaluations, loading and optimizer included."""
        samples, seconds = 0, 0.0
        first = min(WARM_UP_STEPS, len(self.steps) // 2)
        for (start, size), (stop, _) in pairwise(self.steps[first:]):
            if not any(start < moment < stop for moment, _ in self.evaluations):
                samples, seconds = samples + size, seconds + stop - start
        return samples / seconds


@dataclass
class Job:
    """What every peer trains; a subclass builds its model and its samples."""

    folder: Path
    """Where the peer may write."""
    batch_size: int
    epochs: int
    lr: float
    bf16: bool = False
    device: str = "cpu"
    """Or "cuda"."""
    evaluates: bool = True
    """Evaluate after each epoch."""

    groups_lengths = False
    """Samples are texts of unequal length."""
    counts_correct = True
    """Evaluations report accuracy; the mean loss otherwise."""
    workers = 0
    """Loader processes."""

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def samples(self, split: str) -> Dataset[Any]:
        """The samples of `train` or `val`: (inputs, target) each."""
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        from torch.utils.data import default_collate

        return default_collate(samples)

    def batches(self, split: str) -> DataLoader[Any]:
        """The batches as torch's tutorials make them."""
        from torch.utils.data import DataLoader

        return DataLoader(
            self.samples(split),
            batch_size=self.batch_size,
            shuffle=split == "train",
            num_workers=self.workers,
            pin_memory=self.device != "cpu",
            persistent_workers=self.workers > 0,
            collate_fn=self.collate,
        )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch."""
        import torch.nn.functional as F

        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        import torch

        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.0, fused=True)

    def build_schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """The rate falling to 0 in a straight line."""
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, lambda step: 1 - step / total_steps)
