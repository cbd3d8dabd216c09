"""Blocks of a model: found where a class recurs, or by pattern."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptfast.core.errors import ConfigError
from ptfast.models.gpt import Gpt
from ptfast.models.mlp import Mlp
from ptfast.models.resnet9 import ResNet9
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.models.text_encoder import TextEncoder
from ptfast.techniques.repeated_blocks import find_blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.feed = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)))


def test_our_models() -> None:
    assert list(find_blocks(ResNetCifar(10, depth=20))) == [f"blocks.{i}" for i in range(9)]
    assert list(find_blocks(Gpt(5, 4, width=8, depth=3, heads=2))) == [f"blocks.{i}" for i in range(3)]
    assert list(find_blocks(TextEncoder(5, 2, width=8, depth=2, heads=2))) == ["blocks.0", "blocks.1"]
    convolutions = ["residual1.0", "residual1.1", "stage2.0", "stage3.0", "residual3.0", "residual3.1"]
    assert list(find_blocks(ResNet9(10, width=4))) == ["stage1.0", *convolutions]


@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        ("resnet50", 16, "layer1.0", "layer4.2"),
        ("vit_b_16", 12, "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_11"),
    ],
)
def test_torchvision(name: str, count: int, first: str, last: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        blocks = find_blocks(getattr(torchvision.models, name)(weights=None))
    assert (len(blocks), next(iter(blocks)), list(blocks)[-1]) == (count, first, last)
    assert len({type(block) for block in blocks.values()}) == 1


def test_layers_without_parts_are_no_blocks() -> None:
    assert find_blocks(Mlp((4,), 2, hidden=[3, 3, 3])) == {}
    assert find_blocks(nn.Linear(2, 2)) == {}


def test_one_of_a_class_is_no_block() -> None:
    assert find_blocks(nn.Sequential(Layer(), nn.Linear(2, 2))) == {}


def test_stages_are_looked_into_and_blocks_are_not() -> None:
    model = nn.Sequential(Stage(2), Stage(3))
    assert list(find_blocks(model)) == [f"0.layers.{i}" for i in range(2)] + [
        f"1.layers.{i}" for i in range(3)
    ]
    lone = nn.Sequential(nn.Sequential(Layer()), nn.Sequential(Layer(), Layer()))
    assert list(find_blocks(lone)) == ["0.0", "1.0", "1.1"]


def test_a_shared_block_is_named_once() -> None:
    layer = Layer()
    assert find_blocks(nn.ModuleList([layer, layer, layer])) == {"0": layer}


def test_patterns() -> None:
    model = nn.Sequential(Stage(2), Stage(1))
    assert find_blocks(model, "1") == {"1": model[1]}
    assert list(find_blocks(model, ["*.layers.*"])) == ["0.layers.0", "0.layers.1", "1.layers.0"]
    assert list(find_blocks(model, ["1", "*.norm"])) == ["0.norm", "1"]


def test_a_pattern_without_a_match() -> None:
    with pytest.raises(
        ConfigError, match=r"checkpointing\.blocks=layer1\.\*: .*Did you mean layers\?"
    ) as caught:
        find_blocks(nn.ModuleDict({"layers": Layer()}), ["layer1.*"], key="checkpointing.blocks")
    assert caught.value.code == "C005"
