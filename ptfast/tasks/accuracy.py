"""Accuracy over the items that count; imports torchmetrics, so it is imported only where metrics are made."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from ptfast.run import IGNORE_INDEX


class Accuracy(Metric):
    """Share of the targets that are not ignored whose class is among the `top_k` likeliest.

    torchmetrics' own accuracy picks out the items that count, and so makes the host wait for their number.
    """

    full_state_update = False
    hits: Tensor
    items: Tensor

    def __init__(self, top_k: int = 1) -> None:
        super().__init__()
        self.top_k = top_k
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("items", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count outputs (..., num_classes) against class indices (...)."""
        if self.top_k == 1:
            hits = outputs.argmax(-1) == targets
        else:
            hits = outputs.topk(self.top_k, dim=-1).indices == targets[..., None]
        self.hits += hits.sum()
        self.items += (targets != IGNORE_INDEX).sum()

    def compute(self) -> Tensor:
        """0-d float; 0 where nothing counts."""
        return self.hits / self.items.clamp(min=1)
