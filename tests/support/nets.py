"""A network for tests that compile: by itself, so that ranks can import it without what tests share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gated(nn.Module):
    """A layer of hand-written elementwise operations around two matrix products."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x)
        hidden = hidden * torch.sigmoid(hidden) + 0.5 * torch.tanh(hidden)
        out = self.norm(self.narrow(self.dropout(hidden)))
        return F.relu(out, inplace=True) + x


class Net(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.layers = nn.ModuleList(Gated(dropout=dropout) for _ in range(3))
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
