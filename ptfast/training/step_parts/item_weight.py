"""The weight of one item's loss in the gradient of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ptfast.core.distributed import sum_over_ranks
from ptfast.core.protocols import StepBatch
from ptfast.core.run import Run


class ItemWeight:
    """One over the items of a step, times the ranks whose gradients are averaged, times fp16's scale.

    Scaling by the number of micro-batches instead is wrong wherever they differ in size.

    Args:
        run: on every rank.
        dtype: of the losses that are weighted.
        scaler: of fp16's gradients, None where they are not scaled.

    Cost: nothing where each sample is an item; else a sum over ranks, and no wait of the host.
    """

    def __init__(self, run: Run, dtype: torch.dtype, scaler: torch.amp.GradScaler | None) -> None:
        self._run, self._dtype, self._scaler = run, dtype, scaler
        self._counts_samples = getattr(run.task, "counts_samples", False)
        self._made: dict[int, Tensor] = {}

    def __call__(self, batch: StepBatch) -> Tensor:
        """A 0-d tensor on the device."""
        run = self._run
        num_items: Any = batch.num_samples
        if not self._counts_samples:
            run.clock.to("forward")
            num_items = sum(run.task.count(data, n) for data, n in batch.micro_batches if n)
            if run.ranks.distributed:
                zero = torch.zeros((), dtype=torch.int64, device=run.device)
                run.clock.to("gradient_sync")
                num_items = sum_over_ranks(zero + num_items, run.ranks)
        if isinstance(num_items, Tensor):
            weight = run.ranks.num_ranks / num_items.clamp(min=1).to(self._dtype)
        elif (weight := self._made.get(num_items)) is None:
            value = run.ranks.num_ranks / max(num_items, 1)
            weight = self._made[num_items] = torch.full((), value, device=run.device, dtype=self._dtype)
        return weight if self._scaler is None else self._scaler.scale(weight)
