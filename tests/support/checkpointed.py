"""Models that are checkpointed, and steps of them, for the tests of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from running import same_bits
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from ptfast.models.gpt import Gpt
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.checkpointing.activation_checkpointing import apply_checkpointing

MODES = ("full", "every_n", "selective")
SEED = 5


class Odd(nn.Module):
    """A block with every kind of state that a second forward pass could spoil."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(6, 6))
        self.norm = norm
        self.act = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("table", torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = x + self.dropout(self.act(self.norm(self.linear(x)))) * scale * self.table
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None), nn.SyncBatchNorm(6), nn.BatchNorm1d(6)]
        self.blocks = nn.ModuleList(Odd(norm) for norm in norms)
        self.blocks[3].norm.requires_grad_(False)

    def train(self, mode: bool = True) -> OddNet:
        super().train(mode)
        self.blocks[3].norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=x.new_tensor(0.5))
        return x


def resnet() -> nn.Module:
    return ResNetCifar(4, 3, depth=14, width=4)


def gpt() -> nn.Module:
    return Gpt(11, 12, width=16, depth=3, heads=2, dropout=0.2)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "batch norm": (resnet, lambda: torch.randn(4, 3, 8, 8)),
    "dropout": (gpt, lambda: torch.randint(11, (2, 12))),
    "odd": (OddNet, lambda: torch.randn(5, 6)),
}


def pair(make: Callable[[], nn.Module], mode: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model without and with checkpointing."""
    torch.manual_seed(0)
    plain = make().train()
    other = copy.deepcopy(plain)
    apply_checkpointing(other, Checkpointing(mode=mode, every=2, **options))
    return plain, other


def step(model: nn.Module, inputs: Tensor, seed: int = SEED) -> Tensor:
    """Forward and backward of one micro-batch, seeded like the loop's."""
    torch.manual_seed(seed)
    loss = model(inputs).float().square().sum()
    loss.backward()
    return torch.stack([loss.detach(), torch.rand((), device=loss.device)])


def assert_same(plain: nn.Module, other: nn.Module) -> None:
    assert same_bits(plain.state_dict(), other.state_dict())
    for (name, one), (other_name, two) in zip(
        plain.named_parameters(), other.named_parameters(), strict=True
    ):
        assert name == other_name
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.equal(one.grad, two.grad), name


@contextlib.contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Counts the bytes that a forward pass saves for the backward pass, a storage once."""
    found: list[int] = []
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    found.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
