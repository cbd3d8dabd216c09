"""Accuracy over the items that count; imports torchmetrics, so it is imported only where metrics are made."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from ptfast.run import IGNORE_INDEX


class Accuracy(Metric):
    """Share of right predictions among the targets that are not ignored.

    torchmetrics' own accuracy picks out the items that count, and so makes the host wait for their number.
    """

    full_state_update = False
    hits: Tensor
    items: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("items", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count class indices against targets of the same shape."""
        self.hits += (predicted == targets).sum()
        self.items += (targets != IGNORE_INDEX).sum()

    def compute(self) -> Tensor:
        """0-d float; 0 where nothing counts."""
        return self.hits / self.items.clamp(min=1)
