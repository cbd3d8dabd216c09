"""A network, datasets and a callback that tests hand to ptfast in Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset[Any]):
    """Points on a line: those of the second half are of class 1."""

    num_classes = 2

    def __init__(self, size: int = 60) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3,), index / self.size), int(index >= self.size / 2)


class Net(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Watch:
    """Notes the steps of evaluations, and calls a function before the step that follows one of them."""

    def __init__(self, act: Any = None, at: int = -1) -> None:
        self.seen: list[int] = []
        self.act, self.at = act, at

    def on_step(self, run: Any, step: int) -> None:
        if step == self.at:
            self.act()

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, float]) -> None:
        self.seen.append(step)
