"""Shared by the tests of optimizers: numbers, a net, and the optimizers of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ptfast.optim.lamb import Lamb
from ptfast.optim.lars import Lars
from ptfast.optim.muon import Muon
from ptfast.optim.novograd import Novograd

OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lars": functools.partial(Lars, lr=1.0, trust=0.02, weight_decay=1e-3),
    "lars-nesterov": functools.partial(Lars, lr=1.0, trust=0.02, weight_decay=1e-3, nesterov=True),
    "lamb": functools.partial(Lamb, lr=0.02),
    "nvlamb": functools.partial(Lamb, lr=0.02, max_grad_norm=1.0),
    "novograd": functools.partial(Novograd, lr=0.01, weight_decay=1e-3),
    "muon": functools.partial(Muon, lr=0.02, ends=True),
    "muon-sgd": functools.partial(Muon, lr=0.02, ends=True, rest="sgd", normalize=True),
}
LAYERWISE = [name for name in OURS if not name.startswith("muon")]


def wave(shape: tuple[int, ...], phase: float, scale: float = 1.0) -> Tensor:
    """Numbers that look random and are the same everywhere."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64) * 1.7 + phase).sin().mul(scale).reshape(shape)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train on one batch; its loss before the last step."""
    dtype = next(model.parameters()).dtype
    torch.manual_seed(1)
    inputs, targets = torch.randn(32, 2, 6, 6), torch.randint(3, (32,))
    value = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(dtype)).float(), targets)
        loss.backward()
        optimizer.step()
        value = loss.item()
    return value


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
