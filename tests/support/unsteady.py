"""Models and losses that write to their inputs, and models whose outputs in evaluation are unsteady."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """Two classes of four features, from weights of its own seed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class InPlace(Linear):
    """Normalizes its inputs where they lie."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sub_(0.1).div_(0.5))


class InPlaceUnseen(Linear):
    """The same, by a way that autograd does not see."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.sub_(0.1).div_(0.5)
        return self.layer(x)


class InPlaceLate(Linear):
    """Writes to its inputs from the second evaluation on."""

    evaluations = 0

    def train(self, mode: bool = True) -> InPlaceLate:
        self.evaluations += not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if self.training or self.evaluations < 4 else x.sub_(0.1))


def loss_in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    """Swaps the two classes, where the targets lie."""
    return F.cross_entropy(outputs, targets.neg_().add_(1))


class AlwaysDropout(Linear):
    """Drops features in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.5))


class OfBatch(Linear):
    """Normalizes by the statistics of the batch, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        # The norm takes no sample alone.
        return self.layer(self.norm(x) if len(x) > 1 else x - x.mean(0))
